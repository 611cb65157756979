"""Read launch scripts: the flags, Hydra overrides and `name=value` arguments of each command.

The script is not executed. Variables and arrays are replaced by their values. Conditions are not evaluated, so
assignments in all branches apply, in order.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from mismatchctl.io.yaml import MOST_DEPTH, TextError, Unknown, parse_scalar

_FLAG_LINE = re.compile(r"^\s*(?:[A-Za-z_]\w*\+?=\(|--[A-Za-z][\w.-]*(?:[\s=]|$))", re.MULTILINE)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_CHOICE = re.compile(r"\+?([A-Za-z_][\w.]*(?:[/@][\w.]+)+)=([^\s/]*)")
"""Hydra argument that selects a file of a config group: `algorithm/rollout_correction=mine`, `group@place=mine`."""
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*(?:[/@][\w.]+)*)(?:[=)].*)?", re.DOTALL)
"""Hydra argument that removes a key or the selected file of a group: `~a.b`, `~a.b=1`, `~group/of=mine`."""
_VARIABLE = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_POSITIONAL = re.compile(r"\$(?:\d|\{\d+\})")
_VARIABLE_USE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)(?:\[[@*0]\])?(?::?[-=+]([^{}]*))?\})")
"""Use of a variable: `$NAME`, `${NAME}`, `${NAME:-default}`, `${NAME[@]}`."""
_SEVERAL = re.compile(r"\$[@*]|\$\{[@*]\}|\$\{\w+\[[@*]\][^{}]*\}")
"""Words that bash replaces by zero, one or more words: `$@`, `${ARGS[@]}`."""
_FILE = re.compile(r"[^=\s]*\.(?:ya?ml|toml|json)")
_HERE = re.compile(r"(?<!<)<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_WRITES = re.compile(r"\b(?:cat|tee|python[\d.]*)\b[^|]*<<(?![^|]*\|)")
_LAUNCHED = re.compile(r"\$\(\s*cat\b|\.(?:sh|bash|sbatch|slurm)\b")
_WITHIN = re.compile(r"(?<=[^\s;|&()])#")
_HASH = "\x01"  # Replacement for a # inside a word, such as `${#A[@]}`. shlex would start a comment there.
_ENDS = "\n;|&"
_KEYWORDS = frozenset(
    {"if", "then", "elif", "else", "fi", "do", "done", "while", "until", "for", "case", "esac", "in", "{", "}", "!"}
    | {"export", "declare", "local", "readonly", "env", "time", "exec", "nohup", "sudo", "set"}
)
"""Keywords after which a command or an assignment may follow."""
_PRINTS = frozenset(
    {"echo", "printf", "exit", "return", "source", ".", "cat", "tee", "cp", "mv", "rm", "mkdir", "ls", "cd", "sed"}
    | {"ln", "grep", "wget", "curl", "git", "pip", "tar", "unzip", "sleep", "kill", "pkill", "chmod", "read"}
)
"""Commands that never launch a training run."""
_MOST_WORDS = 200_000
_MOST_NESTED = 4
_MOST_CHARACTERS = 10_000  # Maximum length of a word after substitution. Otherwise, `A=$A$A` would grow without end.


@dataclass
class Launch:
    """The flags, overrides and arguments of one command of a script."""

    keys: dict[str, Any]
    line: int = 0
    files: tuple[tuple[str, str], ...] = ()
    program: str = ""  # the Python file that the command runs


def is_shell_script(text: str) -> bool:
    """Return True if a line starts with a flag, such as `--lr 1e-6`, or defines an array, such as `ARGS=(`."""
    return _FLAG_LINE.search(text) is not None


def parse_shell(text: str) -> list[Launch]:
    """Return one Launch per command with arguments, or a single Launch if the text only contains flags or arrays."""
    return _Script(text).launches()


@dataclass
class _Script:
    text: str
    arrays: dict[str, list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def launches(self) -> list[Launch]:
        found, alone = [], []
        for line, words in self._commands():
            if not words:
                continue
            if _sets(words[0]):
                alone += words
            elif made := _read(words, line):
                found.append(made)
        if found:
            return found
        for name, words in self.arrays.items():
            if name not in self.used and any(map(_sets, words)):
                alone += words
        return [_read(alone, 0) or Launch({})]

    def _commands(self) -> Iterator[tuple[int, list[str]]]:
        for line, raw in _split_commands(self.text):
            words = list(raw)
            while words and words[0] in _KEYWORDS:
                first = words.pop(0)
                if first in ("case", "for"):
                    words = words[words.index("in") + 1 :] if "in" in words else []
            if len(words) > 1 and words[0].endswith(")") and "(" not in words[0]:  # a pattern of `case`
                words = words[1:]
            while words and (variable := _VARIABLE.fullmatch(words[0])):
                name, adds, value = variable.groups()
                if value.startswith("("):
                    value_words = [value[1:], *words[1:]]
                    value_words[-1] = value_words[-1].removesuffix(")")
                    made, words = self._expanded([one for one in value_words if one]), []
                else:
                    made, words = [self._substituted(value)], words[1:]
                    if _POSITIONAL.fullmatch(value):
                        continue
                    before = self.arrays.get(name, [])
                    if adds and before:
                        self.arrays[name] = [*before[:-1], before[-1] + made[0]]
                        continue
                self.arrays[name] = [*(self.arrays.get(name, []) if adds else []), *made]
            if words and words[0] not in _PRINTS:
                yield line, self._expanded(words)

    def _expanded(self, words: Sequence[str]) -> list[str]:
        """Substitute variables. A word that is only a variable can become several arguments."""
        found: list[str] = []
        for word in words:
            used = _VARIABLE_USE.fullmatch(word)
            name = (used[1] or used[2]) if used else ""
            if used and name in self.arrays:
                self.used.add(name)
                short = sum(map(len, self.arrays[name])) <= _MOST_CHARACTERS
                found += [part for one in self.arrays[name] for part in _parts(one)] if short else [word]
            elif _SEVERAL.fullmatch(word):
                continue
            else:
                text = self._substituted(word)
                found += _parts(text) if used and text != word else [text]
            if len(found) > _MOST_WORDS:
                raise TextError("the script expands to too many arguments")
        return found

    def _substituted(self, word: str) -> str:
        def value(used: re.Match[str]) -> str:
            name = used[1] or used[2]
            if name in self.arrays:
                self.used.add(name)
                text = " ".join(self.arrays[name])
                return text if len(text) <= _MOST_CHARACTERS else used[0]
            return used[0] if used[3] is None else used[3]

        for _ in range(_MOST_NESTED):
            if "$" not in word or len(word) > _MOST_CHARACTERS:
                break
            if sum(len(value(used)) for used in _VARIABLE_USE.finditer(word)) > _MOST_CHARACTERS:
                break
            made = _VARIABLE_USE.sub(value, word)
            if made == word:
                break
            word = made
        return word


def _sets(word: str) -> bool:
    return any(kind.fullmatch(word) for kind in (_FLAG, _OVERRIDE, _CHOICE, _REMOVAL))


def _parts(text: str) -> list[str]:
    if " " not in text and "\n" not in text and "'" not in text and '"' not in text:
        return [text] if text else []
    if not re.match(r"\s*[\w$./+~-]*(?:\s|--|[\w.]+=)", text):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _split_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the shell words of each command."""
    text = re.sub(r"\\[ \t]*(\n|\Z)", r"\\\1", text.replace("\r\n", "\n"))
    joined = _WITHIN.sub(_HASH, _without_files(text).replace("\\\n", "\f").removesuffix("\\"))
    ends = list(accumulate(len(line) + 1 for line in re.split("[\n\f]", joined)))
    stream = _Lines(joined)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=_ENDS)
    lexer.whitespace_split, lexer.whitespace = True, " \t\r\f"
    words: list[str] = []
    array, start, count = False, 0, 0
    while True:
        try:
            word = lexer.get_token()
        except ValueError as error:
            raise TextError(str(error).lower()) from None
        count += 1
        if count > _MOST_WORDS:
            raise TextError("the script is too long")
        if word is None:
            break
        if word and not word.strip(_ENDS):
            if not array and words:
                yield start, words
                words = []
            continue
        if not words:
            start = bisect_right(ends, stream.tell() - 1) + 1
        array = (array or re.fullmatch(r"\w+\+?=\(.*", word) is not None) and not word.endswith(")")
        words.append(word.replace("\f", " ").replace(_HASH, "#"))
    if words:
        yield start, words


