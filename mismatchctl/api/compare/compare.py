"""Compare several runs with the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare.changes import (
    UnadjustedChange,
    adjust_p_values,
    compare_growth,
    compare_metrics,
    decompose_by_bin,
    decompose_by_step,
    decompose_by_value,
)
from mismatchctl.api.compare.comparison import (
    Change,
    Comparison,
    Contrast,
    Decomposition,
    Side,
    contrast_details,
    contrast_headline,
)
from mismatchctl.api.compare.sources import ComparedRun, pair_tokens, read_sources
from mismatchctl.corrections.model import Correction
from mismatchctl.data.engines import Engine
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.reader import Dump, open_dump
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.stores import escape_unprintable
from mismatchctl.results.model import Result
from mismatchctl.stats.samples import ClusterSample, build_run_sample


def compare(
    paths: Sequence[DumpSource | Result],
    *,
    corrections: Sequence[Correction] = (),
    rename: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    on_bad: Literal["error", "skip", "mask"] = "error",
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
    micro_batch_size: int | None = None,
) -> Comparison:
    """Compare every run of every argument with the first one.

    Args:
        paths: dumps or Results, recognized by content.
        corrections: corrections to analyze dumps with. Results have their own.
        rename: canonical column -> name in the dumps.
        by: columns to break dumps down by. Results have their own breakdowns.
        on_bad: "error" stops at bad rows and files of dumps, "skip" leaves them out and counts them.
        threads: units read at the same time in this process, without an `engine`.
        progress: called with (tokens read, tokens expected) of each dump.
        engine: where units are read. The result does not depend on it.
        micro_batch_size: rows of a step in each micro-batch, without a column that names them.

    Raises:
        DataError: an argument cannot be read, or there is only one run.
        ConfigError: settings do not fit each other or the dumps.
    """

    def analyze_source(path: DumpSource) -> Result:
        return analyze(
            [path], corrections, rename=rename, by=by, on_bad=on_bad, threads=threads, engine=engine, progress=progress,
            micro_batch_size=micro_batch_size, every_cluster=True, findings=False,
        )  # fmt: skip

    def reopen(path: DumpSource) -> Dump:
        return open_dump([path], rename=rename or {}, aliases=column_aliases(), on_bad=on_bad)

    sources, warnings = read_sources(paths, analyze_source, reopen)
    samples = [build_run_sample(source.run) for source in sources]
    first, *others = sources
    pairs = [(samples[0], sample) for sample in samples[1:]]
    both = list(zip(others, pairs, strict=True))
    changes = adjust_p_values(
        [compare_metrics(first.run.overall.metrics, other.run.overall.metrics, pair) for other, pair in both]
    )
    corrected = adjust_p_values([_compare_corrections(first, other, pair) for other, pair in both])
    return Comparison(
        warnings=warnings,
        sides=[_build_side(source, sample) for source, sample in zip(sources, samples, strict=True)],
        contrasts=[
            _build_contrast(first, other, pair, *found)
            for other, pair, *found in zip(others, pairs, changes, corrected, strict=True)
        ],
        corrections=list(first.corrections),
    )


def _build_side(source: ComparedRun, sample: ClusterSample) -> Side:
    return Side(
        name=source.name,
        source=escape_unprintable(source.path),
        kind="result" if source.reopen is None else "dump",
        clusters_by=source.run.clusters.by,
        clusters=len(sample),
        metrics=source.run.overall.metrics,
        distribution=source.run.distribution,
        breakdowns=source.run.breakdowns,
    )


def _compare_corrections(
    first: ComparedRun, other: ComparedRun, samples: tuple[ClusterSample, ClusterSample]
) -> dict[str, UnadjustedChange]:
    """Compare the metrics of every correction with equal definitions on the two sides, as `name/key`."""
    return {
        f"{correction.name}/{key}": tested
        for correction in first.corrections
        if correction in other.corrections
        for key, tested in compare_metrics(
            first.run.overall.corrections[correction.name],
            other.run.overall.corrections[correction.name],
            samples,
            correction,
        ).items()
    }


def _build_contrast(
    first: ComparedRun,
    other: ComparedRun,
    samples: tuple[ClusterSample, ClusterSample],
    changes: dict[str, Change],
    corrected: dict[str, Change],
) -> Contrast:
    shared, same = samples[0].count_common(samples[1]), samples[0].has_same_tokens(samples[1])
    tokens, why = pair_tokens(first, other)
    found = Contrast(
        other=other.name,
        clusters_shared=shared,
        same_tokens=same,
        paired=_describe_pairing(first, samples, shared, same=same),
        changes=changes,
        corrections=_group_by_correction(corrected),
        decompositions=_build_decompositions(first, other),
        tokens=tokens,
        tokens_status=why,
        growth=compare_growth(first.run, other.run),
    )
    found.says = [contrast_headline(found), *contrast_details(found)]
    return found


def _group_by_correction(changes: Mapping[str, Change]) -> dict[str, dict[str, Change]]:
    """Regroup `name/key` -> change as name -> key -> change. A name may contain slashes, a key does not."""
    found: dict[str, dict[str, Change]] = {}
    for place, change in changes.items():
        name, _, key = place.rpartition("/")
        found.setdefault(name, {})[key] = change
    return found


def _describe_pairing(
    first: ComparedRun, samples: tuple[ClusterSample, ClusterSample], shared: int, *, same: bool
) -> str:
    """Describe which clusters the two sides share."""
    what = f"{first.run.clusters.by}s" if first.run.clusters.by != "content" else "sequences"
    if same:
        return f"paired: the same responses to {shared:,} {what} on both sides"
    if shared:
        return f"paired: {shared:,} {what} in common (of {len(samples[0]):,} and {len(samples[1]):,})"
    return f"not paired: no {what} in common"


def _build_decompositions(first: ComparedRun, other: ComparedRun) -> list[Decomposition]:
    steps = decompose_by_step(first.run, other.run)
    values = [decompose_by_value(column, first.run, other.run) for column in first.run.by if column in other.run.by]
    bins = [
        decompose_by_bin(breakdown, other.run.breakdowns[name])
        for name, breakdown in first.run.breakdowns.items()
        if name in other.run.breakdowns
    ]
    return [found for found in (steps, *values, *bins) if found is not None]
