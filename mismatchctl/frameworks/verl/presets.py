"""verl's presets of three releases.

What changed between them, under the same or similar names:
    2025-11 (PR #3984): rejection by the ratio, clamped after aggregation; veto.
    2025-11-25 (PR #3980): presets are called decoupled_* and pg_*. Names that the next release kept stand
        below with the meaning that it gave them.
    2026-08: rejection by the estimators k1, k2, k3, clamped per token before aggregation; no veto. k1 is
        rollout minus train, so that "lo_hi" bounds rollout/train; verl's documentation says train/rollout.
"""

from __future__ import annotations

import math
from typing import Literal

from mismatchctl.correction.model import Correction, Gate, Source, Weight
from mismatchctl.correction.presets import BYPASS, MISMATCH, Preset

VETO_THRESHOLD = 1e-4

_SEQUENCE_REINFORCE = "REINFORCE; sequence weight of the current policy over the rollout policy, truncated at 2."


def _truncate(level: Literal["token", "sequence"], source: Source = MISMATCH) -> Weight:
    """Truncated importance sampling at verl's default threshold."""
    return Weight(level=level, truncate=2.0, source=source)


def _icepop(source: Source = MISMATCH) -> Weight:
    """Weights outside 0.5..5 become 0; the mask stays, so that zeroed tokens count in every denominator."""
    return Weight(level="token", zero=(0.5, 5.0), source=source)


def _ratio(level: Literal["sequence", "geometric"], low: float, high: float, source: Source = MISMATCH) -> Gate:
    """Rejection of 2025: the ratio of the whole sequence inside [low, high]."""
    return Gate(statistic="ratio", level=level, keep=(low, high), source=source)


def _veto(source: Source = MISMATCH) -> Gate:
    """One token whose unclamped ratio is below 1e-4 rejects its sequence."""
    return Gate(statistic="ratio", level="min", keep=(VETO_THRESHOLD, None), clamp="none", source=source)


def _k1(level: Literal["sum", "mean"], low: float, high: float, source: Source = MISMATCH) -> Gate:
    """Rejection of 2026, options seq_sum_k1 and seq_mean_k1 with the threshold "low_high"."""
    keep = (math.log(low), math.log(high))
    return Gate(statistic="k1", level=level, keep=keep, clamp="token", source=source)


def _k3(high: float = 0.01, source: Source = MISMATCH) -> Gate:
    """Rejection of 2026, option seq_mean_k3."""
    return Gate(statistic="k3", level="mean", keep=(None, high), clamp="token", source=source)


def _geometric(source: Source = MISMATCH) -> Gate:
    """seq_mean_k1 with verl's default "0.999_1.001"."""
    return _k1("mean", 0.999, 1.001, source)


_DOCUMENTED = {
    "seq_mis": "verl's document calls it another name of seq_is_rs, whose lower bound is 1/2: there 0.5..2 is kept",
    "geo_mis": "verl's document calls it another name of geo_rs, whose lower bound is 1/1.001: there that is kept",
}
"""What rollout_corr_math.md of 2025-11-03 says otherwise than the code of that day."""


def _made_by(version: str, source: str, *corrections: Correction) -> tuple[Preset, ...]:
    return tuple(
        Preset(
            correction,
            "verl",
            version,
            f"{source}: RolloutCorrectionConfig.{correction.name}()",
            documented=_DOCUMENTED.get(correction.name, ""),
        )
        for correction in corrections
    )


_TOKEN_IS, *_NOVEMBER = _made_by(
    "2025-11",
    "verl PR #3984, commit 418f964ab, 2025-11-07",
    Correction(
        name="token_is",
        about="Token importance weights, truncated at 2.",
        weight=_truncate("token"),
    ),
    Correction(
        name="seq_is",
        about="Importance weight of the whole sequence (product of its token ratios), truncated at 2.",
        weight=_truncate("sequence"),
    ),
    Correction(
        name="seq_is_rs",
        about="Sequence weights truncated at 2; sequences with a ratio outside 0.5..2 are rejected.",
        weight=_truncate("sequence"),
        gates=(_ratio("sequence", 1 / 2.0, 2.0),),
    ),
    Correction(
        name="seq_mis",
        about="Sequence weights truncated at 2; sequences with a ratio above 2 are rejected (lower bound 0).",
        weight=_truncate("sequence"),
        gates=(_ratio("sequence", 0.0, 2.0),),
    ),
    Correction(
        name="geo_rs",
        about="Rejects sequences with a geometric mean ratio outside 1/1.001..1.001 or one token below 1e-4.",
        gates=(_ratio("geometric", 1 / 1.001, 1.001), _veto()),
    ),
    Correction(
        name="geo_mis",
        about="Rejects sequences with a geometric mean ratio outside 0.999..1.001 or one token below 1e-4.",
        gates=(_ratio("geometric", 0.999, 1.001), _veto()),
    ),
    Correction(
        name="ppo_is_bypass",
        # verl copies rollout_log_probs into old_log_probs first, so that the token weights it then computes
        # are exp(0) for every token: no weight is the same.
        about="PPO anchored on the rollout policy; verl's token weights are then all exactly 1.",
        loss="ppo_bypass",
    ),
    Correction(
        name="pure_is",
        about=_SEQUENCE_REINFORCE,
        weight=_truncate("sequence", BYPASS),
        loss="policy_gradient",
    ),
    Correction(name="disabled", about="Metrics only: nothing is weighted, nothing is rejected."),
)

