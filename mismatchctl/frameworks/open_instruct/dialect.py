"""open-instruct: options as a Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options


class OpenInstructDialect(PlainFramework):
    """Log ratios clamped to +-10; drops, then clamps; a sequence is a packed row."""

    name = "open-instruct"
    signs = r"use_rho_correction|rho_(clamp|mask)_\w+"

    columns = {"advantage": "advantages", "prompt_idx": "prompt_id"}

    options = {
        "use_rho_correction": True,
        "use_vllm_logprobs": False,
        "rho_clamp_lower_bound": 0.0,
        "rho_clamp_upper_bound": 2.0,
        "rho_mask_lower_bound": 0.0,
        "rho_mask_upper_bound": 0.0,
        "rho_mask_sequence_level": False,
        "rho_mask_tv_divergence": False,
        "loss_fn": "dapo",
        "clip_lower": 0.2,
        "clip_higher": 0.272,
    }

    forms = (
        lambda low, high: {"rho_clamp_lower_bound": low or 0.0, "rho_clamp_upper_bound": high or 0.0},
        lambda low, high: {
            "rho_mask_lower_bound": low or 0.0,
            "rho_mask_upper_bound": high or 0.0,
            "rho_clamp_upper_bound": 0.0,
        },
        lambda low, high: {"rho_mask_lower_bound": low or 0.0, "rho_mask_upper_bound": high or 0.0},
        lambda low, high: {
            "rho_mask_lower_bound": low or 0.0,
            "rho_mask_upper_bound": high or 0.0,
            "rho_mask_tv_divergence": True,
        },
        lambda low, high: {
            "rho_mask_lower_bound": low or 0.0,
            "rho_mask_upper_bound": high or 0.0,
            "rho_mask_sequence_level": True,
        },
        lambda low, high: {"use_rho_correction": False},
    )

    source = "allenai/open-instruct@e6c3044aa620"
    traps = (
        Trap(
            lambda o: bool(o["rho_mask_sequence_level"] or o["rho_mask_tv_divergence"]),
            "warning",
            "rho_mask_sequence_level",
            "a sequence is a packed row: several responses share one mean",
            "do not pack, or mask tokens",
        ),
        Trap(
            lambda o: bool(o["rho_mask_tv_divergence"] and o["rho_mask_lower_bound"]),
            "warning",
            "rho_mask_lower_bound",
            "with rho_mask_tv_divergence it drops sequences that differ LESS",
            "set rho_mask_upper_bound instead",
        ),
    )

    def rules(self, options: Options) -> Rules:
        """A mask by the ratio of tokens, of rows, or by their total variation; then a clamped weight."""
        if not options["use_rho_correction"]:
            return None, ()
        if options["use_vllm_logprobs"]:
            raise ConfigError("open-instruct refuses use_vllm_logprobs beside use_rho_correction, its default")
        means = options["rho_mask_sequence_level"] and not options["rho_mask_tv_divergence"]
        level: Any = "geometric" if means else "token"
        common: dict[str, Any] = {"clamp": "token", "limit": 10.0}
        clip = (options["rho_clamp_lower_bound"] or None, options["rho_clamp_upper_bound"] or None)
        weight = Weight(level=level, clip=None if clip == (None, None) else clip, **common)
        keep = (options["rho_mask_lower_bound"] or None, options["rho_mask_upper_bound"] or None)
        if keep == (None, None):
            return weight, ()
        if options["rho_mask_tv_divergence"]:
            gate = Gate(statistic="ratio_gap", level="mean", keep=keep, when="drifting", effect="zero", **common)
        else:
            gate = Gate(level=level, keep=keep, effect="zero", **common)
        return weight, (gate,)
