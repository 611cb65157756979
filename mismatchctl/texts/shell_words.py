"""Words of a shell script, and which branches of its `if` and `case` each stands in."""

from __future__ import annotations

import io
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from mismatchctl.texts.scalars import TextError

_BEGINS = re.compile(r"(?<!<)<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_COMMAND = re.compile(r"[;|&(]|\b(?:then|do|else)\b")
"""What stands before a command on its line."""
_KEEPS = re.compile(r"cat|tee|python[\d.]*")
"""Commands for which a here-document is content, or another language."""
_LAUNCHED = re.compile(r"\$\(\s*cat\b|\.(?:sh|bash|sbatch|slurm)\b|\|.*\b(?:(?:ba|z|s)?sh|sbatch)\b")
"""On the first line: its content becomes arguments, a script, or what a shell is given."""


def without_files(text: str) -> str:
    """A script without the here-documents that are content of files; their lines are left empty.

    One that a shell, a remote one or a batch system is given, that becomes arguments or a script, is read as commands.
    """
    lines = text.split("\n")
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        for form in {line, line.lstrip("\t")}:
            places.setdefault(form, []).append(place)
    place = 0
    while place < len(lines):
        first = lines[place]
        for begin in _BEGINS.finditer(_COMMENT.sub("", first)):
            ends = places.get(begin[2], [])
            found = bisect_right(ends, place)
            if found == len(ends):  # a shift of bits, say
                continue
            command = _COMMAND.split(first[: begin.start()])[-1].split()
            if any(map(_KEEPS.fullmatch, command)) and not _is_launched(first, lines[place + 1]):
                lines[place + 1 : ends[found] + 1] = [""] * (ends[found] - place)
            place = ends[found]
        place += 1
    return "\n".join(lines)


def _is_launched(first: str, content: str) -> bool:
    return bool(_LAUNCHED.search(first)) or bool(re.match(r"#!.*sh\b", content))


VARIABLE = re.compile(r"([A-Za-z_]\w*)(\+?)=([^(].*|)", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
"""Where an array begins, a word of which may follow at once."""
_BEFORE = ("export", "declare", "local", "readonly", "env", "then", "else", "do", "time")
"""Words that a command, or a variable, may follow."""
_ENDS = "\n;|&"
"""What ends a command."""
_WITHIN = re.compile(r"(?<=[^\s;|&()])#")
_HASH = "\x01"
"""What stands for # within a word, as in `$#` and `${A##*/}`: it begins no comment there."""
_DEEPEST = 50
_LEAVES = ("exit", "return")
"""Commands after which nothing of the script is launched."""
_SAYS = ("echo", "printf", *_LEAVES)
"""Commands that launch nothing, whatever stands behind them."""
_GIVEN = re.compile(r"\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=.*|\$\{\w+\[[@*]\]\}", re.DOTALL)
"""What a training alone is launched with: an override, an array. Flags have other commands, too."""
_PROGRAM = (".py", ".sh")
"""How a file is named that flags may launch a training of."""


@dataclass(eq=False)
class Branch:
    """What follows `then` or `else`, or a pattern of `case`.

    Attributes:
        block: the `if` or `case` that it is of.
        line: where it begins, counted from 1.
        leaves: whether the script ends there.
        launches: whether one of its commands may be a training's.
    """

    block: ShellBlock
    line: int
    leaves: bool = False
    launches: bool = False


@dataclass(eq=False)
class ShellBlock:
    """An `if` or a `case`.

    Attributes:
        within: the branch that it stands in.
        branches: its own, in their order.
        always: whether one of them is taken in any case.
    """

    within: Branch | None
    branches: list[Branch] = field(default_factory=list)
    always: bool = False


@dataclass(frozen=True)
class Word:
    """A word, whether it stands behind a command or in an array, and the branch that it stands in."""

    text: str
    of_command: bool
    branch: Branch | None


def words(text: str) -> list[Word]:
    """The words of a script; in no branch where one is not closed.

    Raises:
        TextError: a quote is not closed.
    """
    found = _Words(text)
    try:
        words = list(found)
    except ValueError as error:
        raise TextError(str(error).lower()) from None
    return words if found.branch is None else [Word(word.text, word.of_command, None) for word in words]


Choice = Mapping[ShellBlock, Branch | None]
"""Which branch is taken of some blocks; None: none of them."""


def choices(found: Sequence[Word], sets: Callable[[str], bool]) -> Iterator[tuple[int, Choice]]:
    """Each branch that may be taken of a block in which something is set: its line, and its choice.

    Where it sets nothing, or none is taken, the line is that of the block's first branch, negated. Of other blocks
    nothing is chosen, but for those that the block stands in. A branch that launches something and ends the script
    is one of its own; one that only ends it is none.
    """
    setting = dict.fromkeys(
        outer for word in found for outer in _path(word.branch) if sets(word.text) or (outer.leaves and outer.launches)
    )
    for block in dict.fromkeys(branch.block for branch in setting if branch.block.branches):
        around = {outer.block: outer for outer in _path(block.within)}
        for own in (*block.branches, *([] if block.always else [None])):
            taken = (*around.values(), *([] if own is None else [own]))
            if all(branch.launches or not branch.leaves for branch in taken):
                yield (own.line if own in setting else -block.branches[0].line), {**around, block: own}


def followed(found: Sequence[Word], choice: Choice) -> list[Word]:
    """The words that count, up to the end of a branch that is chosen and ends the script.

    Of blocks of which nothing is chosen, all branches count in which it does not end.
    """
    counted: list[Word] = []
    end = None
    for word in found:
        path = list(_path(word.branch))
        if all(_is_followed(branch, choice) for branch in path):
            counted.append(word)
            end = len(counted) if any(branch.leaves for branch in path) else end
    return counted[:end]


def _is_followed(branch: Branch, choice: Choice) -> bool:
    return not _is_taken(branch) or choice.get(branch.block, None if branch.leaves else branch) is branch


def beside(words: Sequence[Word], choice: Choice) -> set[int]:
    """The lines of branches that words stand in of blocks of which nothing is chosen."""
    path = (branch for word in words for branch in _path(word.branch))
    return {branch.line for branch in path if branch.block not in choice and _is_taken(branch)}


def _is_taken(branch: Branch) -> bool:
    """Whether it is one of its block's: a condition is read in any case."""
    return branch in branch.block.branches


def _path(branch: Branch | None) -> Iterator[Branch]:
    """A branch and those that it stands in."""
    while branch is not None:
        yield branch
        branch = branch.block.within


class _Words:
    """Reads words one by one.

    Attributes:
        branch: in which the reader stands; of a condition, one that is none of its block's.
        groups: the branch of each `{` and `do` that is open: what stands in them may not come to pass.
    """

    def __init__(self, text: str) -> None:
        joined = _WITHIN.sub(_HASH, without_files(text.replace("\r\n", "\n")).replace("\\\n", "\f"))
        self._lines = _Lines(joined)
        self._ends = list(accumulate(len(line) + 1 for line in re.split("[\n\f]", joined)))
        self.branch: Branch | None = None
        self.groups: list[Branch | None] = []

    def __iter__(self) -> Iterator[Word]:
        lexer = shlex.shlex(self._lines, posix=True, punctuation_chars=_ENDS)
        lexer.whitespace_split, lexer.whitespace = True, " \t\r\f"
        behind = in_array = in_head = in_pattern = depends = says = program = False
        for word in lexer:
            if word and not word.strip(_ENDS):
                behind, program, depends = False, False, depends or "&&" in word or "||" in word
                in_pattern = in_pattern or (";;" in word and self.branch is not None)
                continue
            if in_head or (in_pattern and word != "esac"):
                if in_pattern and word.endswith(")"):
                    self._next(always=word.strip("()") == "*")
                in_pattern = (in_head and word == "in") or (in_pattern and not word.endswith(")"))
                in_head = in_head and word != "in"
                continue
            if not behind:
                in_head, in_pattern = word == "case", False
                self._follow(word, depends=depends)
            if word == "{":  # behind the name of a function, too
                self.groups.append(self.branch)
            depends = False
            opens = _ARRAY.match(word)
            word = word[opens.end() :] if opens else word
            in_array = (in_array or bool(opens)) and not word.endswith(")")
            yield Word(word.replace("\f", " ").replace(_HASH, "#"), behind or in_array or bool(opens), self.branch)
            program |= word.endswith(_PROGRAM)
            if behind and not says and (_GIVEN.fullmatch(word) or (program and word.startswith("--"))):
                for branch in _path(self.branch):
                    branch.launches = True
            if not behind:
                behind, says = not (VARIABLE.fullmatch(word) or word in _BEFORE), word in _SAYS

    def _follow(self, word: str, *, depends: bool) -> None:
        """Note what a word means for branches where a command may stand; it may depend on the one before."""
        if word in ("if", "case"):
            if sum(1 for _ in _path(self.branch)) >= _DEEPEST:
                raise TextError("branches are nested too deeply")
            self.branch = Branch(ShellBlock(self.branch), self._line)
        elif self.branch is not None:
            if word in ("then", "else"):
                self._next(always=word == "else")
            elif word in ("fi", "esac"):
                self.branch = self.branch.block.within
            elif word in _LEAVES:
                self.branch.leaves |= not depends and self.branch not in self.groups
        if word == "do":
            self.groups.append(self.branch)
        elif word in ("done", "}") and self.groups:
            self.groups.pop()

    def _next(self, *, always: bool) -> None:
        assert self.branch is not None
        block = self.branch.block
        block.always |= always
        self.branch = Branch(block, self._line)
        block.branches.append(self.branch)

    @property
    def _line(self) -> int:
        return bisect_right(self._ends, self._lines.tell() - 1) + 1


class _Lines(io.StringIO):
    """A text of which a comment is read without the end of its line, which ends a command."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line