_LATE_NOVEMBER = _made_by(
    "2025-11-25",
    "verl PR #3980, commit 2a36450b7, 2025-11-25",
    Correction(
        name="pg_is",
        about=_SEQUENCE_REINFORCE,
        weight=_truncate("sequence", BYPASS),
        loss="policy_gradient",
    ),
    Correction(
        name="pg_rs",
        about="REINFORCE without weights; geo_rs on the ratio of the current policy to the rollout policy.",
        gates=(_ratio("geometric", 1 / 1.001, 1.001, BYPASS), _veto(BYPASS)),
        loss="policy_gradient",
    ),
)

_GEOMETRIC = "the geometric mean of rollout/train lies outside 0.999..1.001"
_GEOMETRIC_BYPASS = "the geometric mean of rollout/current lies outside 0.999..1.001"

_CURRENT = _made_by(
    "2026-08",
    "verl commit 1dda039b9, 2026-08-22",
    Correction(
        name="decoupled_token_is",
        about="Token importance weights, truncated at 2.",
        weight=_truncate("token"),
    ),
    Correction(
        name="decoupled_seq_is",
        about="Importance weight of the whole sequence, truncated at 2.",
        weight=_truncate("sequence"),
    ),
    Correction(
        name="decoupled_token_icepop",
        about="IcePop: token weights outside 0.5..5 become 0; no token leaves the denominators.",
        weight=_icepop(),
    ),
    Correction(
        name="decoupled_seq_is_rs",
        about="Sequence weights truncated at 2; rejects sequences whose rollout/train lies outside 0.5..2.",
        weight=_truncate("sequence"),
        gates=(_k1("sum", 0.5, 2.0),),
    ),
    Correction(
        name="decoupled_geo_rs",
        about=f"Rejects sequences when {_GEOMETRIC}.",
        gates=(_geometric(),),
    ),
    Correction(
        name="decoupled_geo_rs_seq_tis",
        about=f"Sequence weights truncated at 2; rejects sequences when {_GEOMETRIC}.",
        weight=_truncate("sequence"),
        gates=(_geometric(),),
    ),
    Correction(
        name="decoupled_geo_rs_token_tis",
        about=f"Token weights truncated at 2; rejects sequences when {_GEOMETRIC}.",
        weight=_truncate("token"),
        gates=(_geometric(),),
    ),
    Correction(
        name="decoupled_k3_rs",
        about="Rejects sequences with a mean K3 above 0.01.",
        gates=(_k3(),),
    ),
    Correction(
        name="decoupled_k3_rs_seq_tis",
        about="Sequence weights truncated at 2; rejects sequences with a mean K3 above 0.01.",
        weight=_truncate("sequence"),
        gates=(_k3(),),
    ),
    Correction(
        name="decoupled_k3_rs_token_tis",
        about="Token weights truncated at 2; rejects sequences with a mean K3 above 0.01.",
        weight=_truncate("token"),
        gates=(_k3(),),
    ),
    Correction(
        name="bypass_ppo_clip",
        about="PPO anchored on the rollout policy: one ratio is clipped, and nothing else is corrected.",
        loss="ppo_bypass",
    ),
    Correction(
        name="bypass_ppo_clip_geo_rs",
        about=f"PPO anchored on the rollout policy; rejects sequences when {_GEOMETRIC_BYPASS}.",
        gates=(_geometric(BYPASS),),
        loss="ppo_bypass",
    ),
    Correction(
        name="bypass_ppo_clip_k3_rs",
        about="PPO anchored on the rollout policy; rejects sequences whose mean K3 to it is above 0.01.",
        gates=(_k3(source=BYPASS),),
        loss="ppo_bypass",
    ),
    Correction(
        name="bypass_pg_is",
        about=_SEQUENCE_REINFORCE,
        weight=_truncate("sequence", BYPASS),
        loss="policy_gradient",
    ),
    Correction(
        name="bypass_pg_token_icepop",
        about="REINFORCE with token weights (current over rollout); those outside 0.5..5 become 0 (IcePop).",
        weight=_icepop(BYPASS),
        loss="policy_gradient",
    ),
    Correction(
        name="bypass_pg_geo_rs",
        about=f"REINFORCE without weights; rejects sequences when {_GEOMETRIC_BYPASS}.",
        gates=(_geometric(BYPASS),),
        loss="policy_gradient",
    ),
    Correction(
        name="bypass_pg_geo_rs_seq_tis",
        about=f"REINFORCE with sequence weights truncated at 2; rejects sequences when {_GEOMETRIC_BYPASS}.",
        weight=_truncate("sequence", BYPASS),
        gates=(_geometric(BYPASS),),
        loss="policy_gradient",
    ),
    Correction(
        name="bypass_pg_geo_rs_token_tis",
        about=f"REINFORCE with token weights truncated at 2; rejects sequences when {_GEOMETRIC_BYPASS}.",
        weight=_truncate("token", BYPASS),
        gates=(_geometric(BYPASS),),
        loss="policy_gradient",
    ),
)

PRESETS: tuple[Preset, ...] = (
    _TOKEN_IS,
    _TOKEN_IS.alias("token_tis"),
    *_NOVEMBER,
    *_LATE_NOVEMBER,
    *_CURRENT,
)
