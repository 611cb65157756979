"""OpenRLHF: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "OpenRLHF/OpenRLHF@3c3be6234e0c"


TRAPS = (
    Trap(
        lambda o: o["type"] == "seq-mask-tis",
        Finding(
            "info",
            "is_correction_type",
            "seq-mask-tis leaves the weights of kept sequences unbounded: the "
            "documents call it a clamp, the code does not clamp",
            "use tis for a bound",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: o["policy_loss_type"] == "gspo" and bool(o["correct"]),
        Finding(
            "warning",
            "policy_loss_type",
            "gspo takes the rollout's log-probs for the old ones and filters nothing",
            "do not count on the correction with gspo",
            SOURCE,
        ),
    ),
)
