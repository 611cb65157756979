"""Versions of verl that behave differently, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        return next(key for key in ("use_policy_gradient", "use_pure_rollout_correction") if key in self.keys)


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
            normalizes=True, agg_denominators="scaled"),
)  # fmt: skip
"""Oldest first."""

KEYS = frozenset(key for version in VERSIONS for key in version.keys)
"""What any of them reads."""


def find_versions_with_key(key: str) -> list[VerlVersion]:
    """The versions that read a key."""
    return [version for version in VERSIONS if key in version.keys]


def find_version(word: str) -> VerlVersion:
    """The version called `word`: a name, a pull request, a commit, a month or day (the newest up to its end), `head`.

    Raises:
        ConfigError: there is none.
    """
    if word.lower() in ("", "head"):
        return VERSIONS[-1]
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
    known = [name for version in VERSIONS for name in (version.name, *map(str, version.pulls))]
    raise ConfigError(f"there is no verl version {word!r}{suggestion(word, known)}: use one of {', '.join(known)}")
