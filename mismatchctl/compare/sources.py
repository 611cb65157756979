"""The arguments of `compare`: dumps or Results, recognized by content, perhaps named by their engines."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mismatchctl.correction import Correction
from mismatchctl.dumps import Dump, DumpSource, MemoryTable
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.result import Result, RunResult, is_result, read_result, storage_of
from mismatchctl.stores import normal

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^,="']+)"""
_NAMED = re.compile(rf"(rollout|trainer)=({_VALUE}),(rollout|trainer)=({_VALUE})=(.+)", re.DOTALL)
_LOOKS_NAMED = re.compile(r"(rollout|trainer)=")


Opened = Callable[[DumpSource], Dump]
"""What opens the dump of a path."""


@dataclass(frozen=True)
class Argument:
    """A path, and the engines that it is named by; what is in memory has a title in place of a path."""

    path: str
    rollout: str | None = None
    trainer: str | None = None
    memory: MemoryTable | Result | None = None


@dataclass(frozen=True)
class ComparedRun:
    """One run to compare: its part of a Result, and how its dump is `opened` again where it comes from one.

    `alone` says that its argument holds no other run; `corrections` are those that it was analyzed with; `storage` is
    what its log-probs are stored as, by column.
    """

    name: str
    argument: Argument
    run_name: str
    run: RunResult
    alone: bool
    corrections: tuple[Correction, ...] = ()
    opened: Opened | None = None
    storage: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def dump(self) -> Dump | None:
        """The dump behind it, opened once more; None for a Result."""
        if self.opened is None or isinstance(self.argument.memory, Result):
            return None
        return self.opened(self.argument.memory or self.argument.path)


def parse_argument(text: str) -> Argument:
    """A path, or `rollout=NAME,trainer=NAME=PATH`; names with commas or equals signs stand in quotes.

    Raises:
        ConfigError: begins like the second, but is not of that form.
    """
    if not _LOOKS_NAMED.match(text) or os.path.exists(text):
        return Argument(text)
    found = _NAMED.fullmatch(text)
    if found is None or found[1] == found[3]:
        raise ConfigError(
            f"{text}: write rollout=NAME,trainer=NAME=PATH; a name with a comma or an equals sign stands in quotes"
        )
    names = {found[1]: _unquoted(found[2]), found[3]: _unquoted(found[4])}
    return Argument(found[5], names["rollout"], names["trainer"])


def _unquoted(text: str) -> str:
    return text[1:-1] if text[0] in "\"'" else text


def read_sources(
    given: Sequence[DumpSource | Result], analyzed: Callable[[DumpSource], Result], opened: Opened
) -> tuple[list[ComparedRun], list[str]]:
    """Every run of every argument, in their order, under names of their own; and what to warn about.

    Args:
        given: paths, tables in memory and Results.
        analyzed: what makes a Result of a dump.
        opened: what opens it again.

    Raises:
        DataError: a dump or a Result that cannot be read, or fewer than two runs.
        ConfigError: an argument of wrong form, or two of the same pair of engines.
    """
    arguments = list(_arguments(given))
    _check_pairs(arguments)
    sources: list[ComparedRun] = []
    warnings: list[str] = []
    for argument in arguments:
        result, saved = _opened(argument, analyzed)
        if argument.rollout is not None and len(result.runs) > 1:
            problem = f"holds {len(result.runs)} runs, but is named as one pair of engines"
            raise DataError(problem, file=argument.path, remedy="name each run by a path of its own")
        warnings += [warning for warning in result.warnings if warning not in warnings]
        warnings += [f"left out of {row.file}: {row.count:,}, {row.reason}" for row in result.provenance.left_out]
        corrections, alone = tuple(result.corrections), len(result.runs) == 1
        sources += [
            ComparedRun(
                name, argument, name, run, alone, corrections, None if saved else opened, storage_of(result, name)
            )
            for name, run in result.runs.items()
        ]
    if len(sources) < 2:
        raise DataError("there is only one run", file=arguments[0].path, remedy="name a second dump or Result")
    named = _named(sources)
    return named, [*warnings, *_stored_otherwise(named)]


def _arguments(given: Sequence[DumpSource | Result]) -> Iterator[Argument]:
    in_memory, number = sum(not isinstance(source, str) for source in given), 0
    for source in given:
        number += not isinstance(source, str)
        if isinstance(source, str):
            yield parse_argument(source)
        elif isinstance(source, MemoryTable):
            yield Argument(source.title, memory=source)
        else:
            title = "the Result in memory" if in_memory == 1 else f"Result {number} in memory"
            yield Argument(title, memory=source)


def _opened(argument: Argument, analyzed: Callable[[DumpSource], Result]) -> tuple[Result, bool]:
    """Return the Result of an argument, and whether it was made before."""
    if isinstance(argument.memory, Result):
        return argument.memory, True
    if argument.memory is None and is_result(argument.path):
        return read_result(argument.path), True
    return analyzed(argument.memory or argument.path), False


def _stored_otherwise(sources: Sequence[ComparedRun]) -> Iterator[str]:
    """Warnings about log-probs whose storage alone would make a difference."""
    first, *others = sources
    for other in others:
        for column, there in first.storage.items():
            here = other.storage[column]
            if here != there:
                yield f"{column} is stored as {here} in {other.name}, as {there} in {first.name}: rounding differs"


def _check_pairs(arguments: Sequence[Argument]) -> None:
    pairs = Counter((a.rollout, a.trainer) for a in arguments if a.rollout is not None)
    for (rollout, trainer), times in pairs.items():
        if times > 1:
            raise ConfigError(f"rollout={rollout},trainer={trainer} is named {times} times: a pair has one dump")


def _named(sources: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Sources under different names: the engines, else the run, else with the path before it, else numbered."""
    names = [f"{s.argument.rollout} → {s.argument.trainer}" if s.argument.rollout else s.run_name for s in sources]
    shared = Counter(names)
    for index, source in enumerate(sources):
        if shared[names[index]] > 1:
            path = normal(source.argument.path)
            names[index] = path if source.alone else f"{path}: {source.run_name}"
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        names[index] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return [replace(source, name=name) for source, name in zip(sources, names, strict=True)]
