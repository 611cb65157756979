"""open-instruct: traps of its options."""

from __future__ import annotations

from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import Trap

SOURCE = "allenai/open-instruct@e6c3044aa620"


TRAPS = (
    Trap(
        lambda o: bool(o["rho_mask_sequence_level"] or o["rho_mask_tv_divergence"]),
        Finding(
            "warning",
            "rho_mask_sequence_level",
            "a sequence is a packed row: several responses share one mean",
            "do not pack, or mask tokens",
            SOURCE,
        ),
    ),
    Trap(
        lambda o: bool(o["rho_mask_tv_divergence"] and o["rho_mask_lower_bound"]),
        Finding(
            "warning",
            "rho_mask_lower_bound",
            "with rho_mask_tv_divergence it drops sequences that differ LESS",
            "set rho_mask_upper_bound instead",
            SOURCE,
        ),
    ),
)
