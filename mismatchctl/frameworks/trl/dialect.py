"""TRL: options as a Correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options
from mismatchctl.texts.python_text import Call

CLASS = "GRPOConfig"
"""What is called in Python, with its options beside those of the training."""

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class TrlDialect(PlainFramework):
    """Product of ratios at sequence level, masks that leave the denominators alone."""

    name = "trl"
    signs = r"vllm_importance_sampling_\w+|off_policy_mask_threshold"

    columns = {
        "sampling_per_token_logps": "rollout_log_probs",
        "old_per_token_logps": "train_log_probs",
        "ref_per_token_logps": "ref_log_probs",
        # Tool tokens are valid in it: a dump with tools needs completion_mask * tool_mask.
        "completion_mask": "response_mask",
        "completion_ids": "token_ids",
    }

    options = {
        "mode": "sequence_mask",
        "cmin": None,
        "cmax": 3.0,
        "correct": True,
        "opsm": None,
        "level": "token",
        "loss_type": "dapo",
        "eps": (0.2, 0.2),
        "epsilon": None,
        "epsilon_high": None,
        "delta": None,
        "use_vllm": True,
        "sapo": (1.0, 1.05),
        "vespo": {"positive": (2.0, 3.0), "negative": (3.0, 2.0)},
    }

    aliases = {
        "vllm_importance_sampling_mode": "mode",
        "vllm_importance_sampling_clip_min": "cmin",
        "vllm_importance_sampling_clip_max": "cmax",
        "vllm_importance_sampling_cap": "cmax",
        "vllm_importance_sampling_correction": "correct",
        "off_policy_mask_threshold": "opsm",
        "importance_sampling_level": "level",
    }

    forms = tuple(
        (lambda low, high, mode=mode: {"correct": True, "mode": mode, "cmin": low, "cmax": high}) for mode in _MODES
    ) + ((lambda low, high: {"correct": False}),)

    source = "huggingface/trl@f2cd57710ae3"
    traps = (
        Trap(
            lambda o: bool(o["correct"]) and str(o["mode"]).startswith("sequence"),
            "info",
            "vllm_importance_sampling_mode",
            "a sequence's ratio is the product over its tokens, not a mean: it leaves any interval as responses grow",
            "use token_truncate or token_mask for long responses",
        ),
        Trap(
            lambda o: o["loss_type"] == "cispo" and o["eps"][1] < 1,
            "warning",
            "epsilon_high",
            "CISPO bounds the ratio by epsilon_high itself, not by 1 + epsilon_high: with "
            "0.2 every larger ratio becomes 0.2",
            "give the bound itself, such as 5.0",
        ),
        Trap(
            lambda o: bool(o["correct"]) and not o["use_vllm"],
            "warning",
            "use_vllm",
            "without vLLM nothing is corrected, whatever vllm_importance_sampling_mode says",
            "set use_vllm true",
        ),
    )

    def read(self, native: Mapping[str, Any]) -> Options:
        """As every shelf; epsilon stands for both of its bounds unless epsilon_high is given."""
        options = super().read(native)
        low = options["epsilon"]
        if low is not None or options["epsilon_high"] is not None:
            usual = options["eps"]
            high = options["epsilon_high"]
            low = usual[0] if low is None else low
            options |= {"eps": (low, low if high is None else high), "epsilon": None, "epsilon_high": None}
        return options

    def rules(self, options: Options) -> Rules:
        """One weight, and a mask of tokens or sequences that keeps denominators; OPSM after it."""
        gates: list[Gate] = []
        weight = None
        if options["correct"] and options["use_vllm"]:
            mode, keep = options["mode"], (options["cmin"], options["cmax"])
            if mode not in _MODES:
                raise ConfigError(f"trl knows the modes {', '.join(_MODES)}, not {mode!r}")
            if mode.endswith("truncate") and keep == (None, None):
                raise ConfigError(f"{mode} needs vllm_importance_sampling_clip_max or _clip_min")
            level: Any = mode.partition("_")[0]
            weight = Weight(level=level, clamp="none", clip=keep if mode.endswith("truncate") else None)
            if mode.endswith("mask"):
                gates.append(Gate(level=level, keep=keep, clamp="none", effect="zero", nonfinite="keep"))
        if options["opsm"] is not None:
            gates.append(
                Gate(
                    statistic="k1",
                    level="mean",
                    source="current/rollout",
                    keep=(None, options["opsm"]),
                    when="negative_advantage",
                    effect="zero",
                )
            )
        return weight, tuple(gates)


def keys_of(call: Call) -> dict[str, Any]:
    """The options that a call of its class says.

    Raises:
        ConfigError: one of them is computed.
    """
    for name in call.computed:
        if name in TrlDialect.aliases:
            raise ConfigError(f"line {call.line}: {name} is no plain value")
    return call.given
