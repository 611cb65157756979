"""Versions of verl that behave differently, and their differences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.io.yaml import read_data

Dialect = Literal["flat", "ratio", "estimator"]


@dataclass(frozen=True)
class VerlVersion:
    """One version of verl's rollout correction."""

    name: str  # name in `verl@name`: the month, or the day if the month has a later version
    date: str  # day of the commit, year-month-day
    # configuration: `flat` (keys of the algorithm section), `ratio` (rollout_correction with rejection by the ratio) or
    # `estimator` (rollout_correction with rejection by k1, k2, k3)
    dialect: Dialect
    keys: Mapping[str, object]  # keys of its configuration, with the defaults in verl's YAML
    prefix: str = "rollout_corr/"  # prefix of the logged names
    letter: str = ""  # an older name, which the expected numbers of the tests use. Empty if unused.
    commit: str = ""  # commit of volcengine/verl. Empty if only its pull requests are known.
    pulls: Sequence[int] = ()  # pull requests that identify it
    # True if rejection sets weights to 0 and does not change the mask. Rejected tokens stay in the denominators, and
    # `rollout_is: false` disables rejection.
    zeroes_rejected: bool = False
    normalizes: bool = False  # True if weights can be normalized over the batch
    normalizes_empty: bool = False  # True if empty sequences count in that mean
    empty_loss_is_nan: bool = False  # True if a micro-batch without kept tokens has the loss nan
    icepop: bool = False  # True if a threshold "lo_hi" sets weights outside to 0
    measures_applied: bool = False  # True if metrics of weights describe bounded weights
    fractions_applied: bool = False  # True if rollout_is_seq_fraction_* describe bounded weights
    defaults_to_v1: bool = False  # True if the V1 trainer runs unless `trainer.use_v1` is false
    records_log_probs: bool = False  # default of `rollout.calculate_log_probs`
    note: str = ""  # differences from the release that it represents

    @property
    def effect(self) -> Literal["mask", "zero"]:
        return "zero" if self.zeroes_rejected else "mask"

    @property
    def bypass_key(self) -> str:
        return "bypass_mode" if "bypass_mode" in self.keys else "bypass_old_logprob_for_rollout"

    @property
    def pure_key(self) -> str:
        known = ("use_policy_gradient", "use_pure_rollout_correction", "loss_type")
        return next(key for key in known if key in self.keys)

    @property
    def names_loss(self) -> bool:
        """Return True if bypass mode has an option for the loss. Both losses then apply rejection."""
        return "loss_type" in self.keys

    def is_pure(self, settings: Mapping[str, object]) -> bool:
        value = settings[self.pure_key]
        return value == "reinforce" if self.names_loss else bool(value)


_DATA = read_data(Path(__file__).with_name("versions.yaml"))
VERSIONS = tuple(VerlVersion(name, **fields) for name, fields in _DATA["snapshots"].items())
"""All versions, oldest first."""

_BY_NAME = {version.name: version for version in VERSIONS}
RELEASES = {
    name: replace(_BY_NAME[fields.pop("like")], **{"name": name, "letter": "", "pulls": ()} | fields)
    for name, fields in _DATA["releases"].items()
}
"""Releases on PyPI."""

KEYS = frozenset(key for version in VERSIONS for key in version.keys)
"""Keys that any version reads."""


def find_version(word: str) -> VerlVersion:
    """Find a version by release, name, pull request, commit, month, day, or `head`.

    A month or a day means the newest version up to its end.
    """
    if word.lower() in ("", "head"):
        return VERSIONS[-1]
    if re.fullmatch(r"v?\d+\.\d+(\.\d+)?\w*", word):
        return _find_release(word.removeprefix("v"))
    for version in VERSIONS:
        commit = version.commit[:7] == word[:7] and version.commit.startswith(word[: len(version.commit)])
        if word in (version.name, version.letter) or word in map(str, version.pulls) or (commit and version.commit):
            return version
    if word[:4].isdecimal() and word[4:5] == "-":
        older = [version for version in VERSIONS if version.date[: len(word)] <= word]
        if older:
            return older[-1]
        first = VERSIONS[0]
        raise ConfigError(f"verl@{word}: rollout correction came with verl PR #{first.pulls[0]} on {first.date}")
    known = [name for version in VERSIONS for name in (version.name, *map(str, version.pulls))] + [*RELEASES]
    raise ConfigError(f"unknown verl version {word!r}{suggestion(word, known)}: use one of {', '.join(known)}")


def _find_release(word: str) -> VerlVersion:
    """Find a release by its number, or the nearest earlier release."""
    if word in RELEASES:
        return RELEASES[word]
    older = [name for name in RELEASES if _numbers(name) <= _numbers(word)]
    if not older:
        raise ConfigError(
            f"verl@{word}: rollout correction came with verl 0.6.1. For the months before, use verl@2025-10."
        )
    found = RELEASES[older[-1]]
    return replace(found, note=f"verl {word} is not known, read as {older[-1]}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
