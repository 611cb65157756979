"""TRL: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "huggingface/trl@f2cd57710ae3"


TRAPS = (
    Trap(
        lambda o: bool(o["correct"]) and str(o["mode"]).startswith("sequence"),
        Finding(
            "info",
            "vllm_importance_sampling_mode",
            "a sequence's ratio is the product over its tokens, not a mean: it leaves any interval as responses grow",
            "use token_truncate or token_mask for long responses",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: o["loss_type"] == "cispo" and o["eps"][1] < 1,
        Finding(
            "warning",
            "epsilon_high",
            "CISPO bounds the ratio by epsilon_high itself, not by 1 + epsilon_high: with "
            "0.2 every larger ratio becomes 0.2",
            "give the bound itself, such as 5.0",
            SOURCE,
        ),
    ),
)