class _Lines(io.StringIO):
    """Script text for shlex. When shlex skips a comment, it must not skip the line end, which ends the command."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def _without_files(text: str) -> str:
    """Remove here-documents (`<<EOF`) that contain a file or Python code, because they are not shell commands."""
    lines, place = text.split("\n"), 0
    while place < len(lines):
        first = lines[place]
        begin = _HERE.search(re.sub(r"(?:^|\s)#.*", "", first))
        place += 1
        if begin is None:
            continue
        end = next((at for at in range(place, len(lines)) if lines[at].lstrip("\t") == begin[2]), None)
        if end is None:  # not a here-document: `<<` can be a bit shift
            continue
        script = _LAUNCHED.search(first) or re.match(r"#!.*sh\b", lines[place])
        if _WRITES.search(first) and not script:
            lines[place:end] = [""] * (end - place)
        lines[end] = ""
        lines[place - 1] = first[: begin.start()] + first[begin.end() :]
        place = end + 1
    return "\n".join(lines)


def _read(words: Sequence[str], line: int) -> Launch | None:
    keys: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    files: list[tuple[str, str]] = []
    flag: list[str] = []
    for given in words:
        if named := _FLAG.fullmatch(given):
            flag = named[1].split(".") if "." in named[1] else [f"--{named[1]}"]  # a dotted flag is a nested key
            value = True if named[2] is None else _parse_override_value(named[2])
            _find_level(keys, flag)[flag[-1]] = value
            if named[2] is not None and _FILE.fullmatch(named[2]):
                files.append((named[1], named[2]))
            flag = flag if named[2] is None else []
        elif override := _OVERRIDE.fullmatch(given):
            path = override[1].split(".")
            _find_level(keys, path)[path[-1]] = _parse_override_value(override[2])
            flag = []
        elif choice := _CHOICE.fullmatch(given):
            keys[choice[1]], flag = choice[2], []
        elif (removal := _REMOVAL.fullmatch(given)) and not (flag and "/" in given):  # a flag's value may be ~/folder
            arguments.pop(removal[1], None)
            keys.pop(removal[1], None)
            level, path = keys, removal[1].split(".")
            for key in path[:-1]:
                level = inner if isinstance(inner := level.get(key), dict) else {}
            level.pop(path[-1], None)
            flag = []
        elif variable := _VARIABLE.fullmatch(given):
            flag = []
            arguments[variable[1]] = _parse_override_value(variable[3])
        else:
            if _FILE.fullmatch(given):
                files.append((".".join(flag).lstrip("-"), given))
            if flag:
                flag = flag if given and _add_flag_value(keys, flag, _parse_override_value(given)) else []
    if not keys and not arguments and not files:
        return None
    program = next((word for word in words if word.endswith(".py")), "")
    return Launch(arguments | keys, line, tuple(files), program)


def _parse_override_value(text: str) -> Any:
    if "$" in text or "`" in text:
        return Unknown(text)
    if text[:1] in ("[", "{"):
        from mismatchctl.io.yaml import parse_yaml  # most scripts need no YAML

        try:
            return parse_yaml(text)
        except TextError:
            return text
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else parse_scalar(text)


def _find_level(found: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return the mapping at `keys[:-1]`. Like Hydra, create missing mappings, and replace other values by mappings."""
    if len(keys) > MOST_DEPTH:
        raise TextError("a key is nested too deeply")
    for key in keys[:-1]:
        if not isinstance(found.get(key), dict):
            found[key] = {}
        found = found[key]
    return found


