"""tinker-cookbook: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "thinking-machines-lab/tinker-cookbook@9dfcc3a2cf44"


TRAPS = (
    Trap(
        lambda o: o["loss_fn"] == "importance_sampling",
        Finding("info", "loss_fn", "importance_sampling bounds no ratio", "use ppo or cispo for a bound", SOURCE),
    ),
)
