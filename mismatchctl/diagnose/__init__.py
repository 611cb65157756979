"""The verb `diagnose`: what causes the mismatch, read from the dump alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from mismatchctl.contract import REFERENCE
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.causes import CAUSES
from mismatchctl.diagnose.evidence import LEAST_SAMPLE, Evidence, gather, sample_size
from mismatchctl.diagnose.judge import findings
from mismatchctl.diagnose.sides import told_apart
from mismatchctl.dumps import Dump, DumpFile, Problems, Rows, Unit, open_dump
from mismatchctl.engines import Engine, Local, shards_of
from mismatchctl.errors import DataError
from mismatchctl.files import natural_key
from mismatchctl.frameworks import column_aliases
from mismatchctl.measure import worth_compiling
from mismatchctl.result import Finding, Growth, Sides
from mismatchctl.views import FindingsViews

if TYPE_CHECKING:
    from mismatchctl.frameworks.layers.next import NextStep
    from mismatchctl.frameworks.layers.noise import LogitNoise

COLUMNS: tuple[str, ...] = tuple(
    dict.fromkeys((*(column for cause in CAUSES for column in cause.columns), REFERENCE, "reference_version"))
)
"""Optional columns that some cause looks at, and those that say which side it is on."""


@dataclass
class Collector:
    """Gathers evidence by run, from rows and from other collectors, in the order of the input.

    Attributes:
        by: columns that may tell a deviating worker, beside `worker`.
        tokens: how many each run holds, about: of more in all, more are sampled of each.
        size: tokens to sample of each run.
        compiled: whether the dump is so large that compiled loops are worth their start.
        runs: what is known so far.
    """

    by: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    size: int = LEAST_SAMPLE
    compiled: bool = False
    runs: dict[str, Evidence] = field(default_factory=dict)

    def watch(self, rows: Rows) -> None:
        """Take note of some rows."""
        self._add(gather(rows, self.by, [cause.flags for cause in CAUSES], self.size, self.tokens, self.compiled))

    def add(self, other: Collector) -> None:
        """Take over what another collector has, which may have sampled more."""
        self._add({run: found.sampled(self.size, self.tokens.get(run, 0)) for run, found in other.runs.items()})

    def __add__(self, other: Collector) -> Collector:
        both = replace(self, runs=dict(self.runs))
        both._add(other.runs)
        return both

    def moved(self, by: int) -> Collector:
        """The same of files that lie so many places further on in the dump."""
        return replace(self, runs={run: evidence.moved(by) for run, evidence in self.runs.items()})

    def empty(self) -> Collector:
        """One that gathers the same, and has nothing yet."""
        return replace(self, runs={})

    def asked(self, file: DumpFile) -> Iterator[Collector]:
        """One for a single file, and after it those that would sample more of it: what they have serves as well."""
        run = file.run if file.run in self.tokens else ""
        tokens = self.tokens.get(run, 0)
        while 2 * self.size < tokens:
            yield replace(self, tokens={run: tokens})
            tokens //= 2
        yield replace(self, tokens={})

    def findings(
        self, run: str, files: Sequence[str], growth: Growth | None = None
    ) -> tuple[list[Finding], Sides | None]:
        """The causes of one run's mismatch, strongest first, and which side is wrong where the dump can tell.

        `files` are the dump's paths, by index; `growth` is that of its K3, None: as the sample has it.
        """
        if run not in self.runs:
            return [], None
        return told_apart(findings(self.runs[run], files, growth), self.runs[run], files)

    def _add(self, runs: Mapping[str, Evidence]) -> None:
        for run, evidence in runs.items():
            self.runs[run] = self.runs.get(run, Evidence()) + evidence


def collector_for(dump: Dump, by: Sequence[str]) -> Collector:
    """One that samples a dump according to its size.

    Tokens are as far as file footers tell, all under no name where rows name their runs themselves; down to a power
    of two, so that a dump that grows is sampled in the same way until it has doubled.
    """
    found: dict[str, int] = {}
    for unit in dump.units:
        run = "" if dump.has("run") else unit.file.run
        found[run] = found.get(run, 0) + unit.tokens
    tokens = {run: _power_of_two(number) for run, number in found.items()}
    total = sum(found.values())
    return Collector(tuple(by), tokens, sample_size(_power_of_two(total)), worth_compiling(total))


def _power_of_two(number: int) -> int:
    return 1 << number.bit_length() >> 1


@dataclass(frozen=True)
class _Gathered:
    """What comes of one unit."""

    causes: Collector
    problems: Problems

    def __add__(self, other: _Gathered) -> _Gathered:
        return _Gathered(self.causes + other.causes, self.problems + other.problems)

    def moved(self, by: int) -> _Gathered:
        return replace(self, causes=self.causes.moved(by))


@dataclass(frozen=True)
class _Gather:
    """What `diagnose` does on each unit."""

    causes: Collector
    makes: ClassVar[type] = _Gathered

    def __call__(self, dump: Dump, unit: Unit) -> _Gathered:
        found = _Gathered(self.causes.empty(), Problems())
        for rows in dump.rows(unit, found.problems):
            found.causes.watch(rows)
        return found

    def asked(self, file: DumpFile) -> Iterator[_Gather]:
        return map(_Gather, self.causes.asked(file))


@dataclass(frozen=True)
class Diagnosis(FindingsViews):
    """What `diagnose` found: findings by run, strongest first, who is wrong where that shows, and what was left out."""

    runs: dict[str, list[Finding]]
    sides: dict[str, Sides]
    logit_noise: dict[str, LogitNoise]
    warnings: list[str]
    problems: Problems

    @property
    def next(self) -> dict[str, list[NextStep]]:
        """The steps to a comparison of layers, of each run where the fault may be in one."""
        from mismatchctl.frameworks.layers.next import first_comparison

        steps = {}
        for run, found in self.runs.items():
            surer = {finding.cause for finding in found if finding.confidence != "low"}
            sides = self.sides.get(run)
            in_layers = any(cause.in_layers for cause in CAUSES if cause.id in surer)
            steps[run] = first_comparison(None if sides is None else sides.side, in_layers=in_layers)
        return {run: own for run, own in steps.items() if own}


def diagnose(
    paths: Sequence[str],
    *,
    rename: Mapping[str, str] | None = None,
    by: Sequence[str] = (),
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: Engine | None = None,
) -> Diagnosis:
    """The causes of the mismatch of each run. Values that other verbs refuse are evidence here.

    Args:
        paths: files, folders, globs; each is a run unless a `run` column says otherwise.
        rename: canonical column -> name in the files.
        by: columns that may tell a deviating worker, rank or data source, beside `worker`.
        threads: units read at once in this process, which is where they are read unless an `engine` is given.
        progress: called with (tokens read, tokens expected).
        engine: where units are read; the findings do not depend on it.

    Raises:
        DataError: a dump that cannot be read, or that holds no token, or only masked ones in which nothing shows.
        ConfigError: a `--by` or `--column` that the dump lacks.
    """
    dump = open_dump(paths, rename=rename or {}, aliases=column_aliases(), by=by, watched=COLUMNS)
    everything = collector_for(dump, by)
    done, expected, problems = 0, sum(unit.tokens for unit in dump.units), dump.problems
    engine = engine or Local(threads)
    for shard, part in engine.map(_Gather(everything.empty()), dump, shards_of(dump)):
        everything.add(part.causes)
        problems = problems + part.problems.of(shard.paths)
        done += shard.tokens
        if progress is not None:
            progress(done, expected)
    if not any(evidence.sample and evidence.sample.rows.segments.tokens for evidence in everything.runs.values()):
        nothing = DataError("there is no token", file=dump.files[0].path, remedy="name a dump that holds tokens")
        raise problems.nothing_left() or nothing
    files = [file.path for file in dump.files]
    judged = {run: everything.findings(run, files) for run in sorted(everything.runs, key=natural_key)}
    runs = {run: found for run, (found, _) in judged.items()}
    sides = {run: found for run, (_, found) in judged.items() if found is not None}
    noise = {run: found for run in runs if (found := _noise(everything.runs[run])) is not None}
    masked = [run for run in runs if not everything.runs[run].tokens]
    remedy = "check that response_mask is 1 on the tokens that the policy sampled"
    if len(masked) == len(runs) and not any(runs.values()):
        raise problems.nothing_left() or DataError("no token is valid", file=dump.files[0].path, remedy=remedy)
    warnings = [*dump.warnings, *(f"{run}: no token is valid; {remedy}" for run in masked)]
    return Diagnosis(runs, sides, noise, warnings, problems)


def _noise(evidence: Evidence) -> LogitNoise | None:
    """The noise on the logits that the sampled tokens of a run ask for."""
    from mismatchctl.frameworks.layers.noise import logit_noise

    if evidence.sample is None:
        return None
    case = Case.of(evidence, evidence.sample.rows)
    return logit_noise(case.rollout[case.sound], case.train[case.sound])


__all__ = ["COLUMNS", "Collector", "Diagnosis", "collector_for", "diagnose"]
