"""OpenRLHF: options as a Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules
from mismatchctl.frameworks.run import Options

_TYPES = ("tis", "icepop", "seq-mask-tis")


class OpenRlhfDialect(PlainFramework):
    """Weights within two bounds; masks leave the denominators alone."""

    name = "openrlhf"
    signs = r"(vllm_)?is_correction_\w+|enable_vllm_is_correction|vllm_is_truncated_threshold"

    options = {
        "correct": True,
        "type": "tis",
        "threshold": (0.5, 5.0),
        "policy_loss_type": "ppo",
        "token_level_loss": True,
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "dual_clip": None,
    }

    aliases = {
        "is_correction_enable": "correct",
        "is_correction_type": "type",
        "vllm_is_correction_type": "type",
        "is_correction_threshold": "threshold",
        "vllm_is_truncated_threshold": "threshold",
        "enable_vllm_is_correction": "correct",
    }

    places = ("algo", "advantage")

    forms = tuple(
        (lambda low, high, kind=kind: {"correct": True, "type": kind, "threshold": (low, high)}) for kind in _TYPES
    ) + (lambda low, high: {"correct": False},)

    def rules(self, options: Options) -> Rules:
        """A weight for every token, bounded; or raw, with a mask."""
        if not options["correct"] or options["policy_loss_type"] == "gspo":
            return None, ()
        kind, (low, high) = options["type"], options["threshold"]
        if kind not in _TYPES:
            raise ConfigError(f"openrlhf knows the types {', '.join(_TYPES)}, not {kind!r}")
        if kind == "tis":
            return Weight(clip=(low, high), clamp="none"), ()
        level: Any = "token" if kind == "icepop" else "geometric"
        return Weight(clamp="none"), (Gate(level=level, keep=(low, high), clamp="none", effect="zero"),)
