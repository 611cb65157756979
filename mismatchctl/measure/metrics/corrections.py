"""Metrics of corrections."""

from __future__ import annotations

import numpy as np

from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.metrics.metric import NO_TOKEN, Metric, Number, Totals, read_formula, read_metrics
from mismatchctl.measure.metrics.mismatch import chi2, std

_ROUNDING = 1e-13  # a smaller mean weight, computed as 1 + (w - 1), has fewer than three correct digits
_NO_BIAS = 1e-15  # relative to the raw mean or 1: a smaller difference is rounding


def _ess_token(t: Totals) -> Number:
    squares = t["squared_kept_weight"]
    some = np.where(np.real(squares) == 0, np.nan, squares)
    return _reliable_sum(t["kept"] + t["kept_excess"], t["kept"]) ** 2 / (t["tokens"] * some)


def _reliable_sum(weight: Number, count: Number) -> Number:
    """Return a sum of weights computed from w - 1, or NaN if the mean is below the rounding error."""
    return np.where(np.real(weight) < _ROUNDING * np.real(count), np.nan, weight)


def _weight_bias(t: Totals) -> Number:
    moved = (t["weight_excess"] - t["raw_weight_excess"]) / t["tokens"]
    size = np.maximum(np.abs(np.real(t["raw_weight_excess"]) / t["tokens"]), 1.0)
    return np.where(np.abs(np.real(moved)) < _NO_BIAS * size, moved * 0.0, moved)


def _ess_sequence(t: Totals) -> Number:
    return _reliable_sum(t["sequence_weight"], t["sequences"]) ** 2 / (t["sequences"] * t["squared_sequence_weight"])


def _gradient_norm(t: Totals) -> Number:
    return np.sqrt(t["squared_gradient"] / t["squared_plain_gradient"]) * t["loss_tokens"] / t["loss_counted"]


_COMMON_METRICS = read_metrics(
    "correction",
    {
        "raw_weight_mean": lambda t: 1 + t["raw_weight_excess"] / t["tokens"],
        "raw_weight_std": std("raw_weight_excess"),
        "weight_mean": lambda t: 1 + t["weight_excess"] / t["tokens"],
        "weight_std": std("weight_excess"),
        "ess_token": _ess_token,
        "ess_sequence": _ess_sequence,
        "rejected_tokens": lambda t: 1 - t["kept"] / t["tokens"],
        "loss_scale": lambda t: (t["kept"] + t["kept_excess"]) / t["counted"],
    },
)
COST_METRICS = read_metrics("cost", {"weight_bias": _weight_bias, "weight_chi2": chi2("weight_excess", "tokens")})
"""Metrics of the cost and effect of bounds, for sweeps. Means and deviations in a Result determine these metrics."""
_VETO_METRICS, _COMPARISON_METRICS = read_metrics("veto"), read_metrics("outcomes")
_LOSS_METRICS = read_metrics(
    "loss",
    {
        "loss_change": lambda t: t["loss"] / t["loss_counted"] - t["plain_loss"] / t["loss_tokens"],
        "gradient_cosine": lambda t: (
            t["gradient_product"] / np.sqrt(t["squared_gradient"] * t["squared_plain_gradient"])
        ),
        "gradient_norm": _gradient_norm,
    },
)


def correction_metrics(correction: Correction, losses: bool = True) -> tuple[Metric, ...]:
    gates = tuple(metric for index, _ in enumerate(correction.gates) for metric in _gate_metrics(index, correction))
    veto = _VETO_METRICS if any(gate.is_veto for gate in correction.gates) else ()
    return (
        *_COMMON_METRICS,
        *gates,
        *veto,
        *_COMPARISON_METRICS,
        *(_LOSS_METRICS if losses else ()),
    )


def sweep_metrics(correction: Correction) -> tuple[Metric, ...]:
    return (*correction_metrics(correction, losses=False), *COST_METRICS)


def _gate_metrics(index: int, correction: Correction) -> tuple[Metric, ...]:
    title = gate_label(correction.gates[index])
    return tuple(
        Metric(
            f"gate{index}_{level}_{side}", f"gate {index} ({title}): {level} too {side}", "fraction",
            f"share of valid {level} that gate {index} rejects because the statistic is too {side}"
            + ("" if level == "tokens" else " (any token of the sequence)"),
            "Rejections by gate and side.", undefined=NO_TOKEN,
            formula=read_formula(f"gate{index}_{level}_{side} / {level}"),
        )
        for level in ("tokens", "sequences")
        for side in ("low", "high")
    )  # fmt: skip
