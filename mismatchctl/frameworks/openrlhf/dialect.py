"""OpenRLHF: options as a Correction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.lint import Finding
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options

_TYPES = ("tis", "icepop", "seq-mask-tis")


class OpenRlhfDialect(PlainFramework):
    """Weights within two bounds; masks leave the denominators alone."""

    name = "openrlhf"
    signs = r"(vllm_)?is_correction_\w+|enable_vllm_is_correction|vllm_is_truncated_threshold"

    columns = {
        "action_log_probs": "train_log_probs",
        # Inside its loss the name above is the current policy, beside this one: both in a file is an error.
        "old_action_log_probs": "train_log_probs",
        "base_action_log_probs": "ref_log_probs",
        "action_mask": "response_mask",
    }

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

    source = "OpenRLHF/OpenRLHF@3c3be6234e0c"
    traps = (
        Trap(
            lambda o: o["type"] == "seq-mask-tis",
            "info",
            "is_correction_type",
            "seq-mask-tis leaves the weights of kept sequences unbounded: the "
            "documents call it a clamp, the code does not clamp",
            "use tis for a bound",
        ),
        Trap(
            lambda o: o["policy_loss_type"] == "gspo" and bool(o["correct"]),
            "warning",
            "policy_loss_type",
            "gspo takes the rollout's log-probs for the old ones and filters nothing",
            "do not count on the correction with gspo",
        ),
    )

    _off = Finding(
        "warning",
        "is_correction_enable",
        "without is_correction_enable OpenRLHF corrects nothing, whatever the type and the threshold",
        "give --algo.advantage.is_correction_enable, as it is taken to be given here",
        source,
    )

    def lint(self, native: Mapping[str, Any]) -> list[Finding]:
        """As every shelf, and that the switch is missing: a block alone is read as if it was on."""
        found = super().lint(native)
        switched = any(name == "correct" for _, name, _ in self.spelling.find(native))
        return found if switched or any(one.level == "error" for one in found) else [self._off, *found]

    def rules(self, options: Options) -> Rules:
        """A weight for every token, bounded; or raw, with a mask."""
        if not options["correct"] or options["policy_loss_type"] == "gspo":
            return None, ()
        kind, bounds = options["type"], options["threshold"]
        if not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
            raise ConfigError(f"is_correction_threshold takes two numbers, low and high, not {bounds!r}")
        low, high = bounds
        if kind not in _TYPES:
            raise ConfigError(f"openrlhf knows the types {', '.join(_TYPES)}, not {kind!r}")
        if kind == "tis":
            return Weight(clip=(low, high), clamp="none"), ()
        level: Any = "token" if kind == "icepop" else "geometric"
        return Weight(clamp="none"), (Gate(level=level, keep=(low, high), clamp="none", effect="zero"),)
