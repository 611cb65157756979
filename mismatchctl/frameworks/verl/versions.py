"""Versions of verl that behave differently, and how they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mismatchctl.errors import ConfigError, suggestion

Dialect = Literal["flat", "ratio", "estimator"]


@dataclass(frozen=True)
class VerlVersion:
    """One state of verl's rollout correction.

    Attributes:
        name: how `verl@name` calls it: its month, or its day where another of that month came later.
        letter: an older name, which the goldens use; empty if it has none.
        date: day of the commit, year-month-day.
        commit: of volcengine/verl; empty where only its pull requests are known.
        pulls: pull requests that it is known by.
        dialect: how it is configured: `flat` keys of the algorithm section; `ratio`: rollout_correction with rejection
            by the ratio; `estimator`: rollout_correction with rejection by k1, k2, k3.
        prefix: of the logged names.
        keys: what its configuration may hold, with the defaults that verl's YAML gives.
        zeroes_rejected: whether rejection sets weights to 0 and leaves the mask alone: what is rejected stays in the
            denominators, and without weights (`rollout_is: false`) nothing is rejected.
        normalizes: whether weights can be normalized over the batch.
        normalizes_empty: whether sequences without a valid token count in that mean.
        agg_denominators: how losses are aggregated: `mask` (its own sums, 0/0 is 0), `global` (sizes that the trainer
            hands over), `scaled` (the same, and seq-mean-token-sum-norm is divided by the sequences too).
        icepop: whether a threshold "lo_hi" sets weights outside to 0.
        measures_applied: whether metrics of weights describe them after their bound.
        fractions_applied: whether rollout_is_seq_fraction_* do so too.
        defaults_to_v1: whether the V1 trainer runs unless `trainer.use_v1` is false.
        records_log_probs: default of `rollout.calculate_log_probs`.
        gspo_follows: whether `gspo` is aggregated as loss_agg_mode says.
        note: what differs from the release that it stands for.
    """

    name: str
    letter: str
    date: str
    commit: str
    pulls: tuple[int, ...]
    dialect: Dialect
    prefix: str
    keys: Mapping[str, object]
    zeroes_rejected: bool = False
    normalizes: bool = False
    normalizes_empty: bool = False
    agg_denominators: Literal["mask", "global", "scaled"] = "mask"
    icepop: bool = False
    measures_applied: bool = False
    fractions_applied: bool = False
    defaults_to_v1: bool = False
    records_log_probs: bool = False
    gspo_follows: bool = False
    note: str = ""

    @property
    def effect(self) -> Literal["mask", "zero"]:
        """What rejection does to the denominators: see Gate."""
        return "zero" if self.zeroes_rejected else "mask"

    @property
    def bypass_key(self) -> str:
        """The key that anchors the policy on the rollout."""
        return "bypass_mode" if "bypass_mode" in self.keys else "bypass_old_logprob_for_rollout"

    @property
    def pure_key(self) -> str:
        """The key that chooses REINFORCE over PPO in bypass mode."""
        known = ("use_policy_gradient", "use_pure_rollout_correction", "loss_type")
        return next(key for key in known if key in self.keys)

    @property
    def names_loss(self) -> bool:
        """Whether bypass mode names its loss: both of its losses take what rejection leaves then."""
        return "loss_type" in self.keys

    def is_pure(self, settings: Mapping[str, object]) -> bool:
        """Whether bypass mode trains with REINFORCE."""
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
            normalizes=True, agg_denominators="global"),
    VerlVersion("2026-08", "d", "2026-08-22", "1dda039b9", (), "estimator", "rollout_corr/", _ESTIMATOR_KEYS,
            normalizes=True, agg_denominators="scaled", icepop=True, measures_applied=True, defaults_to_v1=True,
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
    "0.9.1": replace(_D, name="0.9.1", letter="", date="2026-09-20", commit="", gspo_follows=True),
}  # fmt: skip
"""Releases on PyPI, compared with the snapshots file by file."""

KEYS = frozenset(key for version in VERSIONS for key in version.keys)
"""What any of them reads."""


def find_versions_with_key(key: str) -> list[VerlVersion]:
    """The versions that read a key."""
    return [version for version in VERSIONS if key in version.keys]


def find_version(word: str) -> VerlVersion:
    """The version called `word`: a release, a name, a pull request, a commit, a month or day, `head`.

    A month or a day means the newest version up to its end.

    Raises:
        ConfigError: there is none.
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
    raise ConfigError(f"there is no verl version {word!r}{suggestion(word, known)}: use one of {', '.join(known)}")


def _find_release(word: str) -> VerlVersion:
    """A release by its number, or the nearest earlier one.

    Raises:
        ConfigError: it is older than rollout correction.
    """
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
