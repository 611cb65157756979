"""NeMo-RL: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "NVIDIA-NeMo/RL@7ea279abfbeb"


TRAPS = (
    Trap(
        lambda o: (
            o["loss"]["truncated_importance_sampling_type"] is not None
            and not o["loss"]["use_importance_sampling_correction"]
        ),
        Finding(
            "error",
            "loss_fn.truncated_importance_sampling_type",
            "without use_importance_sampling_correction no weight is computed: the type does nothing",
            "set use_importance_sampling_correction true",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: bool(o["loss"]["use_importance_sampling_correction"]),
        Finding(
            "info",
            "loss_fn.truncated_importance_sampling_type",
            "a log ratio above 88.7 overflows float32: its "
            "weight becomes 0, not the bound, and is not counted as out of bounds",
            "watch for such tokens",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: bool(o["loss"]["force_on_policy_ratio"]),
        Finding(
            "warning",
            "loss_fn.force_on_policy_ratio",
            "prev_logprobs is all zero in the dump: the forward pass is skipped",
            "do not measure a mismatch from such a dump",
            SOURCE,
        ),
    ),
)
