"""Compare several runs with the first run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare import comparison as model
from mismatchctl.api.scan import ReadOptions
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.validation import replace_nonfinite
from mismatchctl.corrections.model import Correction
from mismatchctl.data.formats import MemoryTable
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.io.stores import escape_unprintable, normalize_path
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.results.growth import Label
from mismatchctl.results.model import Breakdown, Groups, Result, RunResult, Value, storage_types
from mismatchctl.results.reader import is_result, read_result
from mismatchctl.results.summary import fit_run_growth, prompt_notes, skipped_data_notes
from mismatchctl.stats.comparison import Allowance, compare_samples, find_layers, linear_statistic
from mismatchctl.stats.resampling import SampleExchange, adjust_fdr, adjust_holm, percentile_interval, resample_metrics
from mismatchctl.stats.samples import (
    ClusterSample,
    TableMetric,
    build_run_sample,
    build_step_sample,
    build_value_sample,
    find_metric,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def compare(
    paths: Sequence[DumpSource | Result],
    *,
    corrections: Sequence[Correction] = (),
    by: Sequence[str] = (),
    **options: Unpack[ReadOptions],
) -> model.Comparison:
    """Compare every run after the first with the first run. A dump or Result may contain several runs."""
    read = partial(analyze, corrections=corrections, by=by, every_cluster=True, findings=False, **options)
    sources, warnings = _read_sources(paths, read)
    samples = [build_run_sample(source.run) for source in sources]
    first, *others = sources
    pairs = [(samples[0], sample) for sample in samples[1:]]
    both, metrics = list(zip(others, pairs, strict=True)), first.run.overall.metrics
    changes = adjust_p_values([compare_metrics(metrics, other.run.overall.metrics, pair) for other, pair in both])
    corrected = adjust_p_values([_compare_corrections(first, other, pair) for other, pair in both])
    return model.Comparison(
        warnings=warnings,
        sides=[_build_side(source, sample) for source, sample in zip(sources, samples, strict=True)],
        contrasts=[
            _build_contrast(first, other, pair, *found)
            for other, pair, *found in zip(others, pairs, changes, corrected, strict=True)
        ],
        corrections=list(first.result.corrections),
    )


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs to compare, and the Result that contains this run."""

    name: str
    path: str
    kind: Literal["dump", "result"]
    result: Result
    run: RunResult
    storage: Mapping[str, str]  # column -> data type of its log-probs in the dump


def _read_sources(
    given: Sequence[DumpSource | Result], read: Callable[[Sequence[DumpSource]], Result]
) -> tuple[list[ComparedRun], list[str]]:
    sources: list[ComparedRun] = []
    warnings: list[str] = []
    for source in given:
        saved = isinstance(source, Result) or (isinstance(source, str) and is_result(source))
        result = source if isinstance(source, Result) else read_result(str(source)) if saved else read([source])
        title = source.title if isinstance(source, MemoryTable) else "the Result in memory"
        path = source if isinstance(source, str) else title
        warnings += [warning for warning in result.warnings if warning not in warnings]
        warnings += skipped_data_notes(result.provenance.left_out)
        sources += [
            ComparedRun(name, path, "result" if saved else "dump", result, run, storage_types(result, name))
            for name, run in result.runs.items()
        ]
    if len(sources) < 2:
        raise DataError(
            "compare needs two runs, found one",
            file=sources[0].path,
            remedy="pass a second dump, or a result file of analyze",
        )
    first, *others = _assign_names(sources)
    warnings += prompt_notes(source.run for source in (first, *others))
    warnings += [
        f"{column} is stored as {here} in {other.name} and as {there} in {first.name}, so rounding differs"
        for other in others
        for column, there in first.storage.items()
        if (here := other.storage[column]) != there
    ]
    return [first, *others], warnings


