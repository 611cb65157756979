"""Adapter of AReaL at commit 4aef98d8d818 (old repository) and commit cbff54d645d2 (2026-08, new repository)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from mismatchctl.core import losses
from mismatchctl.core.batch import Bools
from mismatchctl.core.losses import Array, LossTerm, exp
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import File, Row, read_layout
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.frameworks.options import HIGH, LOW, PlainFramework, Rules, make_adapter, negated, read_choice
from mismatchctl.frameworks.step import ConfiguredStep, Options, Step


def _summarize(name: str, values: Array, where: Bools) -> dict[str, float]:
    """Return the mean, minimum and maximum of the chosen values. Leave out an infinite minimum or maximum."""
    chosen = values[where]
    if not len(chosen):
        return {}
    found = {f"{name}/avg": float(np.mean(chosen, dtype=np.float64))}
    ends = {f"{name}/min": float(chosen.min()), f"{name}/max": float(chosen.max())}
    return found | {key: value for key, value in ends.items() if not np.isinf(value)}


def _filtered_share(run: ConfiguredStep) -> float:
    valid = max(run.counted.sum(), 1)
    rule = run.options["rejection_sampling"]
    if rule["action"] == "mask":
        return float((run.counted & ~run.keep).sum() / valid)
    weights = run.applied.weights
    assert weights is not None
    changed = weights.bounded != weights.raw
    flags = changed if len(changed) == run.tokens else run.segments.spread(changed)
    return float((flags & run.counted).sum() / valid)


def _find_clips(framework: Areal, run: ConfiguredStep) -> tuple[Array, Bools, Bools]:
    """Return the loss of each token [T], flags of clipped tokens, and flags of tokens that the dual clip changes."""
    (term, _), *_ = framework.terms(run)
    clipped = np.asarray(term.clipped)
    dual = np.zeros(run.tokens, np.bool_) if term.clipped_lower is None else term.clipped_lower
    return term.losses, clipped & run.keep if run.options["use_cispo_loss"] else clipped, dual


def measure_before_move(framework: Areal, run: ConfiguredStep) -> dict[str, float]:
    logged: dict[str, float] = {}
    if run.has_loss:
        _, clipped, _ = _find_clips(framework, run)
        logged["clip_ratio"] = float((clipped & run.keep).sum() / max(run.counted.sum(), 1))
    if run.correction.weight is not None:
        behave = run.weights > 0
        logged["rs_filtered_fraction"] = _filtered_share(run)
        logged |= _summarize("behave_imp_weight", run.weights, behave) | _summarize("behave_approx_kl", run.d, behave)
        if behave.any():
            logged["unclipped_behave_tokens"] = float(behave.sum())
    return logged


def measure_after_move(framework: Areal, run: ConfiguredStep) -> dict[str, float]:
    valid, left = run.counted, run.keep
    logged: dict[str, float] = {"n_valid_tokens": float(valid.sum())}
    behave = run.weights > 0 if run.correction.weight is not None else valid
    if run.has_loss:
        losses, clipped, dual = _find_clips(framework, run)
        sequences, cispo = run.options["importance_sampling_level"] != "token", run.options["use_cispo_loss"]
        within = left if sequences else valid
        clipped, dual = clipped & within, dual & within
        logged |= {"clipped_tokens": float(clipped.sum()), "dual_clipped_tokens": float(dual.sum())}
        logged |= _summarize("importance_weight", np.where(within, exp(framework.update(run)[0]), 0), valid)
        logged |= _summarize("approx_kl", run.u, valid)
        logged |= _summarize("new_logp", run.current, valid) | _summarize("old_logp", run.rollout, valid)
        logged |= _summarize("actor_loss", np.where(left, run.weights * losses, 0), valid)
        logged |= _summarize("clip_ratio", clipped.astype(float), valid)
        logged |= _summarize("dual_clip_ratio", dual.astype(float), valid)
        logged |= _summarize("clipped_new_logp", run.current, clipped) | _summarize(
            "clipped_old_logp", run.rollout, clipped
        )
        logged |= _summarize("logp_diff", -run.v, valid) | _summarize("logp_abs_diff", np.abs(run.v), valid)
        if not cispo:
            positions = float(len(run.step) * run.width)
            logged |= {"n_total_tokens": positions, "n_valid_tokens_in_loss": float(valid.sum())}
            logged["n_masked_tokens"] = positions - logged["n_valid_tokens_in_loss"]
            logged["masked_token_ratio"] = logged["n_masked_tokens"] / max(positions, 1)
        kl = run.v.astype(np.float64)
        logged["compute_logp/n_valid_tokens"] = float(behave.sum())
        for name, values in (
            ("prox_logp_gt", run.train),
            ("kl_div_direct", -run.v),
            ("kl_div_taylor", 0.5 * kl * kl),
            ("kl_div_dual", np.expm1(kl) - kl),
        ):
            logged |= _summarize(f"compute_logp/{name}", values, behave)
    if run.correction.weight is not None:
        logged["unclipped_behave_tokens"] = float(behave.sum())
        logged |= _summarize("behave_imp_weight", run.weights, behave) | _summarize("behave_approx_kl", run.d, behave)
        logged |= _summarize("behave_filtered_ratio", (~run.keep).astype(float), valid)
        logged["rs_filtered_fraction"] = _filtered_share(run)
    return logged


_REMOVED_KEYS = re.compile(r"behave?_imp_weight_(cap|mode)")
_RATIO_LEVELS = {"sum": "sequence", "mean": "geometric", "max": "max"}

_STATISTICS = {"kl_k1": "k1", "kl_k2": "k2", "kl_k3": "k3_reversed", "binary_kl": "binary_kl_max"}

_RULE_DEFAULTS = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}


def _rule_form(level: str, action: str, metric: str, agg: str) -> Options:
    low, high = (negated(HIGH), negated(LOW)) if metric == "kl_k1" else (LOW, HIGH)
    return {"level": level, "action": action, "metric": metric, "agg": agg, "upper": high, "lower": low}


_FORM_CHOICES = (
    *(("token", action, "ratio", "mean") for action in ("mask", "clamp")),
    *(("sequence", action, "ratio", agg) for action in ("mask", "clamp") for agg in _RATIO_LEVELS),
    *(("token", "mask", metric, "mean") for metric in _STATISTICS),
    *(("sequence", "mask", metric, agg) for metric in _STATISTICS for agg in _RATIO_LEVELS),
)

_PROXIMAL_COLUMN = "proximal_log_probs"


def _add_proximal_log_probs(step: Step) -> Step:
    """Add proximal log-probs: one update older than `current`, interpolated between rollout and current log-probs."""
    rollout, current = step.values("rollout_log_probs"), step.values("current_log_probs")
    age = step.values("train_version") - step.values("versions" if step.has("versions") else "rollout_version")
    moved = np.clip((age - 1) / np.where(age > 0, age, np.inf), 0, 1).astype(rollout.dtype)
    rows = [row.tolist() for row in step.by_row(rollout + moved * (current - rollout))]
    return Step(step.table.append_column(_PROXIMAL_COLUMN, pa.array(rows, pa.list_(pa.float64()))), step.dtype)


def _rule(options: Options) -> Options:
    return options["rejection_sampling"] or {}


def _bound(options: Options, key: str, *metrics: str) -> float:
    """Return the number `key` of the rule, or NaN if it is not a number or the rule's metric is not in `metrics`."""
    value: Any = _rule(options).get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and (not metrics or _rule(options)["metric"] in metrics) else np.nan


