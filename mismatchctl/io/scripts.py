"""Read launch scripts without executing them: options of shell scripts, and calls in Python scripts."""

from __future__ import annotations

import ast
import io
import re
import shlex
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mismatchctl.io.yaml import TextError, parse_scalar

_HEREDOC_START = re.compile(r"(?<!<)<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_COMMAND = re.compile(r"[;|&(]|\b(?:then|do|else)\b")
"""What stands before a command on its line."""
_CONTENT_COMMANDS = re.compile(r"cat|tee|python[\d.]*")
"""Commands for which a here-document is content, or another language."""
_LAUNCH_PATTERN = re.compile(r"\$\(\s*cat\b|\.(?:sh|bash|sbatch|slurm)\b|\|.*\b(?:(?:ba|z|s)?sh|sbatch)\b")
"""On the first line: its content becomes arguments, a script, or what a shell is given."""


def remove_heredocs(text: str) -> str:
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
        for begin in _HEREDOC_START.finditer(_COMMENT.sub("", first)):
            ends = places.get(begin[2], [])
            found = bisect_right(ends, place)
            if found == len(ends):  # a shift of bits, say
                continue
            command = _COMMAND.split(first[: begin.start()])[-1].split()
            if any(map(_CONTENT_COMMANDS.fullmatch, command)) and not _is_launched(first, lines[place + 1]):
                lines[place + 1 : ends[found] + 1] = [""] * (ends[found] - place)
            place = ends[found]
        place += 1
    return "\n".join(lines)


def _is_launched(first: str, content: str) -> bool:
    return bool(_LAUNCH_PATTERN.search(first)) or bool(re.match(r"#!.*sh\b", content))


VARIABLE = re.compile(r"([A-Za-z_]\w*)(\+?)=([^(].*|)", re.DOTALL)
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
"""Where an array begins, a word of which may follow at once."""
_PREFIX_WORDS = ("export", "declare", "local", "readonly", "env", "then", "else", "do", "time")
"""Words that a command, or a variable, may follow."""
_COMMAND_ENDS = "\n;|&"
"""What ends a command."""
_HASH_IN_WORD = re.compile(r"(?<=[^\s;|&()])#")
_HASH = "\x01"
"""What stands for # within a word, as in `$#` and `${A##*/}`: it begins no comment there."""
_MOST_DEPTH = 50
_EXIT_COMMANDS = ("exit", "return")
"""Commands after which nothing of the script is launched."""
_MESSAGE_COMMANDS = ("echo", "printf", *_EXIT_COMMANDS)
"""Commands that launch nothing, whatever stands behind them."""
_TRAINING_ARGUMENT = re.compile(r"\+{0,2}[A-Za-z_]\w*(?:\.\w+)+=.*|\$\{\w+\[[@*]\]\}", re.DOTALL)
"""What a training alone is launched with: an override, an array. Flags have other commands, too."""
_PROGRAM_SUFFIXES = (".py", ".sh")
"""How a file is named that flags may launch a training of."""


@dataclass(eq=False)
class ShellBranch:
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

    within: ShellBranch | None
    branches: list[ShellBranch] = field(default_factory=list)
    always: bool = False


@dataclass(frozen=True)
class ShellWord:
    """A word, whether it stands behind a command or in an array, and the branch that it stands in."""

    text: str
    of_command: bool
    branch: ShellBranch | None


def read_words(text: str) -> list[ShellWord]:
    """The words of a script; in no branch where one is not closed.

    Raises:
        TextError: a quote is not closed.
    """
    found = _WordReader(text)
    try:
        words = list(found)
    except ValueError as error:
        raise TextError(str(error).lower()) from None
    return words if found.branch is None else [ShellWord(word.text, word.of_command, None) for word in words]


BranchChoice = Mapping[ShellBlock, ShellBranch | None]
"""Which branch is taken of some blocks; None: none of them."""


def list_choices(found: Sequence[ShellWord], sets: Callable[[str], bool]) -> Iterator[tuple[int, BranchChoice]]:
    """Each branch that may be taken of a block in which something is set: its line, and its choice.

    Where it sets nothing, or none is taken, the line is that of the block's first branch, negated. Of other blocks
    nothing is chosen, but for those that the block stands in. A branch that launches something and ends the script
    is one of its own; one that only ends it is none.
    """
    setting = dict.fromkeys(
        outer
        for word in found
        for outer in _branch_path(word.branch)
        if sets(word.text) or (outer.leaves and outer.launches)
    )
    for block in dict.fromkeys(branch.block for branch in setting if branch.block.branches):
        around = {outer.block: outer for outer in _branch_path(block.within)}
        for own in (*block.branches, *([] if block.always else [None])):
            taken = (*around.values(), *([] if own is None else [own]))
            if all(branch.launches or not branch.leaves for branch in taken):
                yield (own.line if own in setting else -block.branches[0].line), {**around, block: own}


def select_words(found: Sequence[ShellWord], choice: BranchChoice) -> list[ShellWord]:
    """The words that count, up to the end of a branch that is chosen and ends the script.

    Of blocks of which nothing is chosen, all branches count in which it does not end.
    """
    counted: list[ShellWord] = []
    end = None
    for word in found:
        path = list(_branch_path(word.branch))
        if all(_is_selected(branch, choice) for branch in path):
            counted.append(word)
            end = len(counted) if any(branch.leaves for branch in path) else end
    return counted[:end]


def _is_selected(branch: ShellBranch, choice: BranchChoice) -> bool:
    return not _is_block_branch(branch) or choice.get(branch.block, None if branch.leaves else branch) is branch


def find_unchosen_lines(words: Sequence[ShellWord], choice: BranchChoice) -> set[int]:
    """The lines of branches that words stand in of blocks of which nothing is chosen."""
    path = (branch for word in words for branch in _branch_path(word.branch))
    return {branch.line for branch in path if branch.block not in choice and _is_block_branch(branch)}


def _is_block_branch(branch: ShellBranch) -> bool:
    """Whether it is one of its block's: a condition is read in any case."""
    return branch in branch.block.branches


def _branch_path(branch: ShellBranch | None) -> Iterator[ShellBranch]:
    """A branch and those that it stands in."""
    while branch is not None:
        yield branch
        branch = branch.block.within


class _WordReader:
    """Reads words one by one.

    Attributes:
        branch: in which the reader stands; of a condition, one that is none of its block's.
        groups: the branch of each `{` and `do` that is open: what stands in them may not come to pass.
    """

    def __init__(self, text: str) -> None:
        joined = _HASH_IN_WORD.sub(_HASH, remove_heredocs(text.replace("\r\n", "\n")).replace("\\\n", "\f"))
        self._lines = _CommandLines(joined)
        self._ends = list(accumulate(len(line) + 1 for line in re.split("[\n\f]", joined)))
        self.branch: ShellBranch | None = None
        self.groups: list[ShellBranch | None] = []

    def __iter__(self) -> Iterator[ShellWord]:
        lexer = shlex.shlex(self._lines, posix=True, punctuation_chars=_COMMAND_ENDS)
        lexer.whitespace_split, lexer.whitespace = True, " \t\r\f"
        behind = in_array = in_head = in_pattern = depends = says = program = False
        for word in lexer:
            if word and not word.strip(_COMMAND_ENDS):
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
            yield ShellWord(word.replace("\f", " ").replace(_HASH, "#"), behind or in_array or bool(opens), self.branch)
            program |= word.endswith(_PROGRAM_SUFFIXES)
            if behind and not says and (_TRAINING_ARGUMENT.fullmatch(word) or (program and word.startswith("--"))):
                for branch in _branch_path(self.branch):
                    branch.launches = True
            if not behind:
                behind, says = not (VARIABLE.fullmatch(word) or word in _PREFIX_WORDS), word in _MESSAGE_COMMANDS

    def _follow(self, word: str, *, depends: bool) -> None:
        """Note what a word means for branches where a command may stand; it may depend on the one before."""
        if word in ("if", "case"):
            if sum(1 for _ in _branch_path(self.branch)) >= _MOST_DEPTH:
                raise TextError("branches are nested too deeply")
            self.branch = ShellBranch(ShellBlock(self.branch), self._line)
        elif self.branch is not None:
            if word in ("then", "else"):
                self._next(always=word == "else")
            elif word in ("fi", "esac"):
                self.branch = self.branch.block.within
            elif word in _EXIT_COMMANDS:
                self.branch.leaves |= not depends and self.branch not in self.groups
        if word == "do":
            self.groups.append(self.branch)
        elif word in ("done", "}") and self.groups:
            self.groups.pop()

    def _next(self, *, always: bool) -> None:
        assert self.branch is not None
        block = self.branch.block
        block.always |= always
        self.branch = ShellBranch(block, self._line)
        block.branches.append(self.branch)

    @property
    def _line(self) -> int:
        return bisect_right(self._ends, self._lines.tell() - 1) + 1


class _CommandLines(io.StringIO):
    """A text of which a comment is read without the end of its line, which ends a command."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


_FLAG_LINE = re.compile(r"^\s*(?:[A-Za-z_]\w*\+?=\(|--[A-Za-z][\w.-]*(?:[\s=]|$))", re.MULTILINE)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_CHOICE = re.compile(r"\+?([A-Za-z_][\w.]*(?:[/@][\w.]+)+)=([^\s/]*)")
"""Of a file of a group, in Hydra's words: `algorithm/rollout_correction=mine`, `group@place=mine`."""
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*(?:[/@][\w.]+)*)(?:[=)].*)?", re.DOTALL)
"""Of what was set or chosen before it, in Hydra's words: `~a.b`, `~a.b=1`, `~group/of=mine`."""
_POSITIONAL = re.compile(r"\$(?:\d|\{\d+\})")
"""What the script itself is given."""
_VARIABLE_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)(?::?[-=]([^{}]*))?\})")
"""`$NAME`, `${NAME}`, `${NAME:-what it is without}`."""
_MOST_NESTED = 4
"""Variables in the defaults of variables."""
_MOST_CHARACTERS = 10_000
"""Of a word with its variables put in: `A=$A$A` grows without end."""
_MOST_WORDS = 500_000
"""Of all readings together."""


