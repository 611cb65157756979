"""Adapter of OpenRLHF 0.11 (3c3be6234e0c)."""

from __future__ import annotations

from typing import Any

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import FileLayout
from mismatchctl.frameworks.options import PlainFramework, Rules, Switch, Trap, make_adapter
from mismatchctl.frameworks.step import ConfiguredStep, Options

_TYPES = ("tis", "icepop", "seq-mask-tis")


class OpenRlhf(PlainFramework):
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

    block = ("algo", "advantage")

    forms = tuple(
        (lambda low, high, kind=kind: {"correct": True, "type": kind, "threshold": (low, high)}) for kind in _TYPES
    ) + (lambda low, high: {"correct": False},)

    loss_key = "policy_loss"

    source = "OpenRLHF/OpenRLHF@3c3be6234e0c"
    traps = (
        Trap(lambda o: o["type"] == "seq-mask-tis", "info", "is_correction_type",
             "seq-mask-tis leaves the weights of kept sequences unbounded: the documents call it a clamp, the code "
             "does not clamp", "use tis for a bound"),
        Trap(lambda o: o["policy_loss_type"] == "gspo" and bool(o["correct"]), "warning", "policy_loss_type",
             "gspo takes the rollout's log-probs for the old ones and filters nothing",
             "do not count on the correction with gspo"),
    )  # fmt: skip

    switch = Switch(
        "correct",
        "is_correction_enable",
        "without is_correction_enable OpenRLHF corrects nothing, whatever the type and the threshold",
        "give --algo.advantage.is_correction_enable, as it is taken to be given here",
    )

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

    def shown_weights(self, run: ConfiguredStep) -> Array:
        """Ratio times mask, as it is written: an infinite ratio that is masked is NaN."""
        return (run.raw_weights * run.keep).astype(run.step.dtype)

    def shown_keep(self, run: ConfiguredStep) -> Any:
        """What a weight of 0 leaves out is out."""
        return self.shown_weights(run) != 0

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        """PPO on the update ratio, or GSPO on the ratio to the sampler."""
        options = run.options
        low, high = 1 - options["clip_eps_low"], 1 + options["clip_eps_high"]
        some = float((run.lengths > 0).sum())
        shares = run.by_rows(rows=some)
        if options["policy_loss_type"] == "gspo":
            x = run.segments.spread(run.row_means(run.v if options["correct"] else run.u))
            term = losses.ppo_loss(run.advantages, x, low, high, mean_over=run.segments)
            return [(term, shares)]
        term = losses.ppo_loss(run.advantages, run.u.clip(-20, 20), low, high, dual=options["dual_clip"])
        if options["token_level_loss"]:
            shares = run.each(1 / max(run.tokens, 1))
        return [(term, self.shown_weights(run) * shares)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        """Clips, and two KL estimates that are differences of log-probs."""
        logged: dict[str, float] = {}
        low, high = 1 - run.options["clip_eps_low"], 1 + run.options["clip_eps_high"]
        gspo = run.options["policy_loss_type"] == "gspo"
        if run.has_loss:
            x = run.segments.spread(run.row_means(run.v if run.options["correct"] else run.u)) if gspo else run.u
            ratio = exp(x)
            flags = -run.advantages * ratio.clip(low, high) > -run.advantages * ratio
            logged["ppo_clip_ratio"] = run.mean(flags)
            logged["ppo_kl"] = run.mean(-run.u)
        if not gspo and run.options["correct"]:
            logged["vllm_kl"] = run.mean(-run.d)
        return logged


LAYOUT: FileLayout = FileLayout(
    framework="openrlhf",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "action_log_probs",
        "response_mask": "action_mask",
        "token_ids": "sequences",
        "advantages": "advantages",
    },
    prompt=True,
    padding="right",
    mask="1 on sampled tokens",
    patterns=("*.pt",),
    rows=lambda file: file.batch({*LAYOUT.columns.values(), "attention_mask"}),
    next_token=frozenset({"rollout_log_probs", "train_log_probs", "response_mask", "advantages"}),
    keys=("action_log_probs", "action_mask", "rollout_log_probs"),
)
"""An Experience, saved with torch.save as a dict."""


ADAPTER = make_adapter(OpenRlhf, versions=("0.11",), layouts=(LAYOUT,))
