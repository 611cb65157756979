"""OpenRLHF: what it computes and logs for the rows of a step."""

from __future__ import annotations

from typing import Any

from mismatchctl import surrogates
from mismatchctl.frameworks.openrlhf.dialect import OpenRlhfDialect
from mismatchctl.frameworks.run import Run
from mismatchctl.losses import exp
from mismatchctl.surrogates import Array, Term


class OpenRlhf(OpenRlhfDialect):
    """Weights within two bounds; masks leave the denominators alone."""

    loss_key = "policy_loss"

    def shown_weights(self, run: Run) -> Array:
        """Ratio times mask, as it is written: an infinite ratio that is masked is NaN."""
        return (run.raw_weights * run.keep).astype(run.step.dtype)

    def shown_keep(self, run: Run) -> Any:
        """What a weight of 0 leaves out is out."""
        return self.shown_weights(run) != 0

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """PPO on the update ratio, or GSPO on the ratio to the sampler."""
        options = run.options
        low, high = 1 - options["clip_eps_low"], 1 + options["clip_eps_high"]
        some = float((run.lengths > 0).sum())
        shares = run.by_rows(rows=some)
        if options["policy_loss_type"] == "gspo":
            x = run.segments.spread(run.row_means(run.v if options["correct"] else run.u))
            term = surrogates.ppo(run.advantages, x, low, high, mean_over=run.segments)
            return [(term, shares)]
        term = surrogates.ppo(run.advantages, run.u.clip(-20, 20), low, high, dual=options["dual_clip"])
        if options["token_level_loss"]:
            shares = run.each(1 / max(run.tokens, 1))
        return [(term, self.shown_weights(run) * shares)]

    def metrics(self, run: Run) -> dict[str, float]:
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
