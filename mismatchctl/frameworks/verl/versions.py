"""Versions of verl that behave differently, and their differences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mismatchctl.errors import ConfigError, suggestion

Dialect = Literal["flat", "ratio", "estimator"]


@dataclass(frozen=True)
class VerlVersion:
    """One version of verl's rollout correction."""

    name: str  # name in `verl@name`: the month, or the day if the month has a later version
    letter: str  # an older name, which the expected numbers of the tests use. Empty if unused.
    date: str  # day of the commit, year-month-day
    commit: str  # commit of volcengine/verl. Empty if only its pull requests are known.
    pulls: tuple[int, ...]  # pull requests that identify it
    # configuration: `flat` (keys of the algorithm section), `ratio` (rollout_correction with rejection by the ratio) or
    # `estimator` (rollout_correction with rejection by k1, k2, k3)
    dialect: Dialect
    prefix: str  # prefix of the logged names
    keys: Mapping[str, object]  # keys of its configuration, with the defaults in verl's YAML
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
        """True if bypass mode names its loss. Both losses then apply rejection."""
        return "loss_type" in self.keys

    def is_pure(self, settings: Mapping[str, object]) -> bool:
        value = settings[self.pure_key]
        return value == "reinforce" if self.names_loss else bool(value)


_FLAT_KEYS: dict[str, object] = {
    "rollout_is": True,  # verl's default is false; without the key, the weights that the helper makes are meant
    "rollout_is_threshold": None,
    "rollout_is_threshold_lower": None,
    "rollout_is_level": "token",
    "rollout_is_mode": "truncate",
    "rollout_is_veto_threshold": None,
}
_RATIO_KEYS: dict[str, object] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "rollout_rs_threshold_lower": None,
    "rollout_token_veto_threshold": None,
}
_NORMALIZED_KEYS = _RATIO_KEYS | {
    "rollout_is_batch_normalize": False,
    "bypass_mode": False,
    "use_policy_gradient": False,
}
_ESTIMATOR_KEYS: dict[str, object] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}

VERSIONS: tuple[VerlVersion, ...] = (
    VerlVersion("2025-10-14", "", "2025-10-14", "", (3694, 3750), "flat", "mismatch/",
            _FLAT_KEYS | {"rollout_is_veto_threshold": 1e-4}, zeroes_rejected=True),
    VerlVersion("2025-10", "a", "2025-10-28", "4424616d7", (3915,), "flat", "mismatch/", _FLAT_KEYS),
    VerlVersion("2025-11-07", "b", "2025-11-07", "418f964ab", (3984,), "ratio", "rollout_corr/",
            _RATIO_KEYS | {"bypass_old_logprob_for_rollout": False, "use_pure_rollout_correction": False}),
    VerlVersion("2025-11-12", "c1", "2025-11-12", "2c6c65cb0", (4070,), "ratio", "rollout_corr/", _NORMALIZED_KEYS,
            normalizes=True, normalizes_empty=True),
    VerlVersion("2025-11-25", "c2", "2025-11-25", "2a36450b7", (3980,), "ratio", "rollout_corr/", _NORMALIZED_KEYS,
            normalizes=True, empty_loss_is_nan=True),
    VerlVersion("2026-08", "d", "2026-08-22", "1dda039b9", (), "estimator", "rollout_corr/", _ESTIMATOR_KEYS,
            normalizes=True, icepop=True, measures_applied=True, defaults_to_v1=True,
            records_log_probs=True),
)  # fmt: skip
"""Oldest first."""

_C1, _C2, _D = VERSIONS[-3:]
_OF_2026_01 = {key: value for key, value in _NORMALIZED_KEYS.items() if key != "use_policy_gradient"}
_BEFORE_V1 = replace(_D, defaults_to_v1=False, records_log_probs=False)
RELEASES: dict[str, VerlVersion] = {
    "0.6.1": replace(_C1, name="0.6.1", letter="", pulls=(), date="2025-11-14", commit="d62da4950",
                     note="read as the state of 2025-11-12"),
    "0.7.0": replace(_C2, name="0.7.0", letter="", pulls=(), date="2026-01-05", commit="f9c855f7c",
                     keys={**_OF_2026_01, "loss_type": "ppo_clip"}, note="its losses are those of 2025-11-25"),
    "0.7.1": replace(_BEFORE_V1, name="0.7.1", letter="", date="2026-03-16", commit="bec9ef747", icepop=False,
                     measures_applied=False, note="its losses are those of 2026-08"),
    "0.8.0": replace(_BEFORE_V1, name="0.8.0", letter="", date="2026-06-01", commit="7aed6b230", fractions_applied=True,
                     note="its losses are those of 2026-08"),
    "0.9.0": replace(_D, name="0.9.0", letter="", date="2026-08-14", commit="483b8a009"),
    "0.9.1": replace(_D, name="0.9.1", letter="", date="2026-09-20", commit=""),
}  # fmt: skip
"""Releases on PyPI, compared with the snapshots file by file."""

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
    """Find a release by its number, or the nearest earlier one."""
    if word in RELEASES:
        return RELEASES[word]
    older = [name for name in RELEASES if _numbers(name) <= _numbers(word)]
    if not older:
        raise ConfigError(
            f"verl@{word}: rollout correction came with verl 0.6.1. Use verl@2025-10 for the months before."
        )
    found = RELEASES[older[-1]]
    return replace(found, note=f"verl {word} is not known, read as {older[-1]}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
