"""Evidence of what causes the mismatch, collected in one pass, and the Diagnosis that it leads to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from mismatchctl.contract import REFERENCE
from mismatchctl.diagnose.causes import CAUSES
from mismatchctl.diagnose.evidence import LEAST_SAMPLE, Evidence, gather, sample_size
from mismatchctl.diagnose.judge import findings
from mismatchctl.diagnose.sides import told_apart
from mismatchctl.dumps import Dump, DumpFile, Problems, Rows
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


class UnitRows(Protocol):
    """The rows of one unit of a dump."""

    def rows(self) -> Iterator[Rows]:
        """The rows as they are in the file: masked tokens and bad values too."""


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

    @property
    def makes(self) -> type[Collector]:
        """The type of its parts."""
        return Collector

    def __call__(self, unit: UnitRows, run: str) -> Collector:
        """Collect the evidence of one unit. Values that other verbs refuse are evidence, too."""
        found = self.empty()
        for rows in unit.rows():
            found.watch(rows)
        return found

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


__all__ = ["COLUMNS", "Collector", "Diagnosis", "collector_for"]