@dataclass(frozen=True)
class LaunchKeys:
    """Keys of what a script launches.

    Attributes:
        line: where the branch begins that it takes, negated: that it does not take; 0 where it has none.
        beside: where branches of other blocks begin that set something in it too.
    """

    keys: dict[str, Any]
    line: int = 0
    beside: tuple[int, ...] = ()


def is_shell_script(text: str) -> bool:
    """Whether a text has a line that begins with a flag, or with an array of them."""
    return _FLAG_LINE.search(text) is not None


def parse_shell(text: str) -> list[LaunchKeys]:
    """Flags as `--name`: value, True without one, a list of several numbers; overrides and dotted flags as nested keys.

    A word `name=value` sets a variable before a command, and is an argument of it behind: `train.py loss_fn=ppo`.
    Each branch of an `if` or a `case` that sets something is a reading, if it sets another thing than others, and ends
    where it ends the script; what stands in other blocks counts in its order.

    Raises:
        TextError: a quote is not closed, or a key is given a value and keys below it; there are too many branches.
    """
    found = read_words(text)
    readings: list[LaunchKeys] = []
    for number, (line, choice) in enumerate(list_choices(found, _may_set_value)):
        if number * len(found) > _MOST_WORDS:
            raise TextError("too many branches set something for so long a script: give what one of them launches")
        counted = select_words(found, choice)
        keys = _collect_keys(counted)
        if all(keys != one.keys for one in readings):
            setting = [word for word in counted if _may_set_value(word.text)]
            readings.append(LaunchKeys(keys, line, tuple(sorted(find_unchosen_lines(setting, choice)))))
    return readings or [LaunchKeys(_collect_keys(found))]


