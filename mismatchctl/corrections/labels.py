"""Labels for corrections and thresholds. A gate's label describes the kept data, a veto's label the rejected data."""

from __future__ import annotations

import math

from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Correction, Gate, Interval, Weight

NO_CORRECTION_LABEL = "no correction"

_WEIGHT_NAMES = {"token": "token weight", "sequence": "sequence weight", "geometric": "geometric-mean weight"}
_RATIO_NAMES = {
    "token": "token ratio",
    "sequence": "product of ratios",
    "geometric": "geometric mean",
    "mean": "mean ratio",
    "min": "smallest token ratio",
    "max": "largest token ratio",
}
_STATISTIC_NAMES = {
    "ratio": "ratio", "k1": "K1", "k2": "K2", "k3": "K3", "k3_reversed": "reversed K3",
    "abs_log_ratio": "|log ratio|", "mult_error": "exp(|log ratio|)", "ratio_gap": "|ratio - 1|",
    "prob_diff": "probability difference", "abs_prob_diff": "|probability difference|",
    "train_prob": "trainer probability", "rollout_prob": "rollout probability", "binary_kl": "binary KL",
    "binary_kl_max": "binary KL (larger direction)",
}  # fmt: skip
_LEVEL_NAMES = {"token": "token", "sum": "sum of", "mean": "mean", "min": "smallest token", "max": "largest token"}
_SCOPE_NAMES = {"sequence": "", "segment": " per turn", "prefix": " so far", "batch": " of the batch"}
_CONDITION_NAMES = {
    "always": "",
    "positive_advantage": " if the advantage is > 0",
    "negative_advantage": " if the advantage is < 0",
    "nonpositive_advantage": " if the advantage is ≤ 0",
    "drifting": " if the update increases the mismatch",
}
_SOURCE_NAMES = {
    "train/rollout": "",
    "current/rollout": " (current/rollout)",
    "current/train": " (current/train)",
    "proximal/rollout": " (proximal/rollout)",
}
_LARGEST_PERCENT_BOUND = 1.1
"""An interval [1/b, b] is shown in percent if b is at most this number, and as a factor if b is larger."""
_SMALLEST_PLAIN = 1e-3
_EQUAL_DISTANCES = 0.005
"""Bounds whose distances from 1 (or 0) differ by at most this share are shown as one number: "within 10%"."""


def correction_label(correction: Correction) -> str:
    parts = [] if correction.weight is None else [weight_label(correction.weight)]
    return "; ".join([*parts, *map(gate_label, correction.gates)]) or NO_CORRECTION_LABEL


def weight_label(weight: Weight) -> str:
    """Describe a weight rule, for example "token weight ≤ 2"."""
    return f"{rule_name(weight)} {bound_label(weight)}"


def gate_label(gate: Gate) -> str:
    """Describe a gate, for example "geometric mean within 0.1%" or "veto: any token ratio < 1e-4"."""
    rejects = _rejecting_token(gate)
    conditions = f"{_CONDITION_NAMES[gate.when]}{' (random)' if gate.seed is not None else ''}"
    return f"{f'veto: {rejects}' if rejects else f'{rule_name(gate)} {bound_label(gate)}'}{conditions}"


def rule_name(rule: Weight | Gate) -> str:
    """Return the name of a rule without its threshold: "token weight", "geometric mean"."""
    scope = f"{_SCOPE_NAMES[rule.over]}{_SOURCE_NAMES[rule.source]}"
    if isinstance(rule, Weight):
        return f"{_WEIGHT_NAMES[rule.level]}{scope}"
    if rule.statistic == "age":
        return "updates since sampling"
    if rule.statistic == "ratio":
        return f"{_RATIO_NAMES[rule.level]}{scope}"
    return f"{_LEVEL_NAMES[rule.level]} {_STATISTIC_NAMES[rule.statistic]}{scope}"


