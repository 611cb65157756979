"""ms-swift: options as a Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options

_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class MsSwiftDialect(PlainFramework):
    """Upper bounds only; the geometric mean at sequence level, where a mask leaves the weights of tokens raw."""

    name = "ms-swift"
    signs = r"rollout_importance_sampling_\w+|log_rollout_offpolicy_metrics|off_policy_sequence_mask_delta"

    options = {
        "rollout_importance_sampling_mode": None,
        "rollout_importance_sampling_threshold": 2.0,
        "log_rollout_offpolicy_metrics": False,
        "off_policy_sequence_mask_delta": None,
        "loss_type": "grpo",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "importance_sampling_level": "token",
        "single_update": False,
        "rollout_log_probs": True,
        "max_completion_length": 64,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }

    forms = tuple(
        (
            lambda low, high, mode=mode: {
                "rollout_importance_sampling_mode": mode,
                "rollout_importance_sampling_threshold": high,
            }
        )
        for mode in _MODES
    ) + ((lambda low, high: {"off_policy_sequence_mask_delta": high}), lambda low, high: {})

    source = "modelscope/ms-swift@3602360a5"
    traps = (
        Trap(
            lambda o: str(o["rollout_importance_sampling_mode"]).startswith("sequence"),
            "info",
            "rollout_importance_sampling_mode",
            "the sequence's ratio is a geometric mean here, a product in "
            "TRL under the same word: a threshold of 2 never acts",
            "give a threshold near 1, such as 1.01",
        ),
        Trap(
            lambda o: o["loss_type"] == "cispo" and (o["epsilon_high"] is None or o["epsilon_high"] < 1),
            "warning",
            "epsilon_high",
            "CISPO bounds the ratio by epsilon_high itself: with 0.2 every larger ratio becomes 0.2",
            "give the bound itself, such as 5.0",
        ),
        Trap(
            lambda o: str(o["rollout_importance_sampling_mode"]).endswith("mask"),
            "info",
            "rollout_importance_sampling_mode",
            "ess counts masked tokens with the weight 1/C: masking hardly lowers it",
            "look at clipped_frac too",
        ),
    )

    def rules(self, options: Options) -> Rules:
        """One bound from above, then OPSM."""
        mode, high = options["rollout_importance_sampling_mode"], options["rollout_importance_sampling_threshold"]
        weight, gates = None, []
        if mode is not None:
            if mode not in _MODES:
                raise ConfigError(f"ms-swift knows the modes {', '.join(_MODES)}, not {mode!r}")
            truncates, sequences = mode.endswith("truncate"), mode.startswith("sequence")
            level: Any = "geometric" if sequences and truncates else "token"
            weight = Weight(level=level, truncate=high if truncates else None, clamp="token")
            if not truncates:
                by: Any = "geometric" if sequences else "token"
                gates.append(Gate(level=by, keep=(None, high), clamp="token", effect="zero"))
        if options["off_policy_sequence_mask_delta"] is not None:
            gates.append(
                Gate(
                    statistic="k1",
                    level="mean",
                    source="current/rollout",
                    keep=(None, options["off_policy_sequence_mask_delta"]),
                    when="negative_advantage",
                    nonfinite="keep",
                )
            )
        return weight, tuple(gates)
