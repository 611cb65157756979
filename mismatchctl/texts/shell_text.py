"""Shell scripts that start a training: their flags, Hydra overrides and arguments `name=value`, nothing else.

Nothing is executed. Variables that the text itself sets are put in, of others what the text says for where they are not
set; what is left stays as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatchctl.texts.scalars import TextError, scalar
from mismatchctl.texts.shell_words import VARIABLE, Word, beside, choices, followed, words

_FLAG_LINE = re.compile(r"^\s*(?:[A-Za-z_]\w*\+?=\(|--[A-Za-z][\w.-]*(?:[\s=]|$))", re.MULTILINE)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_CHOICE = re.compile(r"\+?([A-Za-z_][\w.]*(?:[/@][\w.]+)+)=([^\s/]*)")
"""Of a file of a group, in Hydra's words: `algorithm/rollout_correction=mine`, `group@place=mine`."""
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*(?:[/@][\w.]+)*)(?:[=)].*)?", re.DOTALL)
"""Of what was set or chosen before it, in Hydra's words: `~a.b`, `~a.b=1`, `~group/of=mine`."""
_POSITIONAL = re.compile(r"\$(?:\d|\{\d+\})")
"""What the script itself is given."""
_USED = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)(?::?[-=]([^{}]*))?\})")
"""`$NAME`, `${NAME}`, `${NAME:-what it is without}`."""
_MOST_NESTED = 4
"""Variables in the defaults of variables."""
_LONGEST = 10_000
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


def looks_like_shell(text: str) -> bool:
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
    found = words(text)
    readings: list[LaunchKeys] = []
    for number, (line, choice) in enumerate(choices(found, _sets)):
        if number * len(found) > _MOST_WORDS:
            raise TextError("too many branches set something for so long a script: give what one of them launches")
        counted = followed(found, choice)
        keys = _keys_of(counted)
        if all(keys != one.keys for one in readings):
            setting = [word for word in counted if _sets(word.text)]
            readings.append(LaunchKeys(keys, line, tuple(sorted(beside(setting, choice)))))
    return readings or [LaunchKeys(_keys_of(found))]


def _sets(word: str) -> bool:
    """Whether a word may set something."""
    variable = VARIABLE.fullmatch(word)
    return (
        not _is_given(variable)
        if variable
        else any(kind.fullmatch(word) for kind in (_FLAG, _OVERRIDE, _CHOICE, _REMOVAL))
    )


def _is_given(variable: re.Match[str]) -> bool:
    """Whether a variable is what the script is called with: what it was before, it is without that."""
    return _POSITIONAL.fullmatch(variable[3]) is not None


def _keys_of(found: Sequence[Word]) -> dict[str, Any]:
    """What words say, one after the other."""
    keys: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    variables: dict[str, str] = {}
    flag: list[str] = []
    for given, of_command, closes in _given(found, variables):
        if named := _FLAG.fullmatch(given):
            flag = _keys(named[1])
            _put(keys, flag, True if named[2] is None else scalar(named[2]))
            flag = flag if named[2] is None else []
        elif override := _OVERRIDE.fullmatch(given):
            _put(keys, override[1].split("."), _value(override[2]))
            flag = []
        elif choice := _CHOICE.fullmatch(given):
            keys[choice[1]] = choice[2]
            flag = []
        elif (removal := _REMOVAL.fullmatch(given)) and not (flag and "/" in given):  # a flag's may be a home's path
            for given_so_far in (arguments, keys):
                given_so_far.pop(removal[1], None)
            _remove(keys, removal[1].split("."))
            flag = []
        elif variable := VARIABLE.fullmatch(given):
            before = variables.get(variable[1], "") if variable[2] else ""
            value = (before + variable[3])[: _LONGEST + 1]  # a longer one is put in nowhere
            flag = []
            if not _is_given(variable):
                variables[variable[1]] = value
            if of_command:
                arguments[variable[1]] = scalar(variable[3])
        elif flag:
            flag = flag if given and _add(keys, flag, scalar(given)) else []
        flag = [] if closes else flag
    return arguments | keys


def _given(found: Sequence[Word], variables: Mapping[str, str]) -> Iterator[tuple[str, bool, bool]]:
    """Each word with the variables of its place put in, whether a command has it, and whether it ends an array.

    A word that is a variable may stand for several.
    """
    for word, of_command in ((one.text, one.of_command) for one in found):
        closes, word = word.endswith(")") and "(" not in word, word.removesuffix(")") if word != "(" else word
        given = _put_in(word, variables)
        several = _split(given) if given != word and _USED.fullmatch(word) else [given]
        for place, one in enumerate(several or [""], 1):
            yield one, of_command, closes and place >= len(several)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _put_in(word: str, variables: Mapping[str, str]) -> str:
    """A word with its variables put in, from the inside out where one is the default of another."""

    def value(used: re.Match[str]) -> str:
        return variables.get(used[1] or used[2], used[0] if used[3] is None else used[3])

    for _ in range(_MOST_NESTED):
        made = _USED.sub(value, word) if len(word) <= _LONGEST else word
        if made == word or len(made) > _LONGEST:
            break
        word = made
    return word


def _keys(flag: str) -> list[str]:
    """A dotted flag is a place among keys, any other one a key with its dashes."""
    return flag.split(".") if "." in flag else [f"--{flag}"]


def _value(text: str) -> Any:
    """The value of an override: a list or a block in brackets, text in quotes that the shell left, or a scalar."""
    if text[:1] in ("[", "{"):
        from mismatchctl.texts.yaml_text import parse_yaml  # loaded where YAML is read

        try:
            return parse_yaml(text)
        except TextError:
            return text
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else scalar(text)


def _put(found: dict[str, Any], keys: list[str], value: Any) -> None:
    level = found
    for key in keys[:-1]:
        level = level.setdefault(key, {})
        if not isinstance(level, dict):
            raise TextError(f"{'.'.join(keys)} stands below a key that has a value")
    level[keys[-1]] = value


def _remove(found: dict[str, Any], keys: list[str]) -> None:
    level: Any = found
    for key in keys[:-1]:
        level = level.get(key)
        if not isinstance(level, dict):
            return
    level.pop(keys[-1], None)


def _add(found: dict[str, Any], keys: list[str], value: Any) -> bool:
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