def bound_label(rule: Weight | Gate) -> str:
    """Describe the threshold of a weight rule or a gate: "≤ 2", "within 0.1%", "in [0.5, 5]"."""
    if isinstance(rule, Gate):
        widening = f", widening with n^{rule.widen:g}" if rule.widen else ""
        return f"{_describe_interval(rule.keep, rule.inclusive, is_ratio=rule.statistic == 'ratio')}{widening}"
    bound = "unbounded" if rule.limit == LOG_RATIO_BOUND else f"unbounded up to exp({rule.limit:g})"
    if rule.truncate is not None:
        bound = f"≤ {short_number(rule.truncate)}"
    elif rule.clip is not None:
        low, high = rule.bounds
        bound = f"clipped to {_format_bounds(rule.clip)}" if low else f"≤ {short_number(high)}"
    elif rule.zero is not None:
        low, high = rule.bounds
        bound = f"0 outside {_format_bounds(rule.zero)}" if low else f"0 above {short_number(high)}"
    where = "" if rule.bound_where is None else f" where {gate_label(rule.bound_where)} fails"
    return f"{bound}{where}{'' if rule.normalize == 'none' else ', normalized'}"


def threshold_label(correction: Correction, path: str) -> str:
    """Describe the weight or gate at a path. Example: `gates.0.keep` gives "geometric mean within 0.1%"."""
    kind, _, rest = path.partition(".")
    if kind == "weight" and correction.weight is not None:
        return weight_label(correction.weight)
    index = rest.partition(".")[0]
    if kind == "gates" and index.isdecimal() and int(index) < len(correction.gates):
        return gate_label(correction.gates[int(index)])
    return correction_label(correction)


def short_number(value: float) -> str:
    """Format a threshold with three significant digits, or more near 1: 2, 0.999, 1.0002, 1e-4."""
    if math.isnan(value):
        return "NaN"
    distance = abs(value - 1)  # must be visible: 1.0002 is not shown as 1
    digits = max(3, 1 - max(math.floor(math.log10(distance)), -9)) if distance > 0 and 0.5 < value < 2 else 3
    rounded = float(f"{value:.3g}")
    text = f"{rounded:e}" if 0 < abs(rounded) < _SMALLEST_PLAIN else f"{value:.{digits}g}"
    mantissa, mark, exponent = text.partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}" if mark else text


def _rejecting_token(gate: Gate) -> str:
    """Describe the tokens that trigger a veto, such as "any token ratio < 1e-4". Return "" for other gates."""
    if gate.over == "batch" or gate.statistic == "age":
        return ""
    name = "ratio" if gate.statistic == "ratio" else _STATISTIC_NAMES[gate.statistic]
    scope = f"{_SCOPE_NAMES[gate.over]}{_SOURCE_NAMES[gate.source]}"
    low, high = gate.keep
    if gate.level == "min" and low is not None and high is None:
        return f"any token {name}{scope} {'<' if gate.inclusive[0] else '≤'} {short_number(low)}"
    if gate.level == "max" and high is not None and low is None:
        return f"any token {name}{scope} {'>' if gate.inclusive[1] else '≥'} {short_number(high)}"
    return ""


def _describe_interval(keep: Interval, inclusive: tuple[bool, bool], *, is_ratio: bool) -> str:
    low, high = keep
    if is_ratio and not low:  # ratios are never below 0
        low = None if high is not None else low
    if high is None:
        return f"{'≥' if inclusive[0] else '>'} {short_number(low or 0.0)}"
    if low is None:
        return f"{'≤' if inclusive[1] else '<'} {short_number(high)}"
    if is_ratio and low < 1 < high:
        if abs((1 - low) - (high - 1)) <= _EQUAL_DISTANCES * (high - 1):
            return f"within {100 * (high - 1):.3g}%"
        if abs(low * high - 1) <= _EQUAL_DISTANCES * (high - 1):
            factor = high <= _LARGEST_PERCENT_BOUND
            return f"within {100 * (high - 1):.3g}%" if factor else f"within {short_number(high)}x"
    if not is_ratio and low < 0 < high and abs(low + high) <= _EQUAL_DISTANCES * high:
        return f"within ±{short_number(high)}"
    return f"in {_format_bounds(keep)}"


def _format_bounds(interval: Interval) -> str:
    low, high = interval
    return f"[{short_number(low or 0.0)}, {'∞' if high is None else short_number(high)}]"
