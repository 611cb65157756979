"""Versions of slime and Miles and their differences. mis.py corrects the same way since 2025-11-17."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatchctl.errors import ConfigError, suggestion


@dataclass(frozen=True)
class SlimeVersion:
    """One version.

    Attributes:
        framework: slime or Miles.
        name: name of the version.
        month: the month of its release, YYYY-MM.
        commit: commit of the repository.
        rollout_denominators: a metric's sum over a sequence is divided by the valid tokens of its whole rollout
            before rejection, and the total by the number of rollouts. Otherwise by the tokens of the metric's mask, and
            by the number of sequences.
        dual_clip: `eps_clip_c` reaches the loss.
        cispo: the estimator exists.
        bypass_compares_current: under `use_rollout_logprobs`, train_rollout_logprob_abs_diff uses the current policy.
            Otherwise it compares the rollout with itself, and is 0.
        finite: NaN and infinities become 0, the PPO ratio is float32 and within exp(±20), and effective sample size
            and train_rollout_kl are logged (Miles).
        old_keys: mis.yaml has `mis_level`, `mis_mode` and their bounds, one rule for weights and rejection. The veto
            does not need `use_rs`.
        zeroes_rejected: rejected tokens get weight 0 and stay in the denominators.
        one_mask: metrics are reduced over the tokens that rejection keeps.
        names: current name of a metric -> the name in this version, or None if it was not logged.
        title: the version after the @. Empty: the month.
    """

    framework: str
    name: str
    month: str
    commit: str
    rollout_denominators: bool
    dual_clip: bool
    cispo: bool = False
    bypass_compares_current: bool = False
    finite: bool = False
    old_keys: bool = False
    zeroes_rejected: bool = False
    one_mask: bool = False
    names: Mapping[str, str | None] = field(default_factory=dict)
    title: str = ""

    @property
    def label(self) -> str:
        """The version after the @."""
        return self.title or self.month


_UNPREFIXED: dict[str, str | None] = {
    "mis_tis_truncate_fraction": "mis_truncate_fraction",
    **{
        f"mis_tis_{mode}_fraction_{side}": f"mis_{mode}_fraction_{side}"
        for mode in ("clip", "mask")
        for side in ("low", "high")
    },
    **{f"mis_rs_mask_fraction_{side}": f"mis_mask_fraction_{side}" for side in ("low", "high")},
    **{f"mis_rs_catastrophic_{what}_fraction": f"mis_catastrophic_{what}_fraction" for what in ("token", "seq")},
    **{f"mis_is_ratio_{what}_final": None for what in ("mean", "min", "max")},
}
_OF_V0_2 = _UNPREFIXED | {"mis_is_ratio_mean_after_tis_rs": "mis_ratio_mean_after_tis", "tis_abs": None}
_OF_2025_11 = _UNPREFIXED | {
    "mis_tis_weight_before_bound": "mis_mean_is_weight_before_clip",
    "mis_tis_weight_after_bound": None,
    "mis_is_ratio_mean_after_tis_rs": "mis_ratio_mean_after_mis",
    "mis_batch_norm_factor": None,
    "mis_chi2_token": None,
    "mis_chi2_seq": None,
    "tis_abs": None,
}

VERSIONS = (
    SlimeVersion("slime", "first", "2025-10", "46e2cd4f1", False, dual_clip=False, old_keys=True, zeroes_rejected=True,
            names=_OF_2025_11),
    SlimeVersion("slime", "decoupled", "2025-11", "ad2ada383", False, dual_clip=False, old_keys=True, one_mask=True,
            names=_OF_2025_11),
    SlimeVersion("slime", "v0.2.0", "2025-11", "91acef0f8", False, dual_clip=False, one_mask=True, names=_OF_V0_2,
            title="v0.2.0"),
    SlimeVersion("slime", "v0.2.1", "2025-12", "0934a0e25", False, dual_clip=False, one_mask=True, names=_OF_V0_2,
            title="v0.2.1"),
    SlimeVersion("slime", "seed", "2026-01", "9bfe15250e82baebf405fc824d1708f779d44406", False, dual_clip=False),
    SlimeVersion("slime", "head", "2026-08", "624b824a898ab0ec1fcb4d373004c7f3852bf515", True, dual_clip=True,
            cispo=True, bypass_compares_current=True),
    SlimeVersion("miles", "seed", "2026-01", "2cdc1f71", False, dual_clip=False),
    SlimeVersion("miles", "head", "2026-08", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76", True, dual_clip=True,
            finite=True),
)  # fmt: skip
"""Oldest first. Miles of 2026-01 has the same mis.py and policy loss as slime of that month."""


def list_months(framework: str) -> tuple[str, ...]:
    """List the versions of slime or Miles by month, newest first."""
    return tuple(version.label for version in reversed(VERSIONS) if version.framework == framework)


def find_version(framework: str, word: str) -> SlimeVersion:
    """Find a version by name, commit, or month (the newest up to it). Empty: the newest.

    Raises:
        ConfigError: the version is unknown.
    """
    versions = [version for version in VERSIONS if version.framework == framework]
    if not word:
        return versions[-1]
    for version in versions:
        if word in (version.name, version.label) or (len(word) >= 7 and version.commit.startswith(word)):
            return version
    if word[:4].isdecimal() and word[4:5] == "-":
        older = [version for version in versions if version.month <= word[:7]]
        if older:
            return older[-1]
        raise ConfigError(f"{framework}@{word}: the oldest version known here is of {versions[0].month}")
    known = [name for version in versions for name in (version.name, version.label)]
    raise ConfigError(
        f"there is no {framework} version {word!r}{suggestion(word, known)}: use one of {', '.join(known)}"
    )
