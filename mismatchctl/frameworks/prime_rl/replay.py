"""prime-rl: what it computes and logs for the rows of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mismatchctl import surrogates
from mismatchctl.frameworks.prime_rl.dialect import PrimeRlDialect
from mismatchctl.frameworks.run import Options, Run, k3
from mismatchctl.frameworks.step import Step
from mismatchctl.losses import exp
from mismatchctl.surrogates import Array, Term

_LAST = 1e30


def _lower_median(values: Array) -> float:
    """As torch takes it: of two middle values the lower."""
    if not len(values) or np.isnan(values).any():
        return float("nan")
    return float(np.sort(values)[(len(values) - 1) // 2])


class PrimeRl(PrimeRlDialect):
    """No recomputation: the one forward of the trainer is the current policy, its ratio to the sampler the weight."""

    def prepared(self, step: Step, options: Options, correction: Any) -> Run:
        """The current policy is all there is."""
        current = "current_log_probs" if step.has("current_log_probs") else "train_log_probs"
        single = self.version != "2026-10" and options["type"] != "icepop"  # those compare log ratios, or exactly
        return Run(step, options, correction, trained=current, single=single)

    def shown_weights(self, run: Run) -> Array:
        """The factor of the advantage."""
        if self.later:
            return run.weights
        made: Array = run.raw_weights * run.keep * run.options["adv_tau"]  # inf times 0 is NaN
        return made.astype(run.step.dtype)

    def terms(self, run: Run) -> list[tuple[Term, Array]]:
        """REINFORCE weighted with the ratio where it is kept, and the penalty everywhere."""
        options, kind = run.options, run.options["type"]
        share = run.each(1 / max(run.tokens, 1))
        advantages = run.advantages * options["adv_tau"]
        cap = options.get("max_importance_ratio")
        if kind == "cispo":
            return [(surrogates.factor(advantages, run.current, run.weights), share)]
        if kind == "ppo":
            low, high = self._bounds(options)
            x = run.v if cap is None else np.minimum(run.v, np.log(cap))
            term = surrogates.ppo(advantages, x, low or 0.0, np.inf if high is None else high)
            if cap is not None and cap == high:  # both sides of the minimum are equal there, one without a gradient
                term = replace(term, slope=np.where(x < run.v, term.slope / 2, term.slope))
            return [(term, share)]
        term = surrogates.weighted(advantages, run.v, cap if kind == "ipo" else None)
        terms = [(term, share * run.keep)]
        if options["kl_tau"] and kind != "icepop":
            terms.append((surrogates.quadratic(run.v, options["kl_tau"]), share))
        return terms

    def _kl(self, run: Run) -> Array:
        if self.version != "2026-10":
            return k3(run.v)
        limited: Array = np.minimum(np.expm1(run.v.astype(np.float64)), _LAST) - run.v
        return limited

    def metrics(self, run: Run) -> dict[str, float]:
        """K3 over tokens, and per sequence of what is dropped and what is not."""
        kl, options = self._kl(run), run.options
        logged = {
            "mismatch_kl/mean": float(np.mean(kl)),
            "mismatch_kl/median": _lower_median(kl),
            "mismatch_kl/std": float(np.std(kl, ddof=1)) if len(kl) > 1 else float("nan"),
            "mismatch_kl/min": float(np.min(kl)),
            "mismatch_kl/max": float(np.max(kl)),
        }
        if options["type"] in ("ppo", "cispo"):
            return logged | self._clips(run)
        dropped = ~run.keep
        parts = {
            "masked_mismatch_kl": run.row_means(kl, dropped),
            "unmasked_mismatch_kl": run.row_means(kl, ~dropped),
            "is_masked": run.row_means(dropped),
        }
        if options["type"] == "default":
            sides = [outcome.rejected for outcome in run.applied.gates]  # first that of positive advantages
            negative = run.advantages < 0
            parts |= {"is_masked_low": run.row_means(sides[1] & negative), "is_masked_high": run.row_means(sides[0])}
            parts["masked_advantage_positive"] = run.row_means(run.advantages > 0, dropped)
            parts["masked_advantage_negative"] = run.row_means(run.advantages < 0, dropped)
        return logged | {f"{name}/mean": float(values.mean()) for name, values in parts.items()}

    def _clips(self, run: Run) -> dict[str, float]:
        low, high = self._bounds(run.options)
        ratio = exp(run.v)
        above, below = ratio > (np.inf if high is None else high), ratio < (low or 0.0)
        flags = (above & (run.advantages > 0)) | (below & (run.advantages < 0))
        found = {}
        if run.options["type"] == "cispo":
            flags = above | below
        else:
            found["ratio_capped/mean"] = float(run.row_means(ratio > run.options["max_importance_ratio"]).mean())
        return {"is_clipped/mean": float(run.row_means(flags).mean())} | found
