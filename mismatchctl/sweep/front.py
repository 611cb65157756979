"""Pareto front of the points of a sweep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.correction import Correction
from mismatchctl.sweep.study import INTERVALS, Study

if TYPE_CHECKING:
    import polars as pl

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
    columns = []
    for path in study.paths:
        variants, places = study.variants(path)
        columns.append(np.array([_strictness(own, path) for own in variants])[places])
    points = np.arange(len(study.points))
    return [*map(int, points[np.lexsort(columns[::-1])] if columns else points)]


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
