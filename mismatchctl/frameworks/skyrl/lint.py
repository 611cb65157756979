"""SkyRL: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "NovaSky-AI/SkyRL@a9564572eb8e"


TRAPS = (
    Trap(
        lambda o: (
            o["off_policy_correction"]["outlier_token_is_threshold_high"] is not None
            and o["off_policy_correction"]["outlier_token_is_threshold_low"] is None
        ),
        Finding(
            "info",
            "off_policy_correction.outlier_token_is_threshold_low",
            "only ratios above the bound veto",
            "give 1e-4 as the lower one",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: (
            sum(o["off_policy_correction"][f"token_mask_is_threshold_{side}"] is None for side in ("low", "high")) == 1
        ),
        Finding(
            "error",
            "off_policy_correction.token_mask_is_threshold_low",
            "the mask of tokens needs both bounds: with one it does nothing",
            "give both",
            SOURCE,
        ),
    ),
)
