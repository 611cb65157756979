"""NeMo-RL: options as a Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.plain import PlainFramework, Rules, Trap
from mismatchctl.frameworks.run import Options

_LOSS: Options = {
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "disable_ppo_ratio": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_type": "k3",
    "reference_policy_kl_penalty": 0.01,
}


def _form(kind: str | None, sequences: bool) -> Any:
    def said(low: Any, high: Any) -> Options:
        loss = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind}
        if kind is not None:
            loss |= {"truncated_importance_sampling_ratio": high, "truncated_importance_sampling_ratio_min": low}
        if sequences:
            loss |= {"sequence_level_importance_ratios": True, "token_level_loss": False}
        return {"loss": loss}

    return said


class NemoRlDialect(PlainFramework):
    """Weights that are not finite become 0; the filter by sequences' error shrinks denominators."""

    name = "nemo-rl"
    signs = (
        r"truncated_importance_sampling_\w+|use_importance_sampling_correction"
        r"|seq_logprob_error_threshold|sequence_level_importance_ratios|force_on_policy_ratio"
    )

    columns = {
        "generation_logprobs": "rollout_log_probs",
        # All zero in runs that skip the recomputation (force_on_policy_ratio).
        "prev_logprobs": "train_log_probs",
        "token_loss_mask": "response_mask",
    }

    options = {"loss": _LOSS, "seq_logprob_error_threshold": None}

    aliases = {"loss_fn": "loss"}
    shared = ("loss",)
    blocks = (("grpo",),)

    forms = tuple(_form(kind, level) for level in (False, True) for kind in (None, "tis", "icepop", "seq-mask-tis")) + (
        lambda low, high: {},
        lambda low, high: {"seq_logprob_error_threshold": high},
    )

    source = "NVIDIA-NeMo/RL@7ea279abfbeb"
    traps = (
        Trap(
            lambda o: (
                o["loss"]["truncated_importance_sampling_type"] is not None
                and not o["loss"]["use_importance_sampling_correction"]
            ),
            "error",
            "loss_fn.truncated_importance_sampling_type",
            "without use_importance_sampling_correction no weight is computed: the type does nothing",
            "set use_importance_sampling_correction true",
        ),
        Trap(
            lambda o: bool(o["loss"]["use_importance_sampling_correction"]),
            "info",
            "loss_fn.truncated_importance_sampling_type",
            "a log ratio above 88.7 overflows float32: its "
            "weight becomes 0, not the bound, and is not counted as out of bounds",
            "watch for such tokens",
        ),
        Trap(
            lambda o: (
                o["loss"]["truncated_importance_sampling_type"] is None
                and o["loss"]["truncated_importance_sampling_ratio"] is not None
            ),
            "warning",
            "loss_fn.truncated_importance_sampling_ratio",
            "without truncated_importance_sampling_type nothing is truncated: the weights are unbounded",
            "set truncated_importance_sampling_type tis",
        ),
        Trap(
            lambda o: bool(o["loss"]["force_on_policy_ratio"]),
            "warning",
            "loss_fn.force_on_policy_ratio",
            "prev_logprobs is all zero in the dump: the forward pass is skipped",
            "do not measure a mismatch from such a dump",
        ),
    )

    def rules(self, options: Options) -> Rules:
        """The filter of sequences, then the weight of its type."""
        loss, gates = options["loss"], []
        limit = options["seq_logprob_error_threshold"]
        if limit is not None:
            gates.append(Gate(statistic="mult_error", level="mean", keep=(None, limit), clamp="none"))
        if not loss["use_importance_sampling_correction"]:
            return None, tuple(gates)
        kind = loss["truncated_importance_sampling_type"]
        level: Any = "sequence" if loss["sequence_level_importance_ratios"] else "token"
        keep = (loss["truncated_importance_sampling_ratio_min"], loss["truncated_importance_sampling_ratio"])
        rule: dict[str, Any] = {"level": level, "clamp": "none", "nonfinite": "zero"}
        if kind == "tis":
            rule["clip"] = keep
        elif kind in ("icepop", "seq-mask-tis"):
            if None in keep:
                raise ConfigError(f"nemo-rl: {kind} needs truncated_importance_sampling_ratio and _ratio_min")
            by: Any = level if kind == "icepop" else "geometric"
            gates.append(
                Gate(
                    level=by,
                    keep=keep,
                    clamp="none",
                    effect="zero",
                    nonfinite="one" if kind == "seq-mask-tis" else "reject",
                )
            )
        elif kind is not None:
            raise ConfigError(f"nemo-rl knows the types tis, icepop and seq-mask-tis, not {kind!r}")
        return Weight(**rule), tuple(gates)
