"""One reading of a dump, unit by unit: what every verb that passes over the tokens shares."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from mismatchctl.analyze.micro_batches import MicroBatches
from mismatchctl.analyze.trims import Trims, trims_of
from mismatchctl.batch import TokenBatch
from mismatchctl.contract import BY_NAME, VERSIONS
from mismatchctl.correction import Correction
from mismatchctl.dumps import Dump, DumpFile, DumpSource, Problems, Rows, Unit, open_dump
from mismatchctl.engines import Engine, Mergeable, shards_of
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks import column_aliases
from mismatchctl.measure.hashes import Value

WANTED = ("current_log_probs", "advantages", "reward", "prompt_id", "sequence_id", "step", "run", *VERSIONS)
"""Optional columns that the pass makes use of."""
MayGrow = Callable[[str, Value], bool]
"""Whether more of (run, step) may come."""
MergeableT = TypeVar("MergeableT", bound=Mergeable)


class Batches:
    """The batches of one unit, read as they are asked for.

    Attributes:
        tokens: tokens so far, by file; valid ones only, unless rows are asked for.
        problems: what was left out so far.
    """

    def __init__(
        self, dump: Dump, unit: Unit, micro_batches: MicroBatches | None = None, trims: Trims | None = None
    ) -> None:
        self._dump, self._unit, self._micro_batches, self._trims = dump, unit, micro_batches, trims or Trims()
        self.tokens: Counter[int] = Counter()
        self.problems = Problems()

    def __iter__(self) -> Iterator[TokenBatch]:
        return self.watched_by(None)

    def watched_by(self, watch: Callable[[Rows], None] | None) -> Iterator[TokenBatch]:
        """The batches; `watch` sees the rows of each as they stand in the file, before."""
        for batch in self._dump.read(self._unit, self.problems, watch):
            self._count(batch)
            if self._micro_batches is not None:
                numbers = self._micro_batches.of(batch)
                batch = replace(batch, columns={**batch.columns, "micro_batch": numbers})
            yield self._trims.on(batch, self._unit.file.run)

    def rows(self) -> Iterator[Rows]:
        """The rows as they are in the file: masked tokens and bad values too, without micro-batches and trims."""
        for rows in self._dump.rows(self._unit, self.problems):
            self._count(rows)
            yield rows

    def _count(self, found: TokenBatch | Rows) -> None:
        files, place = np.unique(found.file, return_inverse=True)
        tokens = np.bincount(place, found.segments.lengths)
        self.tokens.update(dict(zip(files.tolist(), tokens.astype(int).tolist(), strict=True)))


class OnBatches(Protocol):
    """Work on the batches of a unit and the run that it belongs to: a dataclass that says all that it depends on."""

    @property
    def makes(self) -> Any:
        """The type of its parts."""

    def __call__(self, batches: Batches, run: str, /) -> Any:
        """The part of one unit."""

    def asked(self, file: DumpFile, /) -> Iterator[Any]:
        """As of `Work`."""


@dataclass(frozen=True)
class Read(Generic[MergeableT]):
    """What was made of the units of a shard, and the account of reading them: valid tokens by file, and problems."""

    made: MergeableT
    tokens: dict[int, int]
    problems: Problems

    def __add__(self, other: Read[MergeableT]) -> Read[MergeableT]:
        tokens = Counter(self.tokens) + Counter(other.tokens)
        return Read(self.made + other.made, dict(tokens), self.problems + other.problems)

    def moved(self, by: int) -> Read[MergeableT]:
        """The same of files that lie so many places further on in the dump."""
        tokens = {file + by: number for file, number in self.tokens.items()}
        return replace(self, made=self.made.moved(by), tokens=tokens)


@dataclass(frozen=True)
class _ReadUnit:
    """The work on a unit, from its opening on."""

    work: OnBatches
    micro_batches: MicroBatches | None = None
    trims: Trims = field(default_factory=Trims)

    @property
    def makes(self) -> Any:
        return Read[self.work.makes]  # type: ignore[name-defined]

    def __call__(self, dump: Dump, unit: Unit) -> Read[Any]:
        batches = Batches(dump, unit, self.micro_batches, self.trims)
        made = self.work(batches, unit.file.run)
        return Read(made, dict(batches.tokens), batches.problems)

    def asked(self, file: DumpFile) -> Iterator[_ReadUnit]:
        return (replace(self, work=work) for work in self.work.asked(file))


class DumpReading:
    """An open dump, and what is known of it while it is read.

    Attributes:
        dump: the files.
        has: the columns of the contract that some file has.
        expected: tokens that the files' footers tell of, valid or not.
        tokens: tokens read so far, by file.
        problems: what was left out so far.
    """

    def __init__(self, dump: Dump, corrections: Sequence[Correction] = ()) -> None:
        self.dump = dump
        self.has = frozenset(column for column in BY_NAME if dump.has(column))
        self.expected = sum(unit.tokens for unit in dump.units)
        self.tokens = dict.fromkeys((file.index for file in dump.files), 0)
        self.problems = dump.problems
        self._corrections = corrections

    @classmethod
    def open(
        cls,
        paths: Sequence[DumpSource],
        corrections: Sequence[Correction],
        rename: Mapping[str, str],
        by: Sequence[str],
        on_bad: Literal["error", "skip"],
        *,
        extra: Sequence[str] = (),
        watched: Sequence[str] = (),
    ) -> DumpReading:
        """Open a dump with the columns that corrections need.

        Args:
            paths: files, folders, globs.
            corrections: all that will be applied.
            rename: canonical column -> name in the files.
            by: columns to break down by.
            on_bad: whether bad rows and files are errors or are left out.
            extra: more columns that are wanted where the dump has them.
            watched: more columns for those who watch the rows as they stand in the files.

        Raises:
            DataError: a dump that cannot be read, or lacks what a correction looks at.
            ConfigError: settings that do not fit the dump.
        """
        scoped = any(correction.normalizes_micro_batches for correction in corrections)
        looked_at = sorted({column for correction in corrections for column in correction.columns})
        needed = dict.fromkeys([*WANTED, *(["micro_batch"] if scoped else []), *looked_at, *extra])
        check_names(corrections)
        names = column_aliases()
        dump = open_dump(paths, rename=rename, aliases=names, by=by, wanted=[*needed], watched=watched, on_bad=on_bad)
        _check_columns(corrections, dump)
        return cls(dump, corrections)

    def parts(
        self,
        work: OnBatches,
        engine: Engine,
        progress: Callable[[int, int], None] | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> Iterator[tuple[Any, MayGrow]]:
        """What `work` makes of each shard, in the order of the input, and which groups may come after it.

        Raises:
            DataError: a unit that cannot be read.
        """
        later, done = _Later(self.dump.readings), 0
        reading = _ReadUnit(work, micro_batches, trims_of(self.dump, self._corrections))
        for shard, read in engine.map(reading, self.dump, shards_of(self.dump)):
            self.problems = self.problems + read.problems.of(shard.paths)
            for file, tokens in read.tokens.items():
                self.tokens[file] += tokens
            done += sum(read.tokens.values())
            if progress is not None:
                progress(done, self.expected)
            yield read.made, later.after(shard.units[-1])

    def require_tokens(self) -> None:
        """Refuse a dump without valid tokens, once all of it was read.

        Raises:
            DataError: no unit has a valid token.
        """
        self.dump.require_tokens(sum(self.tokens.values()), self.problems)


class _Later:
    """Which groups can still come in units after a given one, as far as file footers tell.

    For every run: the indices of its units, and the range of steps in each of them and all after it.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._named = any("run" in unit.file.columns or "run" in unit.file.partition for unit in units)
        self._indices: dict[str, list[int]] = {}
        self._ranges: dict[str, list[tuple[float, float]]] = {}
        for unit in reversed(units):
            run = "" if self._named else unit.file.run
            ranges = self._ranges.setdefault(run, [])
            low, high = unit.step_range or (-math.inf, math.inf)
            ranges.append((min(low, ranges[-1][0]), max(high, ranges[-1][1])) if ranges else (low, high))
            self._indices.setdefault(run, []).append(-unit.index)  # ascending, to be searched

    def after(self, unit: Unit) -> Callable[[str, Value], bool]:
        """A test whether more of (run, step) may come after `unit`."""

        def may_come(run: str, step: Value) -> bool:
            key = "" if self._named else run
            later = bisect_left(self._indices[key], -unit.index)
            if later == 0:
                return False
            low, high = self._ranges[key][later - 1]
            return step is None or isinstance(step, str) or low <= step <= high

        return may_come


def check_names(corrections: Iterable[Correction]) -> None:
    """Refuse two corrections of one name.

    Raises:
        ConfigError: there are two.
    """
    seen: set[str] = set()
    for correction in corrections:
        if correction.name in seen:
            raise ConfigError(f"two corrections are called {correction.name!r}: give one of them another name")
        seen.add(correction.name)


def _check_columns(corrections: Iterable[Correction], dump: Dump) -> None:
    """Refuse corrections that look at columns which some file lacks."""
    for correction in corrections:
        for column in sorted(correction.columns):
            for file in dump.files:
                if column not in file.columns and column not in file.partition:
                    problem = f"correction {correction.name} needs this column, which is missing"
                    remedy = "leave the correction out, or record the column"
                    raise DataError(problem, file=file.path, column=column, remedy=remedy)
