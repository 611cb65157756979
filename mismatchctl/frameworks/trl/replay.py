"""TRL: what it computes and logs for the rows of a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl import surrogates
from mismatchctl.frameworks.run import Run
from mismatchctl.frameworks.trl.dialect import TrlDialect
from mismatchctl.losses import exp
from mismatchctl.surrogates import Array, Term

_LOG_LEAST = float(np.log(1e-8))


class Trl(TrlDialect):
    """Product of ratios at sequence level, masks that leave the denominators alone."""

    def shown_keep(self, run: Run) -> Any:
        """OPSM is a mask of its own there: only the importance sampling's is shown."""
        return self._passed(run) & (self.shown_weights(run) != 0)

    @staticmethod
    def _passed(run: Run) -> Any:
        modes = [outcome for outcome in run.applied.gates if outcome.gate.statistic == "ratio"]
        flags = np.ones(run.tokens, np.bool_)
        for outcome in modes:
            flags &= ~outcome.rejected
        return flags

    def shown_weights(self, run: Run) -> Array:
        """What the mode makes of the ratio."""
        return np.where(self._passed(run), run.raw_weights, 0).astype(run.step.dtype)

    def _x(self, run: Run) -> Array:
        return run.u if run.options["level"] == "token" else run.segments.spread(run.row_means(run.u))

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """The surrogate of loss_type, times the weights."""
        options, kind = run.options, run.options["loss_type"]
        low, high = options["eps"]
        sequences = None if options["level"] == "token" else run.segments
        x, factors = self._x(run), run.weights
        if kind == "cispo":
            term = surrogates.cispo(run.advantages, x, run.current, -np.inf, high)
        elif kind == "sapo":
            term = surrogates.sapo(run.advantages, x, options["sapo"][0], options["sapo"][1], sequences)
        elif kind == "vespo":
            phi = run.segments.spread(self._phi(run)).astype(run.step.dtype)
            term, factors = surrogates.factor(run.advantages, run.current, phi), run.keep.astype(float)
        else:
            term = surrogates.ppo(run.advantages, x, 1 - low, 1 + high, cap=options["delta"], mean_over=sequences)
        shares = run.by_rows() if kind in ("grpo", "sapo") else run.each(1 / max(run.tokens, 1))
        return [(term, factors * shares)]

    def _phi(self, run: Run) -> Array:
        vespo = run.options["vespo"]
        ratio = np.clip(np.log(np.maximum(self.shown_weights(run), 1e-300)), _LOG_LEAST, 20)
        log_weight = np.clip(run.segments.sum(np.clip(run.u, -20, 20)) + run.segments.sum(ratio), _LOG_LEAST, 20)
        first = run.row_means(run.advantages)
        ups, downs = (surrogates.vespo_gate(log_weight, *vespo[side]) for side in ("positive", "negative"))
        return np.nan_to_num(np.where(first >= 0, ups, downs), posinf=0.0)

    def metrics(self, run: Run) -> dict[str, float]:
        """Differences of log-probs, weights after they were bounded, and clips."""
        apart = np.abs(run.d)
        logged = {
            "sampling/sampling_logp_difference/mean": run.mean(apart),
            "sampling/sampling_logp_difference/max": float(apart.max(initial=0)),
        }
        weights = self.shown_weights(run)
        if run.correction.weight is not None and run.correction.weight.level == "sequence":
            firsts = np.ones(len(run.step))
            some = run.lengths > 0
            firsts[some] = weights[run.segments.offsets[:-1][some]]
            weights = firsts
        if run.correction.weight is not None:
            for how, value in (("min", weights.min()), ("mean", weights.mean()), ("max", weights.max())):
                logged[f"sampling/importance_sampling_ratio/{how}"] = float(value)
        logged["entropy"] = 0.0
        if not run.has_loss:
            return logged
        kind, (low, high) = run.options["loss_type"], run.options["eps"]
        ratio = exp(self._x(run))
        if kind == "cispo":
            logged["cispo_clip_ratio"] = run.mean((ratio > high) & (run.advantages > 0))
        elif kind == "vespo":
            logged["vespo/phi_seq_mean"] = float(self._phi(run).mean())
        elif kind != "sapo":
            below, above = (ratio < 1 - low) & (run.advantages < 0), (ratio > 1 + high) & (run.advantages > 0)
            token = run.options["level"] == "token"
            if not token:
                below, above = (run.segments.max(flags.astype(float)) > 0 for flags in (below, above))
            lows, highs = float(np.mean(below)), float(np.mean(above))
            ends = [run.row_means(flags) if token else flags for flags in (below, above)]
            logged |= {
                "clip_ratio/low_mean": lows,
                "clip_ratio/high_mean": highs,
                "clip_ratio/region_mean": lows + highs,
            }
            logged |= {"clip_ratio/low_min": ends[0].min(), "clip_ratio/high_max": ends[1].max()}
        return logged
