"""tinker-cookbook: what it computes and logs for the rows of a step."""

from __future__ import annotations

from mismatchctl import surrogates
from mismatchctl.correction import Correction
from mismatchctl.frameworks.run import Options, Run
from mismatchctl.frameworks.step import Step
from mismatchctl.frameworks.tinker_cookbook.dialect import TinkerCookbookDialect
from mismatchctl.surrogates import Array, Term


class TinkerCookbook(TinkerCookbookDialect):
    """The ratio of the current policy to the sampler, unbounded unless the loss bounds it."""

    loss_key = None

    def prepared(self, step: Step, options: Options, correction: Correction) -> Run:
        """The policy that it holds against the sampler."""
        wanted = options["training"]
        return Run(step, options, correction, trained=wanted if step.has(wanted) else "train_log_probs")

    def shown_weights(self, run: Run) -> Array:
        """The ratio, bounded where the loss does."""
        return run.weights

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """Sums over tokens, as the server takes them."""
        kind, ones = run.options["loss_fn"], run.each(1.0)
        if kind == "importance_sampling":
            return [(surrogates.weighted(run.advantages, run.v), ones)]
        low, high = self._clips(run.options)
        if kind == "ppo":
            return [(surrogates.ppo(run.advantages, run.v, low, high), ones)]
        return [(surrogates.cispo(run.advantages, run.v, run.current, low, high), ones)]

    def metrics(self, run: Run) -> dict[str, float]:
        """Two KL estimates and the sampler's entropy, flat over tokens."""
        return {
            "optim/kl_sample_train_v1": run.mean(-run.d),
            "optim/kl_sample_train_v2": 0.5 * run.mean(run.d * run.d),
            "optim/entropy": run.mean(-run.rollout),
        }
