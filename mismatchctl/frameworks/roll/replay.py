"""ROLL: what it computes and logs for the rows of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl import surrogates
from mismatchctl.correction import GateOutcome
from mismatchctl.correction.gates import adjacent_runs
from mismatchctl.frameworks.roll.dialect import RollDialect
from mismatchctl.frameworks.run import Run
from mismatchctl.losses import exp
from mismatchctl.surrogates import Array, Term


class Roll(RollDialect):
    """One weight, and filters that do not see each other."""

    loss_key = None

    weighs_always = True

    def shown_weights(self, run: Run) -> Array:
        """Weights are apart from filters."""
        return run.raw_weights

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """PPO; each row's mean is over the tokens that the filters left."""
        term = surrogates.ppo(run.advantages, run.u, 0.8, 1.2)
        if run.options["loss_agg_mode"] == "token-mean":
            return [(term, run.raw_weights / max(run.tokens, 1))]
        return [(term, run.raw_weights * run.keep * run.by_rows(where=run.keep))]

    def _levels(self, run: Run) -> dict[str, tuple[Array, Array]]:
        """Ratio and difference of probabilities per token at each level."""
        spread, total = run.segments.spread, run.segments.sum
        d = run.d.astype(np.float64)
        apart = exp(run.train).astype(np.float64) - exp(run.rollout)
        runs = adjacent_runs(run.batch)
        return {
            "token": (np.exp(d), apart),
            "geometric": (np.exp(spread(run.row_means(d))), spread(run.row_means(apart))),
            "sequence": (np.exp(spread(total(d))), spread(total(apart))),
            "segment": (np.exp(runs.spread(runs.mean(d))), runs.spread(runs.mean(apart))),
        }

    def metrics(self, run: Run) -> dict[str, float]:
        """Means at four levels, clips, and pass rates as they are logged: with padding in them."""
        logged: dict[str, float] = {}
        for level, (ratio, apart) in self._levels(run).items():
            logged[f"actor/train_infer_ratio_{level}_mean@sum"] = self._mean(run, ratio)
            logged[f"actor/train_infer_diff_{level}_mean@sum"] = self._mean(run, apart)
        given = run.options["is_weight"]
        if given["enabled"] and given["upper_bound"] is not None and run.applied.weights is not None:
            flags = run.applied.weights.high
            logged["actor/is_weight_clipfrac@sum"] = self._clipped(run, flags, given["weight_type"])
        outcomes = iter(run.applied.gates)
        for one in self._filters(run.options):
            for what in ("ratio", "diff"):
                if one[f"{what}_enabled"]:
                    outcome = next(outcomes)
                    passed = ~outcome.rejected
                    logged[f"actor/train_infer_{one['agg_type']}_{what}_mask_mean@sum"] = self._passed(
                        run, outcome, passed
                    )
        if self._filters(run.options):
            logged["actor/train_infer_final_mask_mean"] = float(run.keep.sum() / max(run.tokens, 1))
        return logged

    def _mean(self, run: Run, values: Array) -> float:
        return float(run.row_means(values).sum() / max((run.lengths > 0).sum(), 1))

    def _clipped(self, run: Run, flags: Any, level: str) -> float:
        """Masked positions and padding, which has its row's weight, are in the count, not in the denominator."""
        if level in ("geometric", "sequence"):
            return float(flags.sum() * run.width / max(run.tokens, 1))
        masked, bound = self._masked(run, level == "token"), run.options["is_weight"]["upper_bound"]
        return float((flags.sum() + (np.exp(masked[1] - masked[0]) > bound).sum()) / max(run.tokens, 1))

    @staticmethod
    def _masked(run: Run, own: bool) -> tuple[Array, Array]:
        """Rollout and train log-probs of what is not valid: a masked token's own, or zeros as of padding."""
        padding = np.zeros(len(run.step) * run.width - (len(run.step.mask) if own else run.tokens))
        if not own:
            return padding, padding
        sides = (run.step.everywhere(f"{name}_log_probs")[~run.step.mask] for name in ("rollout", "train"))
        rollout, train = (np.concatenate([values.astype(np.float64), padding]) for values in sides)
        return rollout, train

    def _passed(self, run: Run, outcome: GateOutcome, passed: Any) -> float:
        """Masked positions and padding are judged too, and are not counted in the denominator."""
        gate = outcome.gate
        if gate.level != "token" and gate.over == "sequence":
            rows = ~(outcome.low.sequences | outcome.high.sequences)
            return float(rows.sum() * run.width / max(run.tokens, 1))
        rollout, train = self._masked(run, own=gate.over != "segment")
        values = np.exp(train - rollout) if gate.statistic == "ratio" else np.exp(train) - np.exp(rollout)
        low, high = gate.bounds
        inside = ((values >= low) & (values <= high)).sum()
        return float((passed.sum() + inside) / max(run.tokens, 1))
