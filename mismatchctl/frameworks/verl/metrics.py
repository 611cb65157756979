"""Compute the weights, rejection and logged metrics of verl's rollout correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import LoggedMetric, Replay, read_metrics
from mismatchctl.frameworks.step import ConfiguredStep, Step
from mismatchctl.frameworks.verl.configuration import RS_OPTIONS, VerlVersion, find_rs_option, split_gates
from mismatchctl.measure.metrics.metric import BOUNDED_WEIGHTS, KEPT_TOKENS, VALID_SEQUENCES, VALID_TOKENS

Values = NDArray[Any]


def clamp_log_ratio(log_ratio: Floats) -> Floats:
    """Limit a log ratio to ±20 (verl's SAFETY_BOUND)."""
    return np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def float32_log(threshold: float) -> float:
    rounded = float(np.float32(threshold))
    if not rounded > 0:
        return -math.inf if rounded == 0 else math.nan
    return float(np.float32(math.log(rounded)))


def over_tokens(sample: ConfiguredStep, values: Values, level: str) -> Values:
    """Repeat the value of each row [S] for its tokens [T]. With level "token", `values` are per token already."""
    return values if level == "token" else sample.segments.spread(values)


def mean_in_dtype(values: Values) -> Floats:
    """Return the mean in the dtype of `values`. Booleans give float32, as in verl."""
    dtype = np.dtype(np.float32) if values.dtype == np.bool_ else values.dtype
    total = np.asarray(values.sum(dtype=np.float64), dtype)
    return np.asarray(total / np.asarray(max(len(values), 1), dtype))


def _population_std(values: Floats) -> float:
    """Compute the standard deviation as sqrt(E[x^2] - E[x]^2), as verl does. This is inexact for small deviations."""
    if len(values) <= 1:
        return 0.0
    variance = mean_in_dtype(values * values) - mean_in_dtype(values) ** 2
    return math.sqrt(max(float(variance), 0.0))


def _ess(values: Floats) -> float:
    """Return the ESS (0 to 1), as verl computes it from weights / mean. If all weights are 0, raise a DataError."""
    normalized = values / (mean_in_dtype(values) + np.asarray(1e-8, values.dtype))
    squares = float(mean_in_dtype(normalized * normalized))
    if squares == 0:
        raise DataError("verl divides by zero when it computes the ESS, because every weight of the batch is 0")
    return 1.0 / squares


REDUCTIONS: dict[str, Callable[[Values], Any]] = {
    "mean": mean_in_dtype,
    "mean - 1": lambda values: mean_in_dtype(values) - np.asarray(1, values.dtype),
    "max": np.max,
    "min": np.min,
    "std": lambda values: np.std(values, ddof=1, dtype=np.float64) if len(values) > 1 else 0.0,
    "spread": _population_std,
    "ess": _ess,
}

Measured = dict[str, Values]
"""Name of a quantity (column `values` of names.yaml) -> its value for each token [T] or row [S]."""


def _measure_distance(sample: ConfiguredStep) -> Measured:
    """Compute the metrics of the mismatch between train and rollout. Only squared values use clamped log ratios."""
    x, train, rollout = sample.d, -sample.row_mean(sample.train), -sample.row_mean(sample.rollout)
    return {
        "train_log_ppl": train,
        "train_ppl": exp(train),
        "rollout_log_ppl": rollout,
        "rollout_ppl": exp(rollout),
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": np.abs(train - rollout),
        "ppl_ratio": exp(train - rollout),
        "k1": -x,
        "k3": exp(x) - x - 1,
        "squared_ratio": exp(clamp_log_ratio(x)) ** 2,
        "squared_product": exp(2 * clamp_log_ratio(sample.row_sum(x))),
    }


def _measure_ratio(
    sample: ConfiguredStep,
    version: VerlVersion,
    level: str,  # token, sequence or geometric
    lower: float,  # weights below this count as low
    upper: float,  # weights above this count as high, and are truncated to it
    zero: bool = False,  # True if weights outside the bounds become 0 (IcePop)
) -> Measured:
    """Compute ratios, weights and flags at a level. As in verl, the bounds of rows are logarithms in float32."""
    token = level == "token"
    x = sample.d if token else (sample.row_sum if level == "sequence" else sample.row_mean)(sample.d)
    ratio = exp(clamp_log_ratio(x))
    raw = over_tokens(sample, ratio, level)
    outside = (raw < lower) | (raw > upper)
    bounded = np.where(outside, 0, raw).astype(raw.dtype) if zero else np.minimum(raw, np.asarray(upper, raw.dtype))
    weight = bounded if version.measures_applied else raw
    row_weight = sample.row_mean(weight)
    row_of_fractions = row_weight if version.fractions_applied else sample.row_mean(raw)
    high, low = (ratio > upper, ratio < lower) if token else (x > float32_log(upper), x < float32_log(lower))
    rejected_rows = ~((ratio >= lower) & (ratio <= upper))
    rejected = over_tokens(sample, rejected_rows, level)
    return {
        "raw": raw,
        "weight": weight,
        "clamped_weight": np.clip(weight, 0 if version.measures_applied else lower, upper),
        "bounded_weight": bounded,
        "bounded_row_weight": sample.row_mean(bounded),
        "row_weight": row_weight,
        "weight_distance": np.abs(row_weight - 1),
        "rows_high": row_of_fractions > upper,
        "rows_low": row_of_fractions < lower,
        "high": high,
        "low": low,
        "high_tokens": over_tokens(sample, high, level),
        "low_tokens": over_tokens(sample, low, level),
        "largest_ratio": exp(np.minimum(x, LOG_RATIO_BOUND)),
        "smallest_ratio": exp(x),
        "outside": outside,
        "rejected": rejected,
        "rejected_rows": sample.segments.sum(rejected) > 0 if token else rejected_rows,
    }


def _measure_veto(sample: ConfiguredStep, threshold: float | None) -> Measured:
    """Flag tokens whose unclamped ratio is below `threshold`, and reject each row that contains such a token."""
    below = np.zeros(len(sample.train), np.bool_) if threshold is None else sample.d < float32_log(threshold)
    rows = sample.segments.sum(below) > 0
    return {"catastrophic": below, "row_vetoed": rows, "rejected": sample.segments.spread(rows)}


def _measure_estimate(sample: ConfiguredStep, gate: Gate) -> Measured:
    """Compute the gate statistic k1, k2 or k3 (since 0.7.1). Clamp log ratios per token, then aggregate. Reject NaN."""
    y, (lower, upper) = clamp_log_ratio(sample.d), gate.bounds
    per_token = -y if gate.statistic == "k1" else 0.5 * y**2 if gate.statistic == "k2" else exp(y) - 1 - y
    reduce = {"sum": sample.row_sum, "mean": sample.row_mean, "max": sample.row_max}.get(gate.level)
    at_level = per_token if reduce is None else reduce(per_token)
    statistic = over_tokens(sample, at_level, gate.level)
    rows = sample.row_mean(at_level) if reduce is None else at_level
    rejected = ~((statistic <= upper) & (statistic >= lower))
    return _measure_rejection(sample, rejected) | {
        "statistic": statistic,
        "clamped_statistic": np.clip(statistic, gate.keep[0] or 0.0, upper),
        "above": statistic > upper,
        "below": statistic < lower,
        "row_statistic": rows,
        "row_distance": np.abs(rows),
        "row_above": rows > upper,
        "row_below": rows < lower,
    }


def _measure_rejection(sample: ConfiguredStep, rejected: Bools) -> Measured:
    found = {"rejected": rejected, "any_rejected": sample.segments.sum(rejected) > 0}
    return found | {f"{name}_number": flags.astype(sample.train.dtype) for name, flags in found.items()}


Tables = tuple[str, ...]
"""Names of tables in names.yaml, which list the metrics that verl logs."""


def _weight_tables(level: str, version: VerlVersion) -> Tables:
    """Return the tables with metrics of weights. In verl 2025-10, shares of geometric weights are shares of tokens."""
    kind = level if level == "token" or (level == "geometric" and version.dialect == "flat") else "row"
    return "weights", f"{kind}_weights"


def _factor_table(level: str, version: VerlVersion) -> str:
    """Return the table with the mean weight that verl divides by. Only verl 2025-11-12 and 0.6.1 count empty rows."""
    return f"{'token' if level == 'token' else 'row' if version.normalizes_empty else 'filled'}_factor"


def _estimate_tables(statistic: str, level: str) -> Tables:
    by_level = "token_estimate" if level == "token" else "row_estimate"
    return "estimate", by_level, *(["k1_estimate"] if statistic == "k1" else [])


def _off_policy_tables(version: VerlVersion) -> tuple[Tables, str]:
    """Return the tables of metrics that verl logs in every configuration, and the prefix of the logged names."""
    flat = version.dialect == "flat"
    return (("off_policy",), f"{version.prefix}mismatch_") if flat else (("off_policy", "chi2"), version.prefix)


def _reduce_values(tables: Tables, measured: Measured, sample: ConfiguredStep, prefix: str) -> dict[str, float]:
    logged = {}
    for metric in (row for table in tables for row in read_metrics(__file__)[table]):
        values = measured[metric.values]
        if metric.over == "filled":
            values = values[sample.segments.nonempty]
        logged[prefix + metric.name] = float(REDUCTIONS[metric.reduction](values))
    return logged


_SCOPE_WORDS = {
    "tokens": VALID_TOKENS,
    "kept": KEPT_TOKENS,
    "rows": "all sequences, including those without a valid token",
    "filled": VALID_SEQUENCES,
}
_REDUCTION_WORDS = {
    "mean - 1": "mean",
    "std": "standard deviation (n - 1)",
    "spread": "standard deviation (n)",
    "ess": "1 / mean of (value / mean value)^2",
}


def list_meanings(version: VerlVersion) -> list[LoggedMetric]:
    """List every name that a version can log. A name with several meanings is listed once per meaning."""
    bases = {"weight": BOUNDED_WEIGHTS} if version.measures_applied else {}
    bases |= {"high": "ratios, which mask mode rejects by the same thresholds"} if version.dialect == "flat" else {}
    return [
        replace(
            row,
            name=prefix + row.name,
            when=when,
            quantity=f"{row.quantity}, less 1" if row.reduction == "mean - 1" else row.quantity,
            over=VALID_TOKENS if version.zeroes_rejected and row.over == "kept" else _SCOPE_WORDS[row.over],
            reduction=_REDUCTION_WORDS.get(row.reduction, row.reduction),
            # Under this prefix, the same names are for the ratios of a gate, which match no metric of weights.
            like=None if prefix.endswith("rollout_rs_") and not row.name.endswith("masked_fraction") else row.like,
            basis=bases.get(row.values, row.basis),
        )
        for tables, prefix, when in _iterate_tables(version)
        for table in tables
        for row in read_metrics(__file__)[table]
    ]


def _iterate_tables(version: VerlVersion) -> Iterator[tuple[Tables, str, str]]:
    """Yield tables of names.yaml, the prefix of the names that verl logs, and the options that make verl log them."""
    weights, rejection = f"{version.prefix}rollout_is_", f"{version.prefix}rollout_rs_"
    yield *_off_policy_tables(version), ""
    key, levels = ("rollout_is_level", _LEVELS) if version.dialect == "flat" else ("rollout_is", _LEVELS[:2])
    for level in levels:
        yield _weight_tables(level, version), weights, f"{key}: {level}"
    if version.dialect == "flat":
        yield ("rejection",), weights, "rollout_is_mode: mask"
    for level in levels if version.normalizes else ():
        yield (_factor_table(level, version),), weights, f"rollout_is: {level}, rollout_is_batch_normalize"
    for level in _LEVELS if version.dialect == "ratio" else ():
        yield (*_weight_tables(level, version), "rejection"), rejection, f"rollout_rs: {level}"
    if version.dialect == "estimator":
        yield ("icepop",), weights, "rollout_is_threshold: lower_upper"
        for option, (statistic, level) in RS_OPTIONS.items():
            yield _estimate_tables(statistic, level), f"{rejection}{option}_", f"rollout_rs: {option}"
        yield ("any_rejection",), rejection, "rollout_rs"
    else:
        yield ("veto",), version.prefix, ""
    yield ("debug",), _DEBUG_PREFIX, "not in bypass mode"
    yield ("loss",), "actor/", ""


_LEVELS = ("token", "sequence", "geometric")
_DEBUG_PREFIX = "training/rollout_"


def _measure_debug(train: Floats, rollout: Floats) -> dict[str, float]:
    """Compare train and rollout probability of each valid token [T]. As in verl, undefined values are NaN."""
    ours, theirs = exp(train), exp(rollout)
    apart = np.abs(ours - theirs).astype(np.float64)
    a, b = (side.astype(np.float64) - side.astype(np.float64).mean() for side in (ours, theirs))
    scale = float(np.sqrt((a @ a) * (b @ b)))
    deviation = apart.std(ddof=1) if len(apart) > 1 else math.nan
    values = (1.0, apart.max(), apart.mean(), deviation, a @ b / scale if scale else math.nan)
    rows = read_metrics(__file__)["debug"]
    return {_DEBUG_PREFIX + row.name: float(value) for row, value in zip(rows, values, strict=True)}


_MIN_MEAN_WEIGHT = 1e-8  # verl does not divide weights by a smaller mean

_Outcome = tuple[Floats | None, Bools, dict[str, float]]
"""(final weights [T], or `None` if the correction has no weights; flags of kept tokens [T]; logged values)."""


def replay_step(
    step: Step, correction: Correction, version: VerlVersion, micro_batch_size: int | None, *, applied: bool
) -> Replay:
    """Compute weights, kept tokens and metrics of one training step, as verl does on one rank.

    In bypass mode, verl compares current_log_probs with rollout_log_probs. It corrects each micro-batch separately, and
    logs means over micro-batches. Until 0.7.0, it logs the maximum of `max` metrics and the minimum of `min` metrics.
    """
    if correction.loss == "ppo":
        replay = _replay_batch(step, correction, version, "train_log_probs", applied)
        replay.logged.update(_measure_debug(step.values("train_log_probs"), step.values("rollout_log_probs")))
        return replay
    batches = step.micro_batches(micro_batch_size) or [np.arange(0)]
    parts = [_replay_batch(step.take(rows), correction, version, "current_log_probs", applied) for rows in batches]
    places = np.argsort(np.concatenate(batches)).tolist()
    keep = [kept for part in parts for kept in part.keep]
    weights = [values for part in parts for values in part.weights or ()]
    logged: dict[str, float] = {}
    for name in parts[0].logged:
        extremes = {} if version.dialect == "estimator" else {"max": max, "min": min}
        reduce = next((extreme for word, extreme in extremes.items() if word in name), fmean)
        logged[name] = reduce([part.logged[name] for part in parts])
    ordered = None if correction.weight is None else [weights[place] for place in places]
    return Replay(logged, ordered, [keep[place] for place in places])


@np.errstate(over="ignore", invalid="ignore")
def _replay_batch(step: Step, correction: Correction, version: VerlVersion, policy: str, applied: bool) -> Replay:
    sample = ConfiguredStep(step, {}, correction, trained=policy)
    if not sample.tokens:
        raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")
    if version.dialect == "flat":
        weights, kept, logged = _compute_flat(sample, correction, version)
    else:
        weights, logged, factor = _compute_weights(sample, correction.weight, version)
        kept, rejected = _compute_rejections(sample, correction, version)
        logged |= rejected | _measure_off_policy(sample, version) | factor
    if weights is None or not applied:
        return Replay(logged, None, step.by_row(kept))
    shown = kept & (weights > 0) if version.zeroes_rejected else kept
    return Replay(logged, step.by_row(weights), step.by_row(shown))


def _measure_off_policy(sample: ConfiguredStep, version: VerlVersion) -> dict[str, float]:
    tables, prefix = _off_policy_tables(version)
    return _reduce_values(tables, _measure_distance(sample), sample, prefix)


def _compute_flat(sample: ConfiguredStep, correction: Correction, version: VerlVersion) -> _Outcome:
    weight, kept = correction.weight, np.ones(len(sample.train), np.bool_)
    rejections, threshold = split_gates(correction)
    if weight is None:
        return None, kept, {}
    low, high = rejections[0].keep if rejections else (weight.watch_low, weight.truncate)
    upper = math.inf if high is None else high
    measured = _measure_ratio(sample, version, weight.level, 1.0 / upper if low is None else low, upper)
    tables = _weight_tables(weight.level, version)
    veto = _measure_veto(sample, threshold)
    if rejections:
        tables = (*tables, "rejection")
        kept &= ~measured["rejected"]
    kept &= ~veto["rejected"]
    weights = measured["raw" if rejections else "bounded_weight"]
    logged = _reduce_values(tables, measured, sample, f"{version.prefix}rollout_is_")
    logged |= _reduce_values(("veto",), veto, sample, version.prefix) | _measure_off_policy(sample, version)
    if version.zeroes_rejected:
        return weights * kept, np.ones_like(kept), logged
    return weights, kept, logged


def _compute_rejections(
    sample: ConfiguredStep, correction: Correction, version: VerlVersion
) -> tuple[Bools, dict[str, float]]:
    rejections, threshold = split_gates(correction)
    kept, prefix = np.ones(len(sample.train), np.bool_), f"{version.prefix}rollout_rs_"
    logged: dict[str, float] = {}
    for gate in rejections:
        if version.dialect == "estimator":
            measured = _measure_estimate(sample, gate)
            tables, own = _estimate_tables(gate.statistic, gate.level), f"{prefix}{find_rs_option(gate)}_"
        else:
            low, high = gate.keep
            measured = _measure_ratio(sample, version, gate.level, low or 0.0, math.inf if high is None else high)
            tables, own = (*_weight_tables(gate.level, version), "rejection"), prefix
        logged |= _reduce_values(tables, measured, sample, own)
        kept &= ~measured["rejected"]
    if version.dialect == "ratio":
        veto = _measure_veto(sample, threshold)
        return kept & ~veto["rejected"], logged | _reduce_values(("veto",), veto, sample, version.prefix)
    if rejections:
        logged |= _reduce_values(("any_rejection",), _measure_rejection(sample, ~kept), sample, prefix)
    return kept, logged


def _compute_weights(
    sample: ConfiguredStep, weight: Weight | None, version: VerlVersion
) -> tuple[Floats | None, dict[str, float], dict[str, float]]:
    """Return the final weights, the metrics of weights before normalization, and the logged mean for normalization."""
    if weight is None:
        return None, {}, {}
    (low, upper), zero = weight.bounds, weight.zero is not None
    measured = _measure_ratio(sample, version, weight.level, low if zero else 1.0 / upper, upper, zero)
    prefix, bounded = f"{version.prefix}rollout_is_", measured["bounded_weight"]
    tables = (*_weight_tables(weight.level, version), *(["icepop"] if zero else []))
    logged = _reduce_values(tables, measured, sample, prefix)
    if weight.normalize == "none":
        return bounded, logged, {}
    ((key, mean),) = _reduce_values((_factor_table(weight.level, version),), measured, sample, prefix).items()
    if not mean > _MIN_MEAN_WEIGHT:
        return bounded, logged, {key: 1.0}
    return bounded / np.asarray(mean, bounded.dtype), logged, {key: mean}
