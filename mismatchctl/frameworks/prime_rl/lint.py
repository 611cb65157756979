"""prime-rl: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "PrimeIntellect-ai/prime-rl@559b44772e47"

TRAPS = (
    Trap(
        lambda o: o["kl_tau"] > 0,
        Finding(
            "info",
            "kl_tau",
            "the penalty on squared log ratios is taken on dropped tokens too",
            "set kl_tau 0 to leave them out",
            SOURCE,
        ),
    ),
)
