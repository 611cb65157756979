"""What callers in Python may give for an option, and errors that speak of options as they do, not of flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, MappingView, Set
from typing import Any, get_args

import numpy as np

from mismatchctl.errors import ConfigError, kind_of
from mismatchctl.frameworks import Framework, load
from mismatchctl.measure import Device


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


_COUNT = (_is_count, "a whole number from 1, or None")
_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("threads", "batch", "micro_batch_size"), _COUNT),
    **dict.fromkeys(("level", "max_skipped"), (_is_number, "a number")),
    "on_bad": (lambda value: value in ("error", "skip"), "'error' or 'skip'"),
    "device": (lambda value: value in get_args(Device), f"one of {', '.join(get_args(Device))}"),
    "engine": (lambda value: value is None or hasattr(value, "map"), "one of mismatchctl.engines, or None"),
    "progress": (lambda value: value is None or callable(value), "a function, or None"),
}
"""Options with what they take, which a flag checks where it is read."""


def checked(options: Mapping[str, Any], framework: Callable[[str], Any] = load) -> dict[str, Any]:
    """Options of a verb as it takes them.

    Args:
        options: as they were given.
        framework: makes what the verb takes of a framework's name.

    Raises:
        ConfigError: one is not of the kind that it takes.
    """
    made = dict(options)
    for key in made.keys() & _WANTED.keys():
        fits, wanted = _WANTED[key]
        if not fits(made[key]):
            raise ConfigError(f"{key}: give {wanted}, not {made[key]!r}")
    made |= {key: texts(made[key], f"{key}: give names") for key in ("by", "losses") if key in made}
    rename = made.get("rename")
    if rename is not None and not isinstance(rename, Mapping):
        raise ConfigError(f"rename: give a mapping of contract columns to names, not {kind_of(rename)}")
    texts((*(rename or {}), *(rename or {}).values()), "rename: give names")
    named = made.get("framework")
    if isinstance(named, str) and named:
        made["framework"] = framework(named)
    elif named is not None and not isinstance(named, (str, Framework)):
        raise ConfigError(f"framework: give the name of one, not {kind_of(named)}")
    return made


def texts(given: Any, wanted: str) -> list[str]:
    """One text or several; None: none.

    Raises:
        ConfigError: something else is among them.
    """
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    holds = isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping))
    found = several(given) if holds else [given]
    if wrong := [text for text in found if not isinstance(text, str)]:
        raise ConfigError(f"{wanted}, not {kind_of(wrong[0])}")
    return found


def several(given: Any) -> list[Any]:
    """A list; of a set in one order, since what is made of it must not depend on hashes."""
    return sorted(given, key=str) if isinstance(given, Set) and not isinstance(given, MappingView) else list(given)


_FLAGS = (
    (r"--column ([^\s=:,;]+)=([^\s:,;]+)", r"rename={'\1': '\2'}"),
    (r"--(by) ([^\s:,;]+)", r"\1='\2'"),
    (r"--(engine|device) (ray|cuda)", r"\1='\2'"),
    (r"with --on-bad skip", "with on_bad='skip' of mm.analyze"),
    (r"--micro-batch-size N", "micro_batch_size=N"),
    (r"--batch N", "batch=N"),
    (r"save one with --save-baseline FILE --accept", "give a Result, or the file of one, as baseline"),
    (r"--max-skipped\b", "max_skipped"),
    (r"--framework ([^\s:,;)]+)", r"framework='\1'"),
    (r"--fixed ", "fixed: "),
    (r"--rule ", "rules: "),
    (r"--correction\b", "corrections"),
    (r"--column\b", "rename"),
    (r"--device\b", "device"),
)


def in_python(words: str) -> str:
    """A sentence with options in place of the flags that stand for them."""
    for flag, option in _FLAGS:
        words = re.sub(flag, option, words)
    return words


def spoken(made: Any, *names: str) -> Any:
    """What a verb made, with options in place of flags in its fields of these names: texts, or lists of them."""
    said = {name: getattr(made, name) for name in names}
    told = {name: in_python(one) if isinstance(one, str) else list(map(in_python, one)) for name, one in said.items()}
    return made.model_copy(update=told)
