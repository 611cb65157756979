"""Versions of slime and Miles, and how they differ. mis.py is the same in all of them."""

from __future__ import annotations

from dataclasses import dataclass

from mismatchctl.errors import ConfigError, suggestion


@dataclass(frozen=True)
class SlimeVersion:
    """One version.

    Attributes:
        framework: slime or Miles.
        name: how a version is asked for.
        month: when it was the newest, YYYY-MM.
        commit: of the repository.
        rollout_denominators: a metric's sum over a sequence is divided by the valid tokens of its whole rollout
            before rejection, and the total by the number of rollouts; else by the tokens of the mask it is
            reduced with, and by the number of sequences.
        dual_clip: `eps_clip_c` reaches the loss.
        cispo: the estimator exists.
        bypass_compares_current: under `use_rollout_logprobs`, train_rollout_logprob_abs_diff looks at the current
            policy; else at the rollout itself, and is 0.
        finite: NaN and infinities become 0, the PPO ratio is float32 and within exp(+-20); effective sample size
            and train_rollout_kl are logged (Miles).
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


VERSIONS = (
    SlimeVersion("slime", "seed", "2026-01", "9bfe15250e82baebf405fc824d1708f779d44406", False, dual_clip=False),
    SlimeVersion("slime", "head", "2026-08", "624b824a898ab0ec1fcb4d373004c7f3852bf515", True, dual_clip=True,
            cispo=True, bypass_compares_current=True),
    SlimeVersion("miles", "seed", "2026-01", "2cdc1f71", False, dual_clip=False),
    SlimeVersion("miles", "head", "2026-08", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76", True, dual_clip=True,
            finite=True),
)  # fmt: skip
"""Oldest first. Miles of 2026-01 is slime of that month line for line in mis.py and in the policy loss."""


def list_months(framework: str) -> tuple[str, ...]:
    """The versions of slime or Miles by their months, the newest first."""
    return tuple(version.month for version in reversed(VERSIONS) if version.framework == framework)


def find_version(framework: str, word: str) -> SlimeVersion:
    """The version called `word`: a name, a commit, or a month (the newest up to it); the newest when empty.

    Raises:
        ConfigError: there is none.
    """
    versions = [version for version in VERSIONS if version.framework == framework]
    if not word:
        return versions[-1]
    for version in versions:
        if word == version.name or (len(word) >= 7 and version.commit.startswith(word)):
            return version
    if word[:4].isdecimal() and word[4:5] == "-":
        older = [version for version in versions if version.month <= word[:7]]
        if older:
            return older[-1]
        raise ConfigError(f"{framework}@{word}: the oldest version known here is of {versions[0].month}")
    known = [name for version in versions for name in (version.name, version.month)]
    raise ConfigError(
        f"there is no {framework} version {word!r}{suggestion(word, known)}: use one of {', '.join(known)}"
    )
