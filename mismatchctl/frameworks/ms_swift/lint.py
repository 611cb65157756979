"""ms-swift: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "modelscope/ms-swift@3602360a5"


TRAPS = (
    Trap(
        lambda o: str(o["rollout_importance_sampling_mode"]).startswith("sequence"),
        Finding(
            "info",
            "rollout_importance_sampling_mode",
            "the sequence's ratio is a geometric mean here, a product in "
            "TRL under the same word: a threshold of 2 never acts",
            "give a threshold near 1, such as 1.01",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: o["loss_type"] == "cispo" and (o["epsilon_high"] is None or o["epsilon_high"] < 1),
        Finding(
            "warning",
            "epsilon_high",
            "CISPO bounds the ratio by epsilon_high itself: with 0.2 every larger ratio becomes 0.2",
            "give the bound itself, such as 5.0",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: str(o["rollout_importance_sampling_mode"]).endswith("mask"),
        Finding(
            "info",
            "rollout_importance_sampling_mode",
            "ess counts masked tokens with the weight 1/C: masking hardly lowers it",
            "look at clipped_frac too",
            SOURCE,
        ),
    ),
)
