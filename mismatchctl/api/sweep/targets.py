"""Solve for the threshold that gives a target rejection or effective sample size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.api.sweep.result import MET_EVERYWHERE, SolvedThreshold
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.core.batch import Float64s, TokenBatch
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.core.ratios import LOG_RATIO_BOUND, Ratios
from mismatchctl.corrections.application import Selection, Weights, measure_gate
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.measure.cluster_table import (
    OVERALL_CAP,
    ClusterTable,
    cluster_hashes,
    merge_parts,
    mix_hashes,
    step_hashes,
)
from mismatchctl.measure.reduction import split_runs

TargetValue = tuple[str, float]
"""The key of a target's metric, and the target value."""
TARGET_REJECTIONS = {"tokens": "rejected_tokens", "sequences": "rejected_sequences"}
ESS_METRIC = "ess_token"

_DISTANCE_GRID = np.geomspace(1e-7, LOG_RATIO_BOUND, 400)  # log distances of thresholds from ratio 1


@dataclass(frozen=True)
class ThresholdRule:
    """A rejection rule or weight rule with one threshold."""

    words: str  # description for tables
    correction: Correction  # the correction with any threshold
    path: str  # path of the threshold
    threshold: Callable[[float], float]  # converts the compared distance (log scale, at least 0) to the threshold

    def distances(self, batch: TokenBatch, ratios: Ratios, key: str) -> tuple[Float64s, Float64s]:
        """Return the values that are compared with the threshold, and the weight of each (its tokens, or 1)."""
        everything = Selection.everything(batch.segments)
        if self.correction.weight is not None:
            weights = Weights(self.correction.weight, ratios, impossible=batch.impossible)
            return weights.log_ratio, np.ones(batch.tokens)
        gate = self.correction.gates[0]
        measured = measure_gate(gate, ratios, everything, batch)
        distance = -measured if gate.level == "min" else np.abs(measured)
        lengths = batch.segments.lengths.astype(np.float64)
        if gate.level == "token":
            if key == "rejected_tokens":
                return distance, np.ones(batch.tokens)
            distance = batch.segments.max(distance)
        some = batch.segments.nonempty
        return distance[some], (lengths if key == "rejected_tokens" else np.ones(len(batch)))[some]


def _symmetric_rule(level: str, words: str) -> ThresholdRule:
    gate = Gate.model_validate({"level": level, "keep": (0.5, 2.0)})
    return ThresholdRule(words, Correction(name=level, gates=(gate,)), "gates.0.keep", _upper_threshold)


def _upper_threshold(distance: float) -> float:
    """Return the smallest x for which the interval [1/x, x] contains exp(distance) and exp(-distance)."""
    x = math.exp(distance)
    while math.log(x) < distance or math.log(1 / x) > -distance:
        x = math.nextafter(x, math.inf)
    return x


def _lower_threshold(distance: float) -> float:
    """Return the largest x that is at most exp(-distance)."""
    x = math.exp(-distance)
    while math.log(x) > -distance:
        x = math.nextafter(x, 0.0)
    return x


REJECTION_RULES = (
    _symmetric_rule("token", "token ratio within [1/x, x]"),
    _symmetric_rule("sequence", "sequence ratio within [1/x, x]"),
    _symmetric_rule("geometric", "geometric ratio within [1/x, x]"),
    ThresholdRule(
        "veto: no token ratio below x",
        Correction(name="veto", gates=(Gate(level="min", keep=(1e-4, None)),)),
        "gates.0.keep.0",
        _lower_threshold,
    ),
)
WEIGHT_RULES = (
    ThresholdRule(
        "token weights truncated at x",
        Correction(name="token", weight=Weight(truncate=2.0)),
        "weight.truncate",
        math.exp,
    ),
)


def rules_for_metric(key: str) -> tuple[ThresholdRule, ...]:
    return WEIGHT_RULES if key == ESS_METRIC else REJECTION_RULES


def list_searches(wishes: Iterable[TargetValue]) -> tuple[tuple[str, ThresholdRule], ...]:
    return tuple((key, rule) for key in dict.fromkeys(key for key, _ in wishes) for rule in rules_for_metric(key))


GridTables = dict[str, list[ClusterTable]]
"""Tables by run and search. A row has a cluster's mass per bin of distances, or sums of 1, w and w^2 of weights w."""
_BINS = len(_DISTANCE_GRID) + 1


