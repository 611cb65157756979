"""What an engine runs: a piece of work, done on the units of a dump, whose parts are merged in the order of the input.

Units of one file are merged first, as a shard (small files that are read as one unit are one too); shards are merged
after that. This order is the same wherever a shard is made, in threads of this process, on another machine or in an
earlier run, and so are the bytes of what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol, TypeVar

from mismatchctl.dumps import Dump, DumpFile, Unit, files_of

SHARD_TOKENS = 1 << 24
"""Tokens of a shard, about; a larger file is several shards, so that what is open of a file stays bounded."""


class Mergeable(Protocol):
    """What comes of a unit. `+` merges, in the order of the input."""

    def __add__(self, other: Any, /) -> Any:
        """Both."""

    def moved(self, by: int) -> Any:
        """The same of files that lie so many places further on in the dump."""


MergeableT = TypeVar("MergeableT", bound=Mergeable)
Made = TypeVar("Made", bound=Mergeable, covariant=True)


class Work(Protocol[Made]):
    """What is done on each unit: a dataclass that says all that its parts depend on, and can be pickled."""

    @property
    def makes(self) -> Any:
        """The type of its parts."""

    def __call__(self, dump: Dump, unit: Unit, /) -> Made:
        """The part of one unit."""

    def asked(self, file: DumpFile, /) -> Iterator[Any]:
        """This work as far as it depends on one file, and then other works whose parts serve as well."""


@dataclass(frozen=True)
class Shard:
    """Units of one file that follow each other, or small files that are read together."""

    units: tuple[Unit, ...]

    @property
    def file(self) -> DumpFile:
        """The file, or the first of them."""
        return self.units[0].file

    @property
    def files(self) -> tuple[DumpFile, ...]:
        """All of them."""
        return files_of(self.units)

    @property
    def paths(self) -> tuple[str, ...]:
        """Where they lie, as shown to users."""
        return tuple(file.path for file in self.files)

    @property
    def tokens(self) -> int:
        """Roughly how many tokens it holds."""
        return sum(unit.tokens for unit in self.units)


class Engine(Protocol):
    """Where shards are made."""

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """The part of each shard, in the order given.

        Raises:
            MismatchctlError: what the work raises on the first unit, in that order, on which it raises.
        """


def shards_of(dump: Dump) -> Iterator[Shard]:
    """All units of a dump as shards; where they are cut depends on each file alone."""
    units: list[Unit] = []
    tokens = 0
    for unit in dump.readings:
        if units and (unit.file is not units[0].file or tokens + unit.tokens > SHARD_TOKENS):
            yield Shard(tuple(units))
            units, tokens = [], 0
        units.append(unit)
        tokens += unit.tokens
    if units:
        yield Shard(tuple(units))


def make(work: Work[MergeableT], dump: Dump, shard: Shard) -> MergeableT:
    """The part of a shard, one unit after the other."""
    parts: Iterator[MergeableT] = (work(dump, unit) for unit in shard.units)
    return reduce(add, parts)