def _may_set_value(word: str) -> bool:
    """Whether a word may set something."""
    variable = VARIABLE.fullmatch(word)
    return (
        not _is_script_argument(variable)
        if variable
        else any(kind.fullmatch(word) for kind in (_FLAG, _OVERRIDE, _CHOICE, _REMOVAL))
    )


def _is_script_argument(variable: re.Match[str]) -> bool:
    """Whether a variable is what the script is called with: what it was before, it is without that."""
    return _POSITIONAL.fullmatch(variable[3]) is not None


def _collect_keys(found: Sequence[ShellWord]) -> dict[str, Any]:
    """What words say, one after the other."""
    keys: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    variables: dict[str, str] = {}
    flag: list[str] = []
    for given, of_command, closes in _substitute_words(found, variables):
        if named := _FLAG.fullmatch(given):
            flag = _flag_keys(named[1])
            _set_value(keys, flag, True if named[2] is None else parse_scalar(named[2]))
            flag = flag if named[2] is None else []
        elif override := _OVERRIDE.fullmatch(given):
            _set_value(keys, override[1].split("."), _parse_override_value(override[2]))
            flag = []
        elif choice := _CHOICE.fullmatch(given):
            keys[choice[1]] = choice[2]
            flag = []
        elif (removal := _REMOVAL.fullmatch(given)) and not (flag and "/" in given):  # a flag's may be a home's path
            for given_so_far in (arguments, keys):
                given_so_far.pop(removal[1], None)
            _remove_value(keys, removal[1].split("."))
            flag = []
        elif variable := VARIABLE.fullmatch(given):
            before = variables.get(variable[1], "") if variable[2] else ""
            value = (before + variable[3])[: _MOST_CHARACTERS + 1]  # a longer one is put in nowhere
            flag = []
            if not _is_script_argument(variable):
                variables[variable[1]] = value
            if of_command:
                arguments[variable[1]] = parse_scalar(variable[3])
        elif flag:
            flag = flag if given and _add_flag_value(keys, flag, parse_scalar(given)) else []
        flag = [] if closes else flag
    return arguments | keys


