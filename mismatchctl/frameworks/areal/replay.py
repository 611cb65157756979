"""AReaL: what it computes and logs for the rows of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from mismatchctl import surrogates
from mismatchctl.batch import Bools
from mismatchctl.correction import Correction
from mismatchctl.frameworks.areal.dialect import ArealDialect
from mismatchctl.frameworks.areal.statistics import before, since
from mismatchctl.frameworks.run import Options, Run
from mismatchctl.frameworks.step import Step
from mismatchctl.surrogates import Array, Term

_PROXIMAL = "proximal_log_probs"


def _interpolated(step: Step) -> Step:
    """The step with log-probs of the policy one update before current, by the versions of rows or of tokens."""
    rollout, current = step.values("rollout_log_probs"), step.values("current_log_probs")
    age = step.values("train_version") - step.values("versions" if step.has("versions") else "rollout_version")
    moved = np.clip((age - 1) / np.where(age > 0, age, np.inf), 0, 1).astype(rollout.dtype)
    rows = [row.tolist() for row in step.by_row(rollout + moved * (current - rollout))]
    return Step(step.table.append_column(_PROXIMAL, pa.array(rows, pa.list_(pa.float64()))), step.dtype)


class Areal(ArealDialect):
    """One rule of rejection or clamping by one statistic; M2PO before it."""

    loss_key = "actor_loss"

    def prepared(self, step: Step, options: Options, correction: Correction) -> Run:
        """Coupled: the sampler is the anchor; reuse_train_logp: the current policy is; loglinear: one in between."""
        if not options["use_decoupled_loss"]:
            return Run(step, options, correction, trained="rollout_log_probs")
        if options["prox_logp_method"] == "loglinear":
            return Run(_interpolated(step), options, correction, trained=_PROXIMAL)
        if options["prox_logp_method"] == "reuse_train_logp" and step.has("current_log_probs"):
            return Run(step, options, correction, trained="current_log_probs")
        return Run(step, options, correction)

    def high_of(self, options: Options) -> float:
        """Upper clip of the update ratio."""
        higher = options["eps_clip_higher"]
        return 1 + float(options["eps_clip"] if higher is None else higher)

    def update(self, run: Run) -> tuple[Array, Array, Any]:
        """Log ratio of the update, advantages, and the sequences through which the gradient passes (GSPO)."""
        if run.options["importance_sampling_level"] == "token":
            return run.u, run.advantages, None
        kept = self.left(run)
        return (
            run.segments.spread(run.row_means(run.u, kept)).astype(run.step.dtype),
            run.segments.spread(run.row_means(run.advantages, kept)).astype(run.step.dtype),
            kept,
        )

    def left(self, run: Run) -> Bools:
        """Tokens in the loss mask after rejection."""
        return run.keep

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """PPO, dual clip, GSPO or CISPO over the count of tokens before rejection."""
        options = run.options
        x, advantages, kept = self.update(run)
        low, high = 1 - options["eps_clip"], self.high_of(options)
        if options["use_cispo_loss"]:
            term = surrogates.cispo(advantages, x, run.current, low, high)
        else:
            term = surrogates.ppo(advantages, x, low, high, dual=options["c_clip"])
        factors = run.weights * self.left(run) / max(run.counted.sum(), 1)
        if kept is not None:  # the mean passes its gradient to the tokens that it was taken over
            own = run.segments.sum(factors * term.slope) / np.maximum(run.segments.sum(kept), 1)
            slope = np.where(kept, run.segments.spread(own), 0.0) / np.where(factors == 0, 1.0, factors)
            term = Term(term.losses, slope)
        return [(term, factors)]

    def metrics(self, run: Run) -> dict[str, float]:
        """Statistics of the version."""
        return before(self, run) if self.version != "2026-08" else since(self, run)
