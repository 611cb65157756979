"""ROLL: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "alibaba/ROLL@8eb27cc2dc34"


TRAPS = (
    Trap(
        lambda o: o["loss_agg_mode"] == "token-mean" and any(one.get("enabled") for one in o["filters"]),
        Finding(
            "error",
            "loss_agg_mode",
            "with token-mean the loss ignores the mask: filters reject nothing",
            "use seq-mean-token-mean",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: (
            len({one.get("agg_type", "token") for one in o["filters"] if one.get("enabled")})
            < sum(bool(one.get("enabled")) for one in o["filters"])
        ),
        Finding(
            "warning",
            "train_infer_correction.filters",
            "two filters of one agg_type log under one name: the last is seen",
            "use different agg_types",
            SOURCE,
        ),
    ),
)