def sum_grid(batch: TokenBatch, run: str, searches: Sequence[tuple[str, ThresholdRule]], by_prompt: bool) -> GridTables:
    """Sum a batch over bins of the compared value."""
    found = {}
    for name, part in split_runs(batch, run) if searches else ():
        part = part.take(np.flatnonzero(part.segments.nonempty))
        clusters = cluster_hashes(part)
        clusters = clusters if by_prompt else mix_hashes(clusters, step_hashes(part))
        folded = len(np.unique(clusters)) > OVERALL_CAP
        hashes, rows = np.unique(clusters % np.uint64(OVERALL_CAP) if folded else clusters, return_inverse=True)
        tables = [np.zeros((3 if key == ESS_METRIC else 1, len(hashes) * _BINS)) for key, _ in searches]
        for start, block in part.blocks(1 << 18):
            ratios, of = Ratios(block.train, block.rollout, block.segments), rows[start : start + len(block)]
            for table, (key, rule) in zip(tables, searches, strict=True):
                distances, mass = rule.distances(block, ratios, key)
                row = of if len(distances) == len(of) else block.segments.spread(of)
                where = row * _BINS + np.searchsorted(_DISTANCE_GRID, distances)
                weights = np.exp(np.clip(distances, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
                for total, values in zip(table, (mass, weights, weights * weights), strict=False):
                    total += np.bincount(where, values, len(total))
        sums = [
            table.reshape(len(table), len(hashes), _BINS).swapaxes(0, 1).reshape(len(hashes), len(table) * _BINS)
            for table in tables
        ]
        none = np.zeros_like(hashes), np.zeros((len(hashes), 0))
        found[name] = [ClusterTable(hashes, none[0], each, none[1], folded) for each in sums]
    return found


def add_grids(some: GridTables, more: GridTables) -> GridTables:
    return merge_parts(some, more, lambda a, b: [(x + y).fold(OVERALL_CAP) for x, y in zip(a, b, strict=True)])


def _evaluate_grid(key: str, sums: Float64s) -> tuple[Float64s, Float64s]:
    """Return a metric at each grid value, and its standard error over clusters (delta method)."""
    mass = sums[:, :_BINS]
    total, beyond = mass.sum(axis=1, keepdims=True), mass[:, ::-1].cumsum(axis=1)[:, -2::-1]
    with np.errstate(all="ignore"):
        if key == ESS_METRIC:
            bound = np.exp(_DISTANCE_GRID)
            first, second = (
                moment.cumsum(axis=1)[:, :-1] + beyond * bound**power
                for power, moment in enumerate((sums[:, _BINS : 2 * _BINS], sums[:, 2 * _BINS :]), 1)
            )
            whole = [each.sum(axis=0) for each in (total, first, second)]
            values = whole[1] ** 2 / (whole[0] * whole[2])
            influence = values * (2 * first / whole[1] - total / whole[0] - second / whole[2])
        else:
            values = beyond.sum(axis=0) / total.sum()
            influence = (beyond - values * total) / total.sum()
        clusters = len(sums)
        factor = clusters / (clusters - 1) if clusters > 1 else np.nan
        return values, np.sqrt((influence**2).sum(axis=0) * factor)


BracketValues = list[tuple[int, Float64s, Float64s]]
"""Distances and masses between the two grid points of a bracket, by the index of the bracket."""


@dataclass(frozen=True)
class TargetBracket:
    """A target for one rule on one run, and the two grid points around its solution."""

    run: str
    key: str
    wanted: float
    rule: ThresholdRule
    place: int  # the target is met at exactly one of the grid points `place` - 1 and `place`
    bins: Float64s  # mass in each bin of distances [1, BINS], for the ESS also the sums of w and w^2 [3, BINS]
    reached: float  # value at the grid point that meets the target
    # distances within the error of the target. An end is None beyond the grid. None for a single cluster.
    interval: tuple[float | None, float | None] | None

    def select(self, distances: Float64s, mass: Float64s) -> tuple[Float64s, Float64s]:
        within = (distances > _DISTANCE_GRID[self.place - 1]) & (distances <= _DISTANCE_GRID[self.place])
        return distances[within], mass[within]

    def solve(self, distances: Float64s, mass: Float64s) -> SolvedThreshold:
        order = np.argsort(distances, kind="stable")
        distances, mass = distances[order], mass[order]
        total, above = self.bins[0].sum(), self.bins[0, self.place + 1 :].sum()
        if self.key == ESS_METRIC:  # the largest weight with sufficient ESS
            weights = np.exp(distances)
            below = self.bins[:, : self.place].sum(axis=1)
            beyond = total - below[0] - np.arange(1, len(weights) + 1)
            first = below[1] + np.cumsum(weights) + beyond * weights
            reached = first**2 / (total * (below[2] + np.cumsum(weights**2) + beyond * weights**2))
            met = np.flatnonzero(reached >= self.wanted)[::-1]
        else:  # the smallest distance with sufficiently little rejected mass. Equal distances stay together
            beyond = above + np.append(np.cumsum(mass[::-1])[::-1][1:], 0.0)[: len(mass)]
            reached = beyond / total
            met = np.flatnonzero((reached <= self.wanted) & np.append(np.diff(distances) > 0, True)[: len(mass)])
        if len(met):
            return self._at(float(distances[met[0]]), float(reached[met[0]]))
        return self._at(_DISTANCE_GRID[self.place - (self.key == ESS_METRIC)], self.reached)

    def _at(self, distance: float, reached: float) -> SolvedThreshold:
        threshold, interval = self.rule.threshold(distance), None
        if self.interval is not None:
            low, high = (None if end is None else self.rule.threshold(end) for end in self.interval)
            interval = (low, high) if self.rule.threshold(1.0) > 1 else (high, low)
        study = Study(self.rule.correction, (ThresholdAxis(self.rule.path, (threshold,)),))
        return SolvedThreshold(
            run=self.run, wish=self.key, wanted=self.wanted, rule=self.rule.words,
            correction=study.correction_at(0).to_mapping(), threshold=threshold, interval=interval, reached=reached,
        )  # fmt: skip


def find_brackets(
    grids: GridTables, runs: Iterable[str], wishes: Sequence[TargetValue]
) -> tuple[list[TargetBracket], list[SolvedThreshold]]:
    """Find the grid points around the solution of each target, and the targets that cannot be met."""
    found, missed, searches, unknown = [], [], list_searches(wishes), np.full(1, np.nan)
    for run in runs:
        measured = {
            (key, rule.words): (*_evaluate_grid(key, table.sums), table.sums.sum(axis=0).reshape(-1, _BINS))
            for (key, rule), table in zip(searches, grids.get(run, ()), strict=False)
        }
        for key, wanted in wishes:
            for rule in rules_for_metric(key):
                values, errors, bins = measured.get((key, rule.words), (unknown, unknown, unknown))
                met = values >= wanted if key == ESS_METRIC else values <= wanted
                if not met.any() or met.all():
                    shown = (
                        "undefined" if np.isnan(values).all() else f"{np.nanmin(values):.3g} to {np.nanmax(values):.3g}"
                    )
                    status = f"{MET_EVERYWHERE if met.all() else 'met at no threshold'}: {shown}"
                    missed.append(SolvedThreshold(run=run, wish=key, wanted=wanted, rule=rule.words, status=status))
                    continue
                first = int(np.flatnonzero(~met)[0]) if key == ESS_METRIC else int(np.flatnonzero(met)[0])
                inside = np.abs(values - wanted) <= INTERVAL_Z * np.nan_to_num(errors)
                ends = None if np.isnan(errors[first - 1 : first + 1]).any() else _bracket_ends(inside, first)
                reached = float(values[first - 1 if key == ESS_METRIC else first])
                found.append(TargetBracket(run, key, wanted, rule, first, bins, reached, ends))
    return found, missed


def _bracket_ends(inside: np.ndarray, first: int) -> tuple[float | None, float | None]:
    """Return the first and last grid point within the error of the target. An end outside the grid is `None`."""
    places = np.flatnonzero(inside)
    low, high = (min(int(places[0]), first - 1), max(int(places[-1]), first)) if len(places) else (first - 1, first)
    return (None if low == 0 else float(_DISTANCE_GRID[low])), (
        None if high == len(_DISTANCE_GRID) - 1 else float(_DISTANCE_GRID[high])
    )


@dataclass(frozen=True)
class TargetSearch:
    """The second pass over the dump, which refines the solutions."""

    brackets: tuple[TargetBracket, ...]

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> BracketValues:
        found: BracketValues = []
        for batch in batches:
            for name, part in split_runs(batch, run):
                for _, block in part.blocks():
                    ratios = Ratios(block.train, block.rollout, block.segments)
                    for number, one in enumerate(self.brackets):
                        if one.run == name:
                            found.append((number, *one.select(*one.rule.distances(block, ratios, one.key))))
        return found

    def solve(self, found: BracketValues) -> list[SolvedThreshold]:
        none = np.zeros(0)
        values = [
            [np.concatenate([none, *(part[which] for part in found if part[0] == number)]) for which in (1, 2)]
            for number in range(len(self.brackets))
        ]
        return [one.solve(*own) for one, own in zip(self.brackets, values, strict=True)]