def _assign_names(sources: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Give each run a unique name. If names are equal, use paths. If paths are equal, add a number."""
    shared, seen = Counter(source.name for source in sources), Counter[str]()
    named = []
    for source in sources:
        name = source.name
        if shared[name] > 1:
            path = escape_unprintable(normalize_path(source.path))
            name = path if len(source.result.runs) == 1 else f"{path}: {name}"
        seen[name] += 1
        named.append(replace(source, name=name if seen[name] == 1 else f"{name} ({seen[name]})"))
    return named


def _build_side(source: ComparedRun, sample: ClusterSample) -> model.Side:
    return model.Side(
        name=source.name,
        source=escape_unprintable(source.path),
        kind=source.kind,
        clusters_by=source.run.clusters.by,
        clusters=len(sample),
        metrics=source.run.overall.metrics,
        growth=fit_run_growth(source.run),
        distribution=source.run.distribution,
        breakdowns=source.run.breakdowns,
    )


def _compare_corrections(
    first: ComparedRun, other: ComparedRun, samples: tuple[ClusterSample, ClusterSample]
) -> dict[str, model.Change]:
    """Compare the metrics of corrections that have the same definition in the two runs. Keys: `correction/metric`."""
    return {
        f"{correction.name}/{key}": tested
        for correction in first.result.corrections
        if correction in other.result.corrections
        for key, tested in compare_metrics(
            first.run.overall.corrections[correction.name],
            other.run.overall.corrections[correction.name],
            samples,
            correction,
        ).items()
    }


def _build_contrast(
    first: ComparedRun, other: ComparedRun, samples: tuple[ClusterSample, ClusterSample],
    changes: dict[str, model.Change], corrected: dict[str, model.Change],
) -> model.Contrast:  # fmt: skip
    shared, same = samples[0].count_common(samples[1]), samples[0].equal_sides(samples[1])
    grouped: dict[str, dict[str, model.Change]] = {}
    for place, change in corrected.items():
        name, _, key = place.rpartition("/")  # a correction name may contain slashes, a metric key does not
        grouped.setdefault(name, {})[key] = change
    found = model.Contrast(
        other=other.name,
        clusters_shared=shared,
        same_tokens=bool(same),
        paired=_describe_pairing(first, samples, shared, same),
        changes=changes,
        corrections=grouped,
        decompositions=_build_decompositions(first.run, other.run),
    )
    found.says = [model.contrast_headline(found), *model.contrast_details(found)]
    return found


def _describe_pairing(
    first: ComparedRun, samples: tuple[ClusterSample, ClusterSample], shared: int, same: Sequence[str]
) -> str:
    what = f"{first.run.clusters.by}s" if first.run.clusters.by != "content" else "sequences"
    if same:
        equal = " and ".join(same)
        return f"paired: both runs have the same responses to {shared:,} {what}, with equal {equal} log-probs"
    if shared:
        return f"paired: {shared:,} {what} in common (of {len(samples[0]):,} and {len(samples[1]):,})"
    return f"not paired: no {what} in common"


def _build_decompositions(first: RunResult, second: RunResult) -> list[model.Decomposition]:
    found = [_decompose_by_label("step", True, first.groups, second.groups, (first, second))]
    found += [
        _decompose_by_label(name, False, first.by[name], second.by[name], (first, second))
        for name in first.by
        if name in second.by
    ]
    found += [
        _decompose_by_bin(breakdown, second.breakdowns[name])
        for name, breakdown in first.breakdowns.items()
        if name in second.breakdowns
    ]
    return [each for each in found if each is not None]


NOT_RESAMPLED_REASON = (
    "no interval: resampling uses sums per cluster, which do not give a maximum, a quantile, a count or a tail index"
)
TOO_FEW_CLUSTERS_REASON = "no interval: too few clusters"
_RELATIVE_UNITS = ("nats", "nats/token")
_EQUALITY_TOLERANCE = 1e-12
"""Values with at most this relative difference count as equal, because the order of rows changes the rounding."""


def compare_metrics(
    reference: Mapping[str, Value],
    other: Mapping[str, Value],
    samples: tuple[ClusterSample, ClusterSample],
    correction: Correction | None = None,
) -> dict[str, model.Change]:
    keys, metrics = [key for key in reference if key in other], dict[str, TableMetric]()
    for key in keys:
        with suppress(ConfigError):  # another version of mismatchctl has metrics that this one lacks
            metrics[key] = find_metric(key, correction)
    smooth = {key: metric for key, metric in metrics.items() if metric.is_resampled and _has_columns(metric, samples)}
    draws = resample_metrics(samples, list(smooth.values())) if smooth else [[], []]
    pairs = dict(zip(smooth, zip(*draws, strict=True), strict=True))
    with np.errstate(all="ignore"):  # a metric that overflows gets no p-value
        p = {key: value for key, value in permutation_p_values(smooth, samples).items() if np.isfinite(value)}
    return {
        key: _build_change(metrics.get(key), reference[key], other[key], pairs.get(key), p.get(key)) for key in keys
    }


def permutation_p_values(
    metrics: Mapping[str, TableMetric], samples: tuple[ClusterSample, ClusterSample]
) -> dict[str, float]:
    """Return a two-sided p-value for each metric, from the permutation test that `gate` also uses.

    If Results contain K3 by rollout probability (LAYER_COLUMNS), K3 gets five tests (LEVEL_SHARES), not one.
    """
    reference, other = samples
    if not metrics or not all(map(len, samples)):
        return {}
    either = [linear_statistic(other, reference, metric, Allowance()) for metric in metrics.values()]
    exchange = SampleExchange(other.keys, reference.keys)
    new, old = (np.stack([getattr(each, side) for each in either], axis=1) for side in ("new", "old"))
    found = dict(zip(metrics, exchange.two_sided_p_values(new, old).tolist(), strict=True))
    for (key, metric), plain in zip(metrics.items(), either, strict=True):
        if find_layers(other, reference, metric, lower=False) is not None:  # finds only rises: swap if K3 fell
            sides = (other, reference) if plain.exceeds_limit else (reference, other)
            found[key] = min(1.0, 2 * compare_samples(*sides, metric, Allowance()).p)
    return found


def adjust_p_values(families: Sequence[Mapping[str, model.Change]]) -> list[dict[str, model.Change]]:
    """Adjust p-values for the number of tests: PRIMARY_METRICS by Holm's method, all others by Benjamini-Hochberg."""
    found = [dict(changes) for changes in families]
    for adjust, is_primary in ((adjust_holm, True), (adjust_fdr, False)):
        places = [
            (index, key, change.p_alone)
            for index, changes in enumerate(families)
            for key, change in changes.items()
            if (key in model.PRIMARY_METRICS) == is_primary and change.p_alone is not None
        ]
        for (index, key, alone), p in zip(places, adjust([p for _, _, p in places]), strict=True):
            found[index][key] = _set_p_value(found[index][key], alone, p, len(places))
    return found


def _set_p_value(change: model.Change, alone: float, p: float, tests: int) -> model.Change:
    level = 1 - model.CONFIDENCE
    low, high = change.interval or (0.0, 0.0)
    note = ""
    if p >= level and not low <= 0 <= high:
        if alone < level:
            note = f"p = {alone:.2g} for this metric alone, {p:.2g} after correction for {tests} tests"
        else:
            note = f"p = {alone:.2g}: random swaps of clusters often give such a change. The interval is too narrow"
    return change.model_copy(update={"p": p, "significant": p < level, "note": note})


def _has_columns(metric: TableMetric, samples: Sequence[ClusterSample]) -> bool:
    with suppress(DataError):
        return all(metric.columns(sample) is not None for sample in samples)
    return False


def _build_change(
    metric: TableMetric | None, reference: Value, other: Value, draws: tuple[Float64s, Float64s] | None,
    p: float | None,
) -> model.Change:  # fmt: skip
    if reference.value is None or other.value is None:
        status = reference.status if reference.value is None else other.status
        return model.Change(reference=reference, other=other, status=status)
    same = math.isclose(reference.value, other.value, rel_tol=_EQUALITY_TOLERANCE)
    difference = 0.0 if same else other.value - reference.value
    change = model.Change(reference=reference, other=other, difference=difference, status=NOT_RESAMPLED_REASON)
    if metric is None:
        return change
    change.better = None if same else _is_better(metric.metric, reference.value, other.value)
    sized = metric.metric.unit in _RELATIVE_UNITS and metric.metric.better == "low"
    if sized and reference.value > 0:
        change.relative = replace_nonfinite(difference / reference.value)
    if draws is None:
        if metric.is_resampled:
            change.status = "no interval: the Result's cluster table lacks sums of this metric"
        return change
    first, second = draws
    with np.errstate(all="ignore"):
        change.interval = _difference_interval(second - first)
        if change.relative is not None:
            change.relative_interval = _difference_interval(second / first - 1.0)
    change.status = "ok" if change.interval is not None else TOO_FEW_CLUSTERS_REASON
    change.p_alone = p if change.interval is not None else None
    return change


def _is_better(metric: Metric, reference: float, other: float) -> bool | None:
    if not metric.better:
        return None
    if metric.better == "one":
        return abs(other - 1) < abs(reference - 1)
    return (other < reference) == (metric.better == "low")


def _difference_interval(draws: Float64s) -> model.Interval | None:
    found = percentile_interval(draws)
    return found if found is not None and all(map(math.isfinite, found)) else None


MIN_CARRIED_SHARE = 0.75
"""Minimum share of a change of K3 that a carrier causes. A carrier is a part of the data, such as steps 4 to 8."""
MIN_CARRIED_RATIO = 1.5
"""A carrier's share of the change of K3 is at least this multiple of its share of K3 in the first run."""
MIN_STANDARD_ERRORS = 3.0
"""Minimum contribution of a carrier, in standard errors. By chance, the largest of many parts may exceed 2."""
_REPLICATES = 2048  # number of bootstrap replicates for standard errors


@dataclass(frozen=True)
class PartMeans:
    """Token count and mean K3 of each part of a run, such as each step. The last axis of the arrays is the part."""

    tokens: Float64s
    k3: Float64s
    se: Float64s  # standard error of `k3`

    @classmethod
    def select(cls, keys: Sequence[Label], own: Sequence[Label], *columns: Sequence[float | None]) -> PartMeans:
        """Return the parts `keys`. `columns`: tokens, K3 and error of the parts `own`. Other parts get 0 tokens."""
        where = {key: index for index, key in enumerate(own)}
        found = [[None if (row := where.get(key)) is None else values[row] for key in keys] for values in columns]
        tokens, k3, se = np.array(found, np.float64)
        return cls(np.nan_to_num(tokens), k3, se)

    @property
    def shares(self) -> Float64s:
        found: Float64s = self.tokens / np.maximum(self.tokens.sum(axis=-1, keepdims=True), 1)
        return found


def contributions(reference: PartMeans, other: PartMeans) -> tuple[Float64s, Float64s]:
    """Return (mix, level), [..., parts]: the change of mean K3 due to each part's token share, and due to its K3."""
    before, after = reference.shares, other.shares
    has_before, has_after = reference.tokens > 0, other.tokens > 0
    k3_before = np.where(has_before, reference.k3, np.where(has_after, other.k3, 0.0))
    k3_after = np.where(has_after, other.k3, k3_before)
    with np.errstate(invalid="ignore", over="ignore"):  # extreme log-probs make K3 infinite
        means = [(share * k3).sum(axis=-1, keepdims=True) for share, k3 in ((before, k3_before), (after, k3_after))]
        mix = (after - before) * ((k3_before + k3_after) / 2 - (means[0] + means[1]) / 2)
        level = (before + after) / 2 * (k3_after - k3_before)
    return mix, level


def _decompose_by_bin(reference: Breakdown, other: Breakdown) -> model.Decomposition | None:
    lows = sorted({*reference.low, *other.low})
    highs = dict(zip([*reference.low, *other.low], [*reference.high, *other.high], strict=True))
    sides = [PartMeans.select(lows, side.low, side.tokens, side.k3, side.k3_se) for side in (reference, other)]
    return _build_decomposition(reference.quantity, True, [{"low": low, "high": highs[low]} for low in lows], sides)


def _decompose_by_label(
    quantity: str, ordered: bool, first: Groups, second: Groups, runs: tuple[RunResult, RunResult]
) -> model.Decomposition | None:
    labels = [*first.labels, *(label for label in second.labels if label not in first.labels)]
    if all(isinstance(label, (int, float)) for label in labels):
        labels.sort(key=lambda label: float(label or 0))
    known = all("tokens" in side.metrics for side in (first, second))  # a baseline file has no metrics by step
    if len(labels) < 2 or not known or not any(label in second.labels for label in first.labels):
        return None
    sides = []
    for side in (first, second):
        tokens, k3 = side.metrics["tokens"].value, side.metrics["k3"]
        sides.append(PartMeans.select(labels, side.labels, tokens, k3.value, k3.se or [None] * len(side.labels)))
    se = None
    with suppress(DataError):  # this Result has no cluster tables to resample
        samples = [
            {
                labels.index(label): build_step_sample(run, i) if ordered else build_value_sample(run, quantity, i)
                for i, label in enumerate(groups.labels)
            }
            for run, groups in zip(runs, (first, second), strict=True)
        ]
        se = _resample_contributions(samples, len(labels))
    return _build_decomposition(quantity, ordered, [{"label": label} for label in labels], sides, se)


def _resample_contributions(samples: Sequence[Mapping[int, ClusterSample]], count: int) -> Float64s:
    """Return the bootstrap standard error of the change of K3 that each of the `count` parts of the data causes."""
    places = [(side, part, sample) for side, parts in enumerate(samples) for part, sample in parts.items()]
    drawn = np.stack([np.zeros((2, _REPLICATES, count)), np.full((2, _REPLICATES, count), np.nan)])
    metrics = [find_metric("tokens"), find_metric("k3")]
    found = resample_metrics([sample for *_, sample in places], metrics, _REPLICATES)
    for (side, part, _), values in zip(places, found, strict=True):
        drawn[:, side, :, part] = values
    mix, level = contributions(*(PartMeans(tokens, k3, np.empty(0)) for tokens, k3 in drawn.swapaxes(0, 1)))
    with np.errstate(invalid="ignore", over="ignore"):
        se: Float64s = np.std(mix + level, axis=0, ddof=1)
    return se


def _build_decomposition(
    quantity: str, ordered: bool, places: Sequence[Mapping[str, Label]], sides: Sequence[PartMeans],
    se: Float64s | None = None,
) -> model.Decomposition | None:  # fmt: skip
    """Split the change of K3 among parts of the data. Without `se`, standard errors treat token shares as exact."""
    mix, level = contributions(sides[0], sides[1])
    if not (np.isfinite(mix).all() and np.isfinite(level).all()):
        return None
    shares = [side.shares for side in sides]
    errors = [np.where(side.tokens > 0, side.se, 0.0) for side in sides]  # NaN without a standard error
    of_level = (shares[0] + shares[1]) / 2 * np.hypot(*errors)
    se = of_level if se is None else np.where(np.isnan(of_level), np.nan, se)
    parts = [
        model.Contribution(
            **place,  # type: ignore[arg-type]
            tokens=(float(shares[0][index]), float(shares[1][index])),
            k3=(replace_nonfinite(float(sides[0].k3[index])), replace_nonfinite(float(sides[1].k3[index]))),
            mix=float(mix[index]),
            level=float(level[index]),
            se=replace_nonfinite(float(se[index])),
        )
        for index, place in enumerate(places)
    ]
    return model.Decomposition(
        quantity=quantity,
        ordered=ordered,
        difference=float(mix.sum() + level.sum()),
        mix=float(mix.sum()),
        level=float(level.sum()),
        parts=sorted(parts, key=lambda part: -abs(part.total)),
        carrier=_find_carrier(parts, ordered),
    )


def _find_carrier(parts: Sequence[model.Contribution], ordered: bool) -> model.Carrier | None:
    """Return the parts with at least 75% of K3's change, if this is 1.5 times their share of the first run's K3."""
    total = np.array([part.total for part in parts])
    if not np.isfinite(total).all() or total.sum() == 0:
        return None
    tokens = np.array([part.tokens for part in parts])
    k3 = np.array([part.k3[0] or 0.0 for part in parts]) * tokens[:, 0]
    weight = k3 / k3.sum() if k3.sum() > 0 else tokens[:, 1]
    carried = total / total.sum()
    chosen = _find_stretch(carried, weight) if ordered else carried > weight
    errors = [part.se for part, is_in in zip(parts, chosen, strict=True) if is_in and part.se is not None]
    sure = bool(errors) and abs(total[chosen].sum()) > MIN_STANDARD_ERRORS * math.hypot(*errors)
    share, own, reached = (float(values[chosen].sum()) for values in (carried, weight, tokens[:, 1]))
    if not sure or chosen.all() or share < max(MIN_CARRIED_SHARE, MIN_CARRIED_RATIO * own):
        return None
    picked = [part for part, is_in in zip(parts, chosen, strict=True) if is_in]
    labels = [part.label for part in picked] if picked[0].low is None else []
    low, high = picked[0].low, picked[-1].high
    return model.Carrier(low=low, high=high, labels=labels, carried=share, weight=own, tokens=reached)


def _find_stretch(carried: Float64s, weight: Float64s) -> Bools:
    """Return a mask of the adjacent parts whose share of K3's change (`carried`) most exceeds their `weight` in K3."""
    excess = np.concatenate([[0.0], np.cumsum(carried - weight)])
    start, stop = np.unravel_index(int(np.triu(excess[None, :] - excess[:, None], 1).argmax()), (len(excess),) * 2)
    chosen = np.zeros(len(carried), np.bool_)
    chosen[start:stop] = True
    return chosen