def _add_flag_value(found: dict[str, Any], keys: list[str], value: Any) -> bool:
    """Store a word after a flag: `--sizes 1 2` becomes [1, 2]. Return True if another number may belong to the flag."""
    level, last = _find_level(found, keys), keys[-1]
    before = [] if level[last] is True else level[last] if isinstance(level[last], list) else [level[last]]
    are_numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in (*before, value))
    if not before or are_numbers:
        level[last] = [*before, value] if before else value
    return are_numbers


UNPACKING_NOT_READ = "a ** argument is not supported; write its options in the call"


@dataclass(frozen=True)
class PythonCall:
    """A call of a function or class in Python code, or of a method of the class."""

    function: str  # name of the called method, or "" for a call of the class or function itself
    given: dict[str, Any]  # constant values of named arguments
    computed: tuple[str, ...]  # arguments without a constant value
    brings_more: bool  # True if the call unpacks arguments with **
    partial: bool  # True if an argument is `...`, which stands for arguments that the text does not show
    line: int

    def values(self, computed: Container[str]) -> dict[str, Any]:
        return self.given | {name: Unknown("computed in the script") for name in self.computed if name in computed}


def find_python_calls(text: str, name: str) -> list[PythonCall]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(error.msg, error.lineno, error.offset) from None
    except (ValueError, RecursionError, MemoryError):
        raise TextError("nested too deeply, or contains a null character") from None
    calls = ((node, _function_name(node.func, name)) for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [_build_call(node, function) for node, function in calls if function is not None]
    return sorted(found, key=lambda call: call.line)


def _function_name(called: ast.expr, name: str) -> str | None:
    """Return "" for the call `name(...)`, and "method" for the call `name.method(...)`."""
    if isinstance(called, ast.Attribute) and name == getattr(called.value, "attr", getattr(called.value, "id", None)):
        return called.attr
    return "" if name == getattr(called, "attr", getattr(called, "id", None)) else None


def _build_call(node: ast.Call, function: str) -> PythonCall:
    given: dict[str, Any] = {}
    dots = [isinstance(argument, ast.Constant) and argument.value is ... for argument in node.args]
    computed = [f"argument {place}" for place, is_dots in enumerate(dots, 1) if not is_dots]
    named = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
    for name, value in named:
        try:
            given[name] = ast.literal_eval(value)
        except (ValueError, TypeError):
            computed.append(name)
    return PythonCall(function, given, tuple(computed), len(named) < len(node.keywords), any(dots), node.lineno)
