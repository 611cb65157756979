"""What is read off the rows of a sweep: the Pareto front, and the presets that stand on an axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.correction import Correction, Gate
from mismatchctl.correction.presets import Preset
from mismatchctl.sweep.model import Mark
from mismatchctl.sweep.study import INTERVALS, Study, ThresholdAxis

if TYPE_CHECKING:
    import polars as pl

_SAME_RULE = {"k1": {"mean": "geometric", "sum": "sequence", "token": "token"}}
"""Gates on k1 = minus the log ratio that are gates on the ratio: by statistic and level, the ratio's level."""
_BITS = 33  # ten significant digits


def not_beaten(costs: Float64s) -> Bools:
    """Which rows [P, objectives] no other is at least as good as in all objectives; of equals the first. Low is good.

    A row with an undefined cost is never among them.
    """
    found = np.zeros(len(costs), np.bool_)
    front, size = np.zeros(costs.T.shape), 0  # an objective is in one piece: that is what makes it fast
    for row in np.lexsort(costs.T[::-1]):
        own = costs[row]
        if np.isnan(own).any() or (front[:, :size] <= own[:, None]).all(axis=0).any():
            continue
        found[row] = True
        front[:, size], size = own, size + 1
    return found


def with_front(overall: pl.DataFrame, studies: Sequence[Study]) -> pl.DataFrame:
    """The overall rows with `pareto`: of each correction on each run, the points that no other beats.

    They are compared by the share of rejected tokens, the effective sample size of tokens, and the bias: how far the
    bound moves the mean weight where tokens are weighted, and the K3 left in what is kept where some are rejected;
    all to about ten digits, beyond which they depend on the order of summation. Of points that cost the same (a bound
    that cuts nothing more), the one with the loosest bounds is flagged, the first axis before the next; of those that
    differ in other fields the first.
    """
    import polars as pl

    weighted = [study.name for study in studies if study.correction.weight is not None]
    gated = [study.name for study in studies if study.correction.gates]
    is_weighted, is_gated = (overall["correction"].is_in(names).to_numpy() for names in (weighted, gated))
    rejected, ess, left, mean, bias = (
        overall[key].cast(pl.Float64).fill_null(math.nan).to_numpy()
        for key in ("rejected_tokens", "ess_token", "k3_kept", "weight_mean", "weight_bias")
    )
    with np.errstate(invalid="ignore"):  # of weights that overflow the bias is undefined
        moved = np.abs(rounded(mean) - rounded(mean - bias))  # each to its own digits: what is left of them may be none
    costs = np.column_stack(
        [rounded(rejected), -rounded(ess), np.where(is_weighted, moved, 0.0), np.where(is_gated, rounded(left), 0.0)]
    )
    places = {study.name: np.argsort(loosest_first(study)) for study in studies}
    place = np.array([places[name][point] for name, point in overall.select("correction", "point").iter_rows()])
    groups = overall.select(pl.struct("run", "correction").rank("dense")).to_series().to_numpy()
    flags = np.zeros(len(overall), np.bool_)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(place[rows])]
        flags[rows] = not_beaten(costs[rows])
    return overall.with_columns(pl.Series("pareto", flags))


def by_cost(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by the share of rejected tokens, then by the effective sample size of tokens, the cheapest first."""
    costs = [rounded(np.array([row[key] for row in rows], np.float64)) for key in ("ess_token", "rejected_tokens")]
    return [rows[row] for row in np.lexsort((-costs[0], costs[1]))]


def rounded(values: Float64s) -> Float64s:
    """Values to about ten significant digits: in the others, sums differ with the order of their terms."""
    mantissa, exponent = np.frexp(values)
    kept: Float64s = np.ldexp(np.round(np.ldexp(mantissa, _BITS)), exponent - _BITS)
    return kept


def loosest_first(study: Study) -> list[int]:
    """The points of a study by the bounds on its axes, the first axis before the next; otherwise in their order."""
    strictness = [[_strictness(own, axis.path) for axis in study.axes] for own in study.corrections]
    return sorted(range(len(strictness)), key=strictness.__getitem__)


def _strictness(correction: Correction, path: str) -> float:
    """How much the bounds at a path cut, in order: an upper one the more the lower it is; 0 of what is no bound."""
    parts = path.split(".")
    is_entry = len(parts) > 1 and parts[-2] in INTERVALS
    if not is_entry and parts[-1] not in (*INTERVALS, "truncate"):
        return 0.0
    found: Any = correction
    for part in parts:
        found = found[int(part)] if isinstance(found, tuple) else getattr(found, part, None)
    if isinstance(found, tuple):
        low, high = found
        return -math.inf if low is None or high is None else low - high
    if found is None:
        return -math.inf
    return float(found) if is_entry and parts[-1] == "0" else -float(found)


def marks(studies: Sequence[Study], presets: Mapping[str, Preset]) -> tuple[Mark, ...]:
    """Which presets have the rule that an axis varies, and where on it they stand."""
    found = []
    for study in studies:
        for axis in study.axes:
            names: dict[float, list[str]] = {}
            for preset in presets.values():
                for value in values_at(preset.correction, study.correction, axis.path) if axis.is_numeric else ():
                    names.setdefault(float(f"{value:.6g}"), []).append(preset.name)
            inside = {value: who for value, who in sorted(names.items()) if _holds(axis, value)}
            found += [Mark(study.name, axis.path, value, tuple(who)) for value, who in inside.items()]
    return tuple(found)


def _holds(axis: ThresholdAxis, value: float) -> bool:
    numbers = [float(item) for item in axis.values if isinstance(item, float)]
    return min(numbers) <= value <= max(numbers)


def values_at(preset: Correction, base: Correction, path: str) -> list[float]:
    """The values of a preset at a path, where it has a rule of the same kind."""
    rule, *rest = path.split(".")
    if rule == "weight":
        if preset.weight is None or base.weight is None:
            return []
        alike = all(getattr(preset.weight, name) == getattr(base.weight, name) for name in ("level", "source"))
        return _at(getattr(preset.weight, rest[0], None), rest[1:], signed=False) if alike else []
    if rule != "gates" or rest[1:2] != ["keep"]:
        return []
    own = _as_ratio(base.gates[int(rest[0])])
    gates = [gate for gate in map(_as_ratio, preset.gates) if _kind(gate) == _kind(own)]
    return [value for gate in gates for value in _at(gate.keep, rest[2:], signed=gate.statistic != "ratio")]


def _at(found: Any, rest: Sequence[str], *, signed: bool) -> list[float]:
    """A bound as one number: an entry of an interval, or the upper one of an interval that is the same both ways."""
    if isinstance(found, tuple):
        low, high = found
        if rest:
            found = found[int(rest[0])]
        elif low is None or high is None:
            return []
        else:
            mirrored = -low if signed else 1 / low if low else math.inf
            found = high if math.isclose(mirrored, high, rel_tol=1e-4) else None
    return [float(found)] if isinstance(found, (int, float)) else []


def _kind(gate: Gate) -> tuple[str, ...]:
    return gate.statistic, gate.level, gate.over, gate.source


def _as_ratio(gate: Gate) -> Gate:
    """A gate on k1 as the gate on the ratio that it is."""
    level = _SAME_RULE.get(gate.statistic, {}).get(gate.level)
    if level is None:
        return gate
    low, high = (None if bound is None else math.exp(-bound) for bound in reversed(gate.keep))
    return gate.model_copy(update={"statistic": "ratio", "level": level, "keep": (low, high)})
