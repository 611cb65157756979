"""The verb `diagnose`: what causes the mismatch, read from the dump alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mismatchctl.diagnose.causes import CAUSES
from mismatchctl.diagnose.evidence import Evidence, gather, sample_size
from mismatchctl.diagnose.judge import findings
from mismatchctl.dumps import Dump, Problems, Rows, Unit, open_dump
from mismatchctl.engines.local import default_threads, ordered_map
from mismatchctl.errors import DataError
from mismatchctl.files import natural_key
from mismatchctl.frameworks import column_aliases
from mismatchctl.result import Finding

COLUMNS: tuple[str, ...] = tuple(dict.fromkeys(column for cause in CAUSES for column in cause.columns))
"""Optional columns that some cause looks at."""


class Collector:
    """Gathers evidence by run, from rows and from other collectors, in the order of the input."""

    def __init__(self, by: Sequence[str] = (), tokens: Mapping[str, int] | None = None) -> None:
        """`tokens` is how many each run holds, about: of more in all, more are sampled of each."""
        self._by, self._tokens, self.runs = tuple(by), dict(tokens or {}), dict[str, Evidence]()
        self._size = sample_size(sum(self._tokens.values()))

    def watch(self, rows: Rows) -> None:
        """Take note of some rows."""
        self._add(gather(rows, self._by, [cause.flags for cause in CAUSES], self._size, self._tokens))

    def add(self, other: Collector) -> None:
        """Take over what another collector has."""
        self._add(other.runs)

    def findings(self, run: str, files: Sequence[str]) -> list[Finding]:
        """The causes of one run's mismatch, strongest first; `files` are the dump's paths, by index."""
        return findings(self.runs[run], files) if run in self.runs else []

    def _add(self, runs: Mapping[str, Evidence]) -> None:
        for run, evidence in runs.items():
            self.runs[run] = self.runs.get(run, Evidence()) + evidence


def expected_tokens(dump: Dump) -> dict[str, int]:
    """Tokens of each run as far as file footers tell; all under no name where rows name their runs themselves."""
    found: dict[str, int] = {}
    for unit in dump.units:
        run = "" if dump.has("run") else unit.file.run
        found[run] = found.get(run, 0) + unit.tokens
    return found


@dataclass(frozen=True)
class Diagnosed:
    """What `diagnose` found: findings by run, strongest first, and what it could not look at."""

    runs: dict[str, list[Finding]]
    warnings: list[str]
    problems: Problems


def diagnose(
    paths: Sequence[str],
    *,
    rename: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosed:
    """The causes of the mismatch of each run. Values that other verbs refuse are evidence here.

    Args:
        paths: files, folders, globs; each is a run unless a `run` column says otherwise.
        rename: canonical column -> name in the files.
        by: columns that may tell a deviating worker, rank or data source, beside `worker`.
        threads: units read at once; the findings do not depend on it.
        progress: called with (tokens read, tokens expected).

    Raises:
        DataError: a dump that cannot be read, or that holds no token.
        ConfigError: a `--by` or `--column` that the dump lacks.
    """
    dump = open_dump(paths, rename=rename or {}, aliases=column_aliases(), by=by, watched=COLUMNS)
    tokens, done, problems = expected_tokens(dump), 0, dump.problems
    everything = Collector(by, tokens)

    def work(unit: Unit) -> tuple[Collector, Problems]:
        collector, left_out = Collector(by, tokens), Problems()
        for rows in dump.rows(unit, left_out):
            collector.watch(rows)
        return collector, left_out

    for unit, (part, left_out) in ordered_map(work, dump.units, threads or default_threads()):
        everything.add(part)
        problems = problems + left_out
        done += unit.tokens
        if progress is not None:
            progress(done, sum(tokens.values()))
    if not any(evidence.sample and evidence.sample.rows.segments.tokens for evidence in everything.runs.values()):
        raise DataError("there is no token", file=dump.files[0].path, remedy="name a dump that holds tokens")
    files = [file.path for file in dump.files]
    runs = {run: everything.findings(run, files) for run in sorted(everything.runs, key=natural_key)}
    return Diagnosed(runs, dump.warnings, problems)


__all__ = ["COLUMNS", "Collector", "Diagnosed", "diagnose", "expected_tokens"]