class Areal(PlainFramework):
    """AReaL: one rule that rejects tokens or clamps weights, and a separate threshold for M2PO."""

    forms = (
        {},
        {"m2_threshold": lambda low, high: None if high is None else 2 * high},
        *(
            {"rejection_sampling": _rule_form(*chosen), "prox_logp_method": method}
            for method in ("recompute", "loglinear")
            for chosen in _FORM_CHOICES
        ),
    )

    traps = {
        "no_rule": lambda o: o["rejection_sampling"] is None and bool(o["use_decoupled_loss"]),
        "clamps_ratios_only": lambda o: (
            _rule(o).get("action") == "clamp" and _rule(o).get("metric", "ratio") != "ratio"
        ),
        "upper_too_low": lambda o: _bound(o, "upper", "ratio") <= 1,
        "lower_not_positive": lambda o: _bound(o, "lower", "ratio") <= 0,
        "upper_not_positive": lambda o: _bound(o, "upper", "kl_k2", "kl_k3") <= 0,
        "bounds_reversed": lambda o: _bound(o, "lower") > _bound(o, "upper"),
        "binary_kl": lambda o: _rule(o).get("metric") == "binary_kl",
        "reversed_k3": lambda o: _rule(o).get("metric") == "kl_k3",
        "one_minibatch": lambda o: o["prox_logp_method"] == "reuse_train_logp" and o["ppo_n_minibatches"] > 1,
        "keeps_everything": lambda o: o["rejection_sampling"] is not None and not o["use_decoupled_loss"],
    }

    def lint(self, native: Mapping[str, Any], unknown: Collection[str] = ()) -> list[LintMessage]:
        """Report a missing correction only if the configuration contains `use_decoupled_loss`."""
        found = super().lint(native, unknown)
        return [one for one in found if one.place != "actor.rejection_sampling" or self.is_on(native)]

    @classmethod
    def version_of(cls, native: Mapping[str, Any]) -> str:
        said = {name: value for _, name, value in cls("2026-08").find(native)}
        rule = said.get("rejection_sampling")
        kpop = isinstance(rule, Mapping) and rule.get("metric") == "binary_kl"
        later = kpop or said.get("use_cispo_loss") or said.get("prox_logp_method") == "reuse_train_logp"
        return "2026-08" if later else ""

    def read(self, native: Any) -> Options:
        given = {key for _, inner in self.levels(native) for key in inner}
        if gone := sorted(key for key in map(str, given) if _REMOVED_KEYS.fullmatch(key)):
            raise ConfigError(
                f"areal no longer supports {gone[0]} (to_structured_cfg in api/cli_args.py raises ValueError): write "
                "rejection_sampling with the keys action (mask or clamp) and upper"
            )
        options = super().read(native)
        rule = options["rejection_sampling"]
        if rule is not None:
            if unknown := sorted(set(rule) - set(_RULE_DEFAULTS)):
                raise ConfigError(f"areal: unknown option {unknown[0]!r} of rejection_sampling")
            options["rejection_sampling"] = {**_RULE_DEFAULTS, **rule}
        return options

    def rules(self, options: Options) -> Rules:
        gates: list[Gate] = []
        source: Any = "proximal/rollout" if options["prox_logp_method"] == "loglinear" else "train/rollout"
        if options["m2_threshold"] is not None:
            keep, inclusive = (None, options["m2_threshold"] / 2), (True, False)
            trim = Gate(statistic="k2", level="mean", over="batch", keep=keep, inclusive=inclusive, source=source)
            gates.append(trim)
        rule = options["rejection_sampling"]
        if rule is None:
            return None, tuple(gates)
        metric = read_choice({name: name for name in ("ratio", *_STATISTICS)}, rule, "metric")
        sequences = read_choice({"token": False, "sequence": True}, rule, "level")
        clamps = read_choice({"mask": False, "clamp": True}, rule, "action")
        low, high = rule["lower"], rule["upper"]
        raw: dict[str, Any] = {"level": "geometric" if sequences and metric == "ratio" else "token"}
        seen: Any = "remaining" if gates else "original"
        raw |= {"clamp": "none", "nonfinite": "one", "source": source, "sees": seen if sequences else "original"}
        gate = self._gate(rule, sees=seen, source=source)
        if not clamps:
            return Weight(**raw), (*gates, gate)
        where = gate.model_copy(update={"effect": "mask"}) if sequences else None
        clip = (low or None, high) if metric != "kl_k1" else (low, high)
        return Weight(clip=clip, bound_where=where, **raw), tuple(gates)

    def _gate(self, rule: Options, **given: Any) -> Gate:
        metric, low, high = rule["metric"], rule["lower"], rule["upper"]
        common: dict[str, Any] = {"clamp": "none", "effect": "zero", **given}
        sequences, agg = rule["level"] == "sequence", rule["agg"]
        if metric == "ratio":
            level: Any = read_choice(_RATIO_LEVELS, rule, "agg") if sequences else "token"
            return Gate(level=level, keep=(low, high), nonfinite="one", **common)
        statistic: Any = _STATISTICS[metric]
        if metric == "kl_k1":  # in AReaL, k1 is train minus rollout
            low, high = (None if high is None else -high), (None if low is None else -low)
            agg = "min" if agg == "max" else agg
        precision: Any = "float32" if metric == "binary_kl" else "float64"
        return Gate(
            statistic=statistic, level=agg if sequences else "token", keep=(low, high), precision=precision, **common
        )

    def prepared(self, step: Step, options: Options, correction: Correction) -> ConfiguredStep:
        if not options["use_decoupled_loss"]:
            return ConfiguredStep(step, options, correction, trained="rollout_log_probs")
        if options["prox_logp_method"] == "loglinear":
            return ConfiguredStep(_add_proximal_log_probs(step), options, correction, trained=_PROXIMAL_COLUMN)
        if options["prox_logp_method"] == "reuse_train_logp" and step.has("current_log_probs"):
            return ConfiguredStep(step, options, correction, trained="current_log_probs")
        return ConfiguredStep(step, options, correction)

    def update(self, run: ConfiguredStep) -> tuple[Array, Array, Any]:
        """Return log ratios current/train, advantages (row means, except at level `token`) and the averaged tokens."""
        if run.options["importance_sampling_level"] == "token":
            return run.u, run.advantages, None
        kept = run.keep
        return (
            run.segments.spread(run.row_means(run.u, kept)).astype(run.step.dtype),
            run.segments.spread(run.row_means(run.advantages, kept)).astype(run.step.dtype),
            kept,
        )

    def terms(self, run: ConfiguredStep) -> list[tuple[LossTerm, Array]]:
        options = run.options
        x, advantages, kept = self.update(run)
        higher = options["eps_clip_higher"]
        low, high = 1 - options["eps_clip"], 1 + float(options["eps_clip"] if higher is None else higher)
        if options["use_cispo_loss"]:
            term = losses.cispo_loss(advantages, x, run.current, low, high)
        else:
            term = losses.ppo_loss(advantages, x, low, high, dual=options["c_clip"])
        factors = run.weights * run.keep / max(run.counted.sum(), 1)
        if kept is not None:  # x is a mean over kept tokens, so they share its gradient
            own = run.segments.sum(factors * term.slope) / np.maximum(run.segments.sum(kept), 1)
            slope = np.where(kept, run.segments.spread(own), 0.0) / np.where(factors == 0, 1.0, factors)
            term = replace(term, slope=slope)
        return [(term, factors)]

    def metrics(self, run: ConfiguredStep) -> dict[str, float]:
        return measure_before_move(self, run) if self.version != "2026-08" else measure_after_move(self, run)


def _read_rows(file: File) -> Iterator[Row]:
    for row in file.batch({*LAYOUT.columns.values(), "attention_mask"}):
        # Entry t of prox_logp belongs to token t + 1, so the last of its T entries belongs to no token.
        yield {**row, "prox_logp": row["prox_logp"][:-1]}


LAYOUT = read_layout(__file__, "areal", _read_rows)

ADAPTER = make_adapter(Areal, versions=("2026-08", "4aef98d"), default="4aef98d", layouts=(LAYOUT,))