def _substitute_words(found: Sequence[ShellWord], variables: Mapping[str, str]) -> Iterator[tuple[str, bool, bool]]:
    """Each word with the variables of its place put in, whether a command has it, and whether it ends an array.

    A word that is a variable may stand for several.
    """
    for word, of_command in ((one.text, one.of_command) for one in found):
        closes, word = word.endswith(")") and "(" not in word, word.removesuffix(")") if word != "(" else word
        given = _substitute_variables(word, variables)
        several = _split_words(given) if given != word and _VARIABLE_USE.fullmatch(word) else [given]
        for place, one in enumerate(several or [""], 1):
            yield one, of_command, closes and place >= len(several)


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _substitute_variables(word: str, variables: Mapping[str, str]) -> str:
    """A word with its variables put in, from the inside out where one is the default of another."""

    def value(used: re.Match[str]) -> str:
        return variables.get(used[1] or used[2], used[0] if used[3] is None else used[3])

    for _ in range(_MOST_NESTED):
        made = _VARIABLE_USE.sub(value, word) if len(word) <= _MOST_CHARACTERS else word
        if made == word or len(made) > _MOST_CHARACTERS:
            break
        word = made
    return word


def _flag_keys(flag: str) -> list[str]:
    """A dotted flag is a place among keys, any other one a key with its dashes."""
    return flag.split(".") if "." in flag else [f"--{flag}"]


def _parse_override_value(text: str) -> Any:
    """The value of an override: a list or a block in brackets, text in quotes that the shell left, or a scalar."""
    if text[:1] in ("[", "{"):
        from mismatchctl.io.yaml import parse_yaml  # loaded where YAML is read

        try:
            return parse_yaml(text)
        except TextError:
            return text
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else parse_scalar(text)


def _set_value(found: dict[str, Any], keys: list[str], value: Any) -> None:
    level = found
    for key in keys[:-1]:
        level = level.setdefault(key, {})
        if not isinstance(level, dict):
            raise TextError(f"{'.'.join(keys)} stands below a key that has a value")
    level[keys[-1]] = value


def _remove_value(found: dict[str, Any], keys: list[str]) -> None:
    level: Any = found
    for key in keys[:-1]:
        level = level.get(key)
        if not isinstance(level, dict):
            return
    level.pop(keys[-1], None)


def _add_flag_value(found: dict[str, Any], keys: list[str], value: Any) -> bool:
    """Take a word as the value of a flag, or as one more number of it; whether another one may follow."""
    level = found
    for key in keys[:-1]:
        level = level[key]
    before = level[keys[-1]]
    several = before if isinstance(before, list) else [before]
    if before is True:
        level[keys[-1]] = value
    elif all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (*several, value)):
        level[keys[-1]] = [*several, value]
    else:
        return False
    return True


UNPACKING_NOT_READ = "what ** brings is not read; write its options in the call"


@dataclass(frozen=True)
class PythonCall:
    """A call of `name`, or of a function that belongs to it.

    Attributes:
        function: what follows the name's dot; empty: the name itself is called.
        given: plain arguments by their names.
        computed: the arguments that are no plain values with a name, by their names or places.
        brings_more: whether `**` brings arguments from elsewhere.
        partial: whether `...` stands for arguments that are left out.
        line: where it stands, counted from 1.
    """

    function: str
    given: dict[str, Any]
    computed: tuple[str, ...]
    brings_more: bool
    partial: bool
    line: int


def find_python_calls(text: str, name: str) -> list[PythonCall]:
    """The calls of a name, in their order.

    Raises:
        TextError: the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(error.msg, error.lineno, error.offset) from None
    except (ValueError, RecursionError, MemoryError):
        raise TextError("nested too deeply, or holds a null character") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _function_name(node, name) is not None]
    return [_build_call(node, _function_name(node, name) or "") for node in sorted(found, key=lambda node: node.lineno)]


def _function_name(node: ast.Call, name: str) -> str | None:
    called = node.func
    if isinstance(called, ast.Name):
        return "" if called.id == name else None
    if isinstance(called, ast.Attribute):
        owner = called.value
        own = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        return called.attr if own == name else "" if called.attr == name else None
    return None


def _build_call(node: ast.Call, function: str) -> PythonCall:
    partial = False
    given: dict[str, Any] = {}
    computed = []
    for place, argument in enumerate(node.args, 1):
        if isinstance(argument, ast.Constant) and argument.value is ...:
            partial = True
        else:
            computed.append(f"argument {place}")
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            computed.append(keyword.arg)
    brings_more = any(keyword.arg is None for keyword in node.keywords)
    return PythonCall(function, given, tuple(computed), brings_more, partial, node.lineno)
