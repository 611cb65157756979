"""Adapter of ROLL at commit 8eb27cc2dc34 (2026-08)."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl.core import losses
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.application import GateOutcome, adjacent_segments
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import read_layout
from mismatchctl.frameworks.lint import read_table
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, check_flag, make_adapter, read_choice
from mismatchctl.frameworks.step import ConfiguredStep, Options

_TABLES = read_table(__file__, "options.yaml")
_FILTER_DEFAULTS: Options = _TABLES["filter"]
_LEVELS: dict[str, dict[str, Any]] = _TABLES["ratio_levels"]
_DIFF_LEVELS: dict[str, dict[str, Any]] = _TABLES["diff_levels"]


def _filter_form(kind: str, what: str) -> Options:
    chosen = {"enabled": True, "agg_type": kind, "ratio_enabled": what == "ratio", "diff_enabled": what == "diff"}
    return {"filters": [chosen | {f"{what}_low": LOW, f"{what}_high": HIGH}]}


class Roll(PlainFramework):
    """ROLL: one weight rule and several filters. Every filter also checks the tokens that another filter rejects."""

    forms = (
        {},
        *({"is_weight": {"enabled": True, "weight_type": kind, "upper_bound": HIGH}} for kind in _LEVELS),
        *(_filter_form(kind, what) for what in ("ratio", "diff") for kind in _LEVELS),
    )

    traps = {
        "ignores_mask": lambda o: (
            o["loss_agg_mode"] == "token-mean" and any(one.get("enabled") for one in o["filters"])
        ),
        "same_name": lambda o: (
            len({one.get("agg_type", "token") for one in o["filters"] if one.get("enabled")})
            < sum(bool(one.get("enabled")) for one in o["filters"])
        ),
    }

    def _filters(self, options: Options) -> list[Options]:
        found = []
        for given in options["filters"]:
            if unknown := sorted(set(given) - set(_FILTER_DEFAULTS)):
                raise ConfigError(
                    f"roll: unknown option {unknown[0]!r} of a filter{suggestion(unknown[0], _FILTER_DEFAULTS)}"
                )
            for key, value in given.items():
                check_flag(value, _FILTER_DEFAULTS[key], (*self.block, "filters", key), self.title)
            if (_FILTER_DEFAULTS | dict(given))["enabled"]:
                found.append(_FILTER_DEFAULTS | dict(given))
        return found

    def rules(self, options: Options) -> Rules:
        given, gates = options["is_weight"], []
        weight = None
        if given["enabled"]:
            weight = Weight(truncate=given["upper_bound"], clamp="none", **read_choice(_LEVELS, given, "weight_type"))
        for one in self._filters(options):
            common: dict[str, Any] = {"clamp": "none", "effect": "zero"}
            if one["ratio_enabled"]:
                keep = (one["ratio_low"], one["ratio_high"])
                gates.append(Gate(keep=keep, **read_choice(_LEVELS, one, "agg_type"), **common))
            if one["diff_enabled"]:
                keep = (one["diff_low"], one["diff_high"])
                gates.append(
                    Gate(statistic="prob_diff", keep=keep, **read_choice(_DIFF_LEVELS, one, "agg_type"), **common)
                )
        return weight, tuple(gates)

    def shown_weights(self, run: ConfiguredStep) -> Array:
        return run.raw_weights

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        term = losses.ppo_loss(run.advantages, run.u, 0.8, 1.2)
        if run.options["loss_agg_mode"] == "token-mean":
            return [(term, run.raw_weights / max(run.tokens, 1))]
        return [(term, run.raw_weights * run.keep * run.by_rows(where=run.keep))]

    def _levels(self, run: ConfiguredStep) -> dict[str, tuple[Array, Array]]:
        spread, total = run.segments.spread, run.segments.sum
        d = run.d.astype(np.float64)
        apart = exp(run.train).astype(np.float64) - exp(run.rollout)
        runs = adjacent_segments(run.batch)
        return {
            "token": (np.exp(d), apart),
            "geometric": (np.exp(spread(run.row_means(d))), spread(run.row_means(apart))),
            "sequence": (np.exp(spread(total(d))), spread(total(apart))),
            "segment": (np.exp(runs.spread(runs.mean(d))), runs.spread(runs.mean(apart))),
        }

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        """Compute the metrics that ROLL logs. Some shares include padding, as in ROLL."""
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

    def _mean(self, run: ConfiguredStep, values: Array) -> float:
        return float(run.row_means(values).sum() / max((run.lengths > 0).sum(), 1))

    def _clipped(self, run: ConfiguredStep, flags: Any, level: str) -> float:
        """Compute the share of clipped weights. As in ROLL, masked positions and padding can count as clipped."""
        if level in ("geometric", "sequence"):
            return float(flags.sum() * run.width / max(run.tokens, 1))
        masked, bound = self._masked(run, level == "token"), run.options["is_weight"]["upper_bound"]
        return float((flags.sum() + (np.exp(masked[1] - masked[0]) > bound).sum()) / max(run.tokens, 1))

    @staticmethod
    def _masked(run: ConfiguredStep, own: bool) -> tuple[Array, Array]:
        """Return rollout and train log-probs at padding (always 0) and at masked tokens (0 without `own`)."""
        padding = np.zeros(len(run.step) * run.width - (len(run.step.mask) if own else run.tokens))
        if not own:
            return padding, padding
        sides = (run.step.all_values(f"{name}_log_probs")[~run.step.mask] for name in ("rollout", "train"))
        rollout, train = (np.concatenate([values.astype(np.float64), padding]) for values in sides)
        return rollout, train

    def _passed(self, run: ConfiguredStep, outcome: GateOutcome, passed: Any) -> float:
        """Compute the share of tokens that a gate keeps. As in ROLL, masked positions and padding can count as kept."""
        gate = outcome.gate
        if gate.level != "token" and gate.over == "sequence":
            rows = ~(outcome.low.sequences | outcome.high.sequences)
            return float(rows.sum() * run.width / max(run.tokens, 1))
        rollout, train = self._masked(run, own=gate.over != "segment")
        values = np.exp(train - rollout) if gate.statistic == "ratio" else np.exp(train) - np.exp(rollout)
        low, high = gate.bounds
        inside = ((values >= low) & (values <= high)).sum()
        return float((passed.sum() + inside) / max(run.tokens, 1))


ADAPTER = make_adapter(Roll, versions=("2026-08",), layouts=(read_layout(__file__, "roll"),))
