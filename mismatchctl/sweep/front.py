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
from mismatchctl.sweep.study import Axis, Study

if TYPE_CHECKING:
    import polars as pl

_SAME_RULE = {"k1": {"mean": "geometric", "sum": "sequence", "token": "token"}}
"""Gates on k1 = minus the log ratio that are gates on the ratio: by statistic and level, the ratio's level."""


def not_beaten(costs: Float64s) -> Bools:
    """Which rows [P, objectives] no other row is at least as good as in all objectives and better in one; low is good.

    A row with an undefined cost is never among them.
    """
    found = np.zeros(len(costs), np.bool_)
    front = np.zeros((0, costs.shape[1]))
    for row in np.lexsort(costs.T[::-1]):
        own = costs[row]
        if np.isnan(own).any() or ((front <= own).all(axis=1) & (front < own).any(axis=1)).any():
            continue
        found[row] = True
        front = np.vstack([front, own])
    return found


def with_front(overall: pl.DataFrame, studies: Sequence[Study]) -> pl.DataFrame:
    """The overall rows with `pareto`: of each correction on each run, the points that no other beats.

    They are compared by the share of rejected tokens, the effective sample size of tokens, and the bias: how far the
    bound moves the mean weight where tokens are weighted, and the K3 left in what is kept where some are rejected.
    """
    import polars as pl

    weighted = {study.name for study in studies if study.correction.weight is not None}
    gated = {study.name for study in studies if study.correction.gates}
    moved = pl.when(pl.col("correction").is_in(weighted)).then(pl.col("weight_bias").abs()).otherwise(0.0)
    left = pl.when(pl.col("correction").is_in(gated)).then(pl.col("k3_kept")).otherwise(0.0)
    ranked = overall.select("rejected_tokens", -pl.col("ess_token"), moved.alias("moved"), left.alias("left"))
    costs = ranked.fill_null(math.nan).to_numpy().astype(np.float64)
    groups = overall.select(pl.struct("run", "correction").rank("dense")).to_series().to_numpy()
    flags = np.zeros(len(overall), np.bool_)
    for group in np.unique(groups):
        flags[groups == group] = not_beaten(costs[groups == group])
    return overall.with_columns(pl.Series("pareto", flags))


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


def _holds(axis: Axis, value: float) -> bool:
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
