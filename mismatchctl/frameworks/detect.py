"""Guess the framework of a configuration from its text, keys and path: modules, entry points, packages, key style."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mismatchctl.errors import ConfigError, option
from mismatchctl.frameworks.registry import ADAPTER_MODULES, data_file
from mismatchctl.io.yaml import read_data

_NAMED = 4
"""Weight of a name that only one framework has."""
_CLEAR = 2
"""Minimum lead of the best guess over the second."""

_PACKAGE = re.compile(r"""^\s*name\s*=\s*["']([\w.-]+)["']""", re.MULTILINE)
_MOST_PARENTS = 8

_OTHERS = {
    "Tunix": r"\btunix\b",
    "RLinf": r"\brlinf\b",
    "torchforge": r"\btorchforge\b|\bfrom forge\b|\bapps/grpo\b.*\bforge\b|-m apps\.grpo",
}
"""Trainers without an adapter."""


@cache
def _signs(framework: str) -> dict[str, Any]:
    """Read a framework's detection.yaml: `text` (weight and pattern), `keys`, `packages`, `descendants`."""
    place = data_file(framework, "detection.yaml")
    found: dict[str, Any] = read_data(place) if place.exists() else {}
    return {"text": [], "keys": [], "packages": [], "descendants": {}} | found


@dataclass(frozen=True)
class Guess:
    """A framework and its score."""

    framework: str
    score: int


def guess_frameworks(path: Path, text: str, configurations: Iterable[Mapping[str, Any]]) -> list[Guess]:
    """Return the frameworks with any evidence in a file, the most likely first."""
    bare = re.sub(r"(?m)^\s*#(?!SBATCH).*$", "", text)
    all_keys = [keys.keys() for keys in configurations]
    packages = _packages_of(path)
    scores = {}
    for name in ADAPTER_MODULES:
        signs = _signs(name)
        score = sum(weight for weight, pattern in signs["text"] if re.search(pattern, bare))
        score += sum(_NAMED - 1 for keys in all_keys if any(keys >= set(group) for group in signs["keys"]))
        score += _NAMED * (not packages.isdisjoint(signs["packages"]))
        score += any(re.search(pattern, bare, re.IGNORECASE) for pattern in signs["descendants"].values())
        scores[name] = score
    found = [Guess(name, score) for name, score in scores.items() if score]
    return sorted(found, key=lambda one: -one.score)


def is_clear(guesses: list[Guess]) -> bool:
    """Return True if the first guess is well supported and ahead of the second."""
    if not guesses or guesses[0].score < _NAMED - 1:
        return False
    return len(guesses) == 1 or guesses[0].score - guesses[1].score >= _CLEAR


def _packages_of(path: Path) -> set[str]:
    """Names of the packages whose source trees contain the file."""
    found = set()
    for folder in list(path.resolve().parents)[:_MOST_PARENTS]:
        for name in ("pyproject.toml", "setup.py", "setup.cfg"):
            try:
                text = (folder / name).read_text(encoding="utf-8", errors="ignore")[:20_000]
            except OSError:
                continue
            if named := _PACKAGE.search(text):
                found.add(named[1].lower().replace("_", "-"))
    return found


def descendant_of(framework: str, text: str) -> str:
    """Return the project that reuses the framework's keys, or an empty string."""
    named = _signs(framework)["descendants"]
    return next((name for name, pattern in named.items() if re.search(pattern, text, re.IGNORECASE)), "")


def refuse_others(path: Path, text: str) -> None:
    """Refuse a file of a trainer without an adapter."""
    for name, pattern in _OTHERS.items():
        if re.search(pattern, text, re.IGNORECASE):
            raise ConfigError(
                f"{path}: this is a configuration of {name}, which mismatchctl cannot check. Analyze a dump instead, "
                f"or pass {option('framework')} if the file uses that framework's keys."
            )


def likeliest(guesses: list[Guess], recognized: str | None) -> str:
    """Describe the frameworks that a file may belong to, with the options to type."""
    names = dict.fromkeys(one.framework for one in guesses)
    if recognized is not None:
        names = dict.fromkeys([recognized.partition("@")[0], *names])
    if not names:
        return f"cannot tell the framework. Pass {option('framework')} with one of {', '.join(ADAPTER_MODULES)}"
    likely = " or ".join(f"{option('framework')} {name}" for name in list(names)[:2])
    return f"cannot tell the framework. Pass {likely}"
