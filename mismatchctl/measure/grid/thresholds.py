"""Evaluate corrections that only differ in bounds: add up tokens between neighboring bounds, then combine the sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.application import Weights, gate_bounds
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.measure.columns import GridAxis, list_columns

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class BlockParts:
    """Divides the sequences of a block into parts, which are micro-batches or clusters."""

    index: Ints  # part of each sequence [S]
    count: int  # number of parts, each with at least one sequence

    @classmethod
    def from_rows(cls, rows: Ints) -> tuple[BlockParts, Ints]:
        """Create one part for each table row in `rows` (a row per sequence). Also return the row of each part."""
        if (rows == rows[0]).all():
            return cls(np.zeros(len(rows), np.int64), 1), rows[:1]
        found, of = np.unique(rows, return_inverse=True)
        return cls(of, len(found)), found

    @cached_property
    def order(self) -> Ints:
        return np.argsort(self.index, kind="stable")

    @cached_property
    def firsts(self) -> Ints:
        return np.searchsorted(self.index[self.order], np.arange(self.count))

    @cached_property
    def by_size(self) -> list[tuple[Ints, Ints | slice]]:
        """Group parts with the same number of sequences. Return (part indices, sequence indices) per group."""
        sizes = np.diff(self.firsts, append=len(self.index))
        found = [(np.flatnonzero(sizes == size), np.arange(size)) for size in np.unique(sizes)]
        return [(own, as_slice(self.order[self.firsts[own, None] + places].ravel())) for own, places in found]

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = np.empty((self.count, *values.shape[1:]))
        for own, members in self.by_size:
            found[own] = values[members].reshape(len(own), -1, *values.shape[1:]).sum(axis=1)
        return found

    def largest(self, values: NDArray[Any]) -> NDArray[Any]:
        return np.maximum.reduceat(values[self.order], self.firsts, axis=0)


def as_slice(places: Ints) -> Ints | slice:
    """Replace adjacent indices by a slice, because numpy copies no data for a slice."""
    adjacent = len(places) > 0 and bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if adjacent else places


@dataclass(frozen=True)
class Term:
    """One summand of a column: another column `name`, summed over intervals of bins, times `factor`."""

    name: str
    runs: BinIntervals | None = None  # intervals of bins to sum over, None without bins
    axis: int = 1  # axis of the bins in the column
    factor: Float64s | None = None  # factor per variant of the weight rule [W, 1, ...], None for 1


@dataclass
class BlockColumns:
    """The columns of one block, for all corrections of a family at once."""

    parts: BlockParts  # the micro-batches of the block
    # 1 for a sequence that all gates on sequences keep, else 0 [S, 1, ..., variants]. None if all sequences are kept.
    flags: Float64s | None = None
    passing: Arrays = field(default_factory=dict)  # name -> column, for sequences with flag 1
    failing: Arrays = field(default_factory=dict)  # the same for sequences with flag 0, if not zero
    fixed: Arrays = field(default_factory=dict)  # name -> column that does not depend on the gates
    # name -> column that is already summed over each part [parts, ...], because it is not stored by cluster
    summed: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)  # maxima of each part [parts, weights, 1, ...]
    # per axis of the grid: the entry of the columns that each variant uses, or None if each has its own entry
    variants: Sequence[Ints | None] = ()
    # name -> terms, for columns that are sums of other columns
    terms: dict[str, list[Term]] = field(default_factory=dict)

    def expand(self, name: str, sums: Arrays) -> NDArray[Any]:
        """Return the column `name` at each point of the grid. `sums` contains this column, or its terms' columns."""
        if name not in self.terms:
            return self._at_points(sums[name])
        parts = []
        for term in self.terms[name]:
            values = sums[term.name] if term.runs is None else term.runs.sums(sums[term.name], axis=term.axis)
            values = self._at_points(values)
            parts.append(values if term.factor is None else values * term.factor)
        return np.asarray(sum(parts[1:], parts[0]))

    def _at_points(self, sums: NDArray[Any]) -> NDArray[Any]:
        for axis, of in enumerate(self.variants, 1):
            if of is not None and 1 < sums.shape[axis] < len(of):
                sums = sums.take(of, axis=axis)
        return sums

    def totals(self, known: Arrays, within: BlockParts) -> Arrays:
        """Sum each column per micro-batch. `known` has sums per cluster, `within` the micro-batch of each cluster."""
        rest = [name for name in (*self.passing, *self.fixed) if name not in known]
        return {name: within.sum(sums) for name, sums in known.items()} | self.sum_by(rest, self.parts) | self.summed

    def sum_by(self, names: Collection[str], parts: BlockParts) -> Arrays:
        names = [*dict.fromkeys(term.name for name in names for term in self.terms.get(name, [Term(name)]))]
        if self.flags is None:
            values = self.fixed | self.passing
            return {name: parts.sum(values[name]) for name in names}
        found = {name: parts.sum(self.fixed[name]) for name in names if name in self.fixed}
        found |= sum_products(self.flags, {name: self.passing[name] for name in names if name not in found}, parts)
        rest = sum_products(
            1.0 - self.flags, {name: self.failing[name] for name in found if name in self.failing}, parts
        )
        for name, sums in rest.items():
            found[name] += sums
        return found


def sum_products(flags: Float64s, columns: Arrays, parts: BlockParts) -> Arrays:
    """Multiply each column by `flags`, and sum over the sequences of each micro-batch or cluster (`parts`)."""
    alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, values in columns.items():
        alike.setdefault((values.shape[1:], bool(np.isfinite(values).all())), []).append(name)
    found: Arrays = {}
    for (shape, is_finite), names in alike.items():
        along = np.broadcast_shapes(flags.shape[1:], shape)
        tall = np.stack([columns[name].reshape(len(flags), -1) for name in names], axis=1).reshape(len(flags), -1)
        sums = _sum_product(flags.reshape(len(flags), -1), tall, parts, is_finite)
        found |= zip(names, sums.reshape(parts.count, len(names), *along).swapaxes(0, 1), strict=True)
    return found


def _sum_product(flags: Float64s, values: Float64s, parts: BlockParts, is_finite: bool) -> Float64s:
    sums = np.empty((parts.count, values.shape[1], flags.shape[1]))
    for own, members in parts.by_size:
        some, tall = (each[members].reshape(len(own), -1, each.shape[1]) for each in (flags, values))
        with np.errstate(invalid="ignore", over="ignore"):
            if is_finite:
                sums[own] = tall.swapaxes(1, 2) @ some
                continue
            for part, each, passes in zip(own, tall[..., None], some[:, :, None], strict=True):
                # A flag of 0 gives 0, also for an infinite K3 (0 * inf would be NaN).
                sums[part] = np.where(passes == 0, 0.0, each * passes).sum(axis=0)
    return sums


_SAMPLE_SIZE = 64
SMALL_WEIGHT = -3.0  # log of the weight below which w^2 loses digits if computed from sums of w - 1 and (w - 1)^2


@dataclass(frozen=True)
class BinIntervals:
    """Several intervals of adjacent bins. Interval i contains the bins starts[i] to stops[i] - 1."""

    starts: Ints
    stops: Ints

    @cached_property
    def _pivots(self) -> list[tuple[int, Ints]]:
        """Group intervals so that all intervals of a group share a bin edge, the pivot. Return [(pivot, intervals)]."""
        left = np.flatnonzero(self.starts < self.stops)
        found = []
        while len(left):
            pivot = int(self.stops[left].min())
            split = self.starts[left] <= pivot
            found.append((pivot, left[split]))
            left = left[~split]
        return found

    def sums(self, table: Float64s, axis: int = -1) -> Float64s:
        """Sum `table` along `axis` over each interval. Differences of cumulative sums would lose digits."""
        table = np.moveaxis(table, axis, -1)
        result = np.zeros((*table.shape[:-1], len(self.starts)))
        for pivot, runs in self._pivots:
            up, down = self.stops[runs] - pivot, pivot - self.starts[runs]
            sums: list[NDArray[Any]] = []
            if up.any():
                sums.append(_take_entries(_cumulative_sums(table[..., pivot : pivot + up.max()]), up))
            if down.any():
                sums.append(_take_entries(_cumulative_sums(table[..., pivot - down.max() : pivot][..., ::-1]), down))
            result[..., as_slice(runs)] = sum(sums)
        return np.moveaxis(result, -1, axis)


def _cumulative_sums(values: Float64s) -> Float64s:
    """Return cumulative sums along the last axis, starting with 0."""
    sums = np.empty((*values.shape[:-1], values.shape[-1] + 1))
    sums[..., 0] = 0.0
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def _take_entries(values: Float64s, places: Ints) -> Float64s:
    return values[..., places[:1]] if (places == places[0]).all() else values[..., as_slice(places)]


@dataclass(frozen=True)
class IntervalVariants:
    """Several intervals on one scale, such as the log ratios that a gate keeps with each of its thresholds."""

    edges: Float64s  # ascending. The bin of a value is the number of edges <= value.
    inside: BinIntervals  # the bins inside of the interval of each variant

    @classmethod
    def from_bounds(cls, lows: Float64s, highs: Float64s) -> IntervalVariants:
        """Build the intervals low <= value < high. In `lows`, -inf means no bound. In `highs`, NaN means no bound."""
        edges = np.unique(np.concatenate([lows[lows > -np.inf], highs[~np.isnan(highs)]]))
        starts = np.where(lows == -np.inf, 0, np.searchsorted(edges, lows) + 1)
        stops = np.where(np.isnan(highs), len(edges) + 1, np.searchsorted(edges, highs) + 1)
        return cls(edges, BinIntervals(starts, stops))

    @classmethod
    def from_gates(cls, gates: Iterable[Gate]) -> IntervalVariants:
        """Build the intervals of values that the gates keep, on the scale of the gates (such as the log ratio)."""
        bounds = [(*gate_bounds(gate), *gate.inclusive) for gate in gates]
        lows = [low if included else np.nextafter(low, np.inf) for low, _, included, _ in bounds]
        highs = [_exclusive_bound(high) if included else high for _, high, _, included in bounds]
        return cls.from_bounds(np.array(lows), np.array(highs))

    @property
    def bins(self) -> int:
        return len(self.edges) + 1

    @property
    def variants(self) -> int:
        return len(self.inside.starts)

    @cached_property
    def below(self) -> BinIntervals:
        return BinIntervals(np.zeros_like(self.inside.starts), self.inside.starts)

    @cached_property
    def above(self) -> BinIntervals:
        return BinIntervals(self.inside.stops, np.full_like(self.inside.stops, self.bins))

    def bin(self, values: Float64s) -> Ints:
        return np.searchsorted(self.edges, values, side="right")

    def narrow(self, bins: Ints) -> tuple[IntervalVariants, Ints | None, Ints]:
        """Keep only `bins`, and merge equal intervals. Also return new indices of intervals (or `None`) and bins."""
        some = np.zeros(self.bins, np.bool_)
        some[bins] = True
        before, filled = np.append(0, np.cumsum(some)), np.flatnonzero(some)
        starts, stops = before[self.inside.starts], before[self.inside.stops]
        _, firsts, of = np.unique(starts * len(before) + stops, return_index=True, return_inverse=True)
        kept = slice(None) if len(firsts) == self.variants else firsts
        narrowed = IntervalVariants(self.edges[filled[1:] - 1], BinIntervals(starts[kept], stops[kept]))
        return narrowed, of if narrowed.variants < self.variants else None, before[:-1]

    def sides(self, values: Float64s) -> tuple[Bools, Bools]:
        """Return two arrays of flags [values, intervals]: is the value below the interval, and is it above?"""
        bins = self.bin(values)[:, None]
        return bins < self.inside.starts, bins >= self.inside.stops


def _exclusive_bound(bound: float) -> float:
    """Convert an inclusive upper bound to exclusive: the next larger number. Infinity becomes NaN (no bound)."""
    return np.nan if bound == np.inf else float(np.nextafter(bound, np.inf))


class WeightBounds:
    """The bounds of several weight rules. Weights below their bounds become `low`, and weights above become `high`."""

    def __init__(self, rules: Sequence[Weight]) -> None:
        bounds = np.array([rule.bounds for rule in rules])
        watched = np.array([rule.watch_low or rule.bounds[0] for rule in rules])
        highs = np.array([_exclusive_bound(high) for high in bounds[:, 1]])
        none, unbounded = np.full(len(rules), np.nan), -np.inf  # no weight is below 0, so 0 is no lower bound
        self.thresholds = IntervalVariants.from_bounds(np.where(bounds[:, 0] > 0, bounds[:, 0], unbounded), highs)
        self.watched = IntervalVariants.from_bounds(np.where(watched > 0, watched, unbounded), none)
        self.zeroes = np.array([rule.zero is not None for rule in rules])
        self.low, self.high = np.where(self.zeroes, 0.0, bounds[:, 0]), np.where(self.zeroes, 0.0, bounds[:, 1])

    def maxima(self, weights: Weights, segments: Segments, parts: BlockParts) -> dict[str, Float64s]:
        """Return the largest weight and the negated smallest weight of each part, for raw and for bounded weights."""
        ratios = weights.ratios
        ends = -parts.largest(-ratios.min_log_ratio), parts.largest(ratios.max_log_ratio)
        low, high = (np.exp(np.clip(end, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))[:, None] for end in ends)
        least, most = np.clip(low, self.low, self.high), np.clip(high, self.low, self.high)
        if self.zeroes.any():
            within = self._within(weights, segments.spread(parts.index), parts.count)
            least, most = (np.where(self.zeroes, *both) for both in zip(within, (least, most), strict=True))
        return {"raw_weight": high, "-raw_weight": -low, "weight": most, "-weight": -least}

    def factor(self, low: int, high: int, origin: float = 0.0) -> Float64s:
        """Return (self.low - origin)^low * (self.high - origin)^high per weight rule. If it is not finite, return 0."""
        with np.errstate(over="ignore", invalid="ignore"):
            made: Float64s = (self.low - origin) ** low * (self.high - origin) ** high
        return np.where(np.isfinite(made), made, 0.0)

    def _within(self, weights: Weights, parts: Ints, count: int) -> tuple[Float64s, Float64s]:
        """Return the smallest and largest weight [parts, rules], after weights outside of the bounds are set to 0."""
        thresholds = self.thresholds
        places = parts * thresholds.bins + thresholds.bin(weights.raw_excess + 1.0)
        low, high = np.full((count, thresholds.bins), np.inf), np.full((count, thresholds.bins), -np.inf)
        np.minimum.at(low.reshape(-1), places, weights.log_ratio)
        np.maximum.at(high.reshape(-1), places, weights.log_ratio)
        least, most = np.empty((2, count, thresholds.variants))
        for number, (start, stop) in enumerate(zip(thresholds.inside.starts, thresholds.inside.stops, strict=True)):
            outside = np.isfinite(low[:, :start]).any(axis=1) | np.isfinite(low[:, stop:]).any(axis=1)
            lowest = low[:, start:stop].min(axis=1, initial=np.inf)
            highest = high[:, start:stop].max(axis=1, initial=-np.inf)
            ends = np.exp(np.clip((lowest, highest), -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
            some = np.isfinite(lowest)
            least[:, number] = np.where(outside | ~some, 0.0, ends[0])
            most[:, number] = np.where(some, ends[1], 0.0)
        return least, most


@dataclass(frozen=True)
class TokenBins:
    """The bin of each token. To save time, tokens in the most frequent bin (`common`) are not stored."""

    thresholds: IntervalVariants
    common: int  # the most frequent bin in a sample of the tokens
    found: Ints  # indices of the tokens in other bins [F]
    bins: Ints  # bins of these tokens [F]

    @classmethod
    def find(cls, values: Float64s, thresholds: IntervalVariants) -> TokenBins:
        sample = thresholds.bin(values[:: max(len(values) // _SAMPLE_SIZE, 1)])
        common = int(np.bincount(sample).argmax()) if len(sample) else 0
        low, high = np.concatenate([[-np.inf], thresholds.edges, [np.inf]])[common : common + 2]
        found = np.flatnonzero((values < low) | (values >= high))
        return cls(thresholds, common, found, thresholds.bin(values[found]))

    def narrow(self) -> tuple[TokenBins, Ints | None]:
        thresholds, of, number = self.thresholds.narrow(np.append(self.bins, self.common))
        return TokenBins(thresholds, int(number[self.common]), self.found, number[self.bins]), of


def sum_token_table(
    rules: Sequence[TokenBins], columns: Sequence[NDArray[Any] | None], segments: Segments
) -> list[Float64s]:
    """Sum each column (`None`: count tokens) per sequence and cell (one bin per rule): [S, bins of rule 1, ...]."""
    sizes = [rule.thresholds.bins for rule in rules]
    cells, count, common, found = int(np.prod(sizes)), len(segments), 0, rules[0].found
    if len(rules) > 1:
        away = np.zeros(segments.tokens, np.bool_)
        for rule in rules:
            away[rule.found] = True
        found = np.flatnonzero(away)
    unusual = np.diff(np.searchsorted(found, segments.offsets))
    place = np.repeat(np.arange(count), unusual)
    for rule in rules:
        bins = np.full(len(found), rule.common)
        bins[slice(None) if rule.found is found else np.searchsorted(found, rule.found)] = rule.bins
        place, common = place * rule.thresholds.bins + bins, common * rule.thresholds.bins + rule.common
    made = []
    for column in columns:
        rest, weights = column, None
        if column is not None:
            rest, weights = column.astype(np.float64), column[found]
            rest[found] = 0.0
        sums = np.bincount(place, weights, count * cells).astype(np.float64, copy=False).reshape(count, cells)
        sums[:, common] += segments.lengths - unusual if rest is None else segments.sum(rest)
        made.append(sums.reshape(count, *sizes))
    return made


_MOST_CELLS = 1 << 14
"""If a family has more cells (combinations of one bin per rule), its corrections are evaluated one by one."""


@dataclass(frozen=True)
class CorrectionGrid:
    """The corrections of a sweep. Each has one variant of the weight rule and one variant of each gate."""

    base: Correction  # one of the corrections. The others differ only in `weight` and `gates`.
    weights: tuple[Weight | None, ...]  # variants of the weight rule
    gates: tuple[tuple[Gate, ...], ...]  # variants of each gate
    places: Ints  # index of the weight's variant and of each gate's variant at each point [1 + gates, P]

    def correction(self, point: int) -> Correction:
        weight, *gates = self.places[:, point].tolist()
        own = tuple(variants[gate] for variants, gate in zip(self.gates, gates, strict=True))
        return self.base.model_copy(update={"weight": self.weights[weight], "gates": own})


SHARED_COLUMNS = ("tokens", "sequences")  # columns in every table, with the same values for all corrections
EMPTY_COLUMN = "empty_sequences"
"""Column with the number of sequences without tokens, only in `FamilySums.totals`."""
CLUSTER_COLUMNS = (
    "kept", "touched", "weight_excess", "kept_excess", "squared_kept_weight", "sequence_weight",
    "squared_sequence_weight",
)  # fmt: skip
"""Columns with sums per cluster, for standard errors and for the number of prompts without kept tokens."""


class GridLayout:
    """Stores several arrays in the columns of one table: each array is flattened and gets adjacent columns."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        ends = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())]).tolist()
        self.width: int = ends[-1]
        self._places = {name: slice(*place) for name, place in zip(shapes, pairwise(ends), strict=True)}

    def arrays(self, table: Float64s) -> Arrays:
        return {name: table[:, self._places[name]].reshape(len(table), *shape) for name, shape in self.shapes.items()}


class GridLayouts(NamedTuple):
    """The columns of a family's three tables: sums, maxima, and sums per cluster."""

    totals: GridLayout
    maxima: GridLayout
    rows: GridLayout


@dataclass(frozen=True)
class CorrectionFamily:
    """Corrections with the same rules and different bounds. Their grid has one axis per rule: the rule's variants."""

    weights: tuple[Weight | None, ...]  # variants of the weight rule. A single None if every weight is 1.
    gates: tuple[tuple[Gate, ...], ...]  # variants of each gate, in the order of `correction.gates`
    order: tuple[int, ...]  # gate indices in the order of the axes: gates on tokens first
    points: Ints  # indices of its points in the CorrectionGrid
    places: Ints  # indices of these points in the flattened grid of the family
    correction: Correction  # the correction at the first point

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the shape of the grid: the number of variants of the weight rule, then of each gate in `order`."""
        return (len(self.weights), *(len(self.gates[gate]) for gate in self.order))

    def shape(self, along: GridAxis) -> tuple[int, ...]:
        """Return a column's shape if it varies along `along`: "weights" gives (W, 1, 1) for 2 gates and W weights."""
        gates = range(1, len(self.grid))
        axes: dict[GridAxis, Iterable[int]] = {"none": (), "weights": (0,), "kept": gates, "all": (0, *gates)}
        axes |= {gate: (axis,) for axis, gate in enumerate(self.order, 1)}
        if self.veto is not None:
            axes["veto"] = (self.veto + 1,)
        return tuple(size if axis in axes[along] else 1 for axis, size in enumerate(self.grid))

    @cached_property
    def is_binned(self) -> bool:
        return _can_be_binned(self.correction)

    @cached_property
    def token_gates(self) -> int:
        return sum(self.correction.gates[gate].level == "token" for gate in self.order)

    @cached_property
    def thresholds(self) -> tuple[IntervalVariants, ...]:
        return tuple(IntervalVariants.from_gates(self.gates[gate]) for gate in self.order)

    @cached_property
    def bounds(self) -> WeightBounds:
        return WeightBounds([weight for weight in self.weights if weight is not None])

    @cached_property
    def cells(self) -> int:
        """Return the number of cells that tokens are sorted into: the product of the bin counts of all token rules."""
        weight, rules = self.correction.weight, list(self.thresholds[: self.token_gates])
        if weight is not None and weight.level == "token":
            rules.append(self.bounds.thresholds)
        return math.prod(thresholds.bins for thresholds in rules)

    @property
    def width(self) -> int:
        """Return the maximum number of values that a column has per sequence, which determines the memory."""
        return max(math.prod(self.grid), self.cells if self.is_binned else 1)

    @cached_property
    def layouts(self) -> GridLayouts:
        shapes = {"sum": dict.fromkeys((*SHARED_COLUMNS, EMPTY_COLUMN), (1,) * len(self.grid))}
        for column in list_columns(self.correction, losses=False):
            shapes.setdefault(column.merge, {})[column.name] = self.shape(column.depends_on)
        rows = {name: shapes["sum"][name] for name in (*SHARED_COLUMNS, *CLUSTER_COLUMNS)}
        return GridLayouts(GridLayout(shapes["sum"]), GridLayout(shapes["largest"]), GridLayout(rows))

    @cached_property
    def veto(self) -> int | None:
        """Return the position of the first veto in `order`, if the correction has a veto."""
        first = next((number for number, gate in enumerate(self.correction.gates) if gate.is_veto), None)
        return None if first is None else self.order.index(first)


def group_families(grid: CorrectionGrid) -> tuple[CorrectionFamily, ...]:
    kinds = [_number([_weight_kind(weight) for weight in grid.weights])]
    for variants in grid.gates:
        rules = ((gate.model_dump(exclude={"keep", "inclusive"}), gate.is_veto) for gate in variants)
        kinds.append(_number([(*fields.values(), is_veto) for fields, is_veto in rules]))
    of_point = np.stack([kind[places] for kind, places in zip(kinds, grid.places, strict=True)])
    _, firsts, inverse = np.unique(of_point, axis=1, return_index=True, return_inverse=True)
    alike: list[Ints] = []
    for number, first in enumerate(firsts.tolist()):
        points = np.flatnonzero(inverse.reshape(-1) == number)
        alike += [points] if _can_be_binned(grid.correction(first)) else np.split(points, len(points))
    families: list[CorrectionFamily] = []
    for points in sorted(alike, key=lambda points: int(points[0])):
        family = _build_family(grid, points)
        too_large = family.is_binned and family.cells > _MOST_CELLS
        families += [_build_family(grid, point) for point in np.split(points, len(points))] if too_large else [family]
    return tuple(families)


def _number(keys: Sequence[Hashable]) -> Ints:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _build_family(grid: CorrectionGrid, points: Ints) -> CorrectionFamily:
    first = grid.correction(int(points[0]))
    order = sorted(range(len(first.gates)), key=lambda gate: (first.gates[gate].level != "token", gate))
    found = [np.unique(places, return_inverse=True) for places in grid.places[:, points]]
    (of_weight, weight_places), *of_gates = found
    weights = tuple(grid.weights[variant] for variant in of_weight.tolist())
    gates = tuple(
        tuple(variants[variant] for variant in numbers.tolist())
        for variants, (numbers, _) in zip(grid.gates, of_gates, strict=True)
    )
    shape = (len(weights), *(len(gates[gate]) for gate in order))
    flat = np.ravel_multi_index((weight_places, *(of_gates[gate][1] for gate in order)), shape)
    return CorrectionFamily(weights, gates, tuple(order), points, flat, first)


def _weight_kind(weight: Weight | None) -> Hashable:
    if weight is None:
        return None
    normalization = weight.normalize, weight.normalize_over, weight.normalize_empty
    return weight.level, weight.source, normalization, weight.is_usual


def _can_be_binned(correction: Correction) -> bool:
    """Return True if sums over bins of values suffice for all corrections of a family. Gates must be independent."""
    effects = {gate.effect for gate in correction.gates}
    if correction.weight is not None and not correction.weight.is_usual:
        return False
    return len(effects) < 2 and all(
        gate.is_usual and (gate.sees == "original" or not number) for number, gate in enumerate(correction.gates)
    )
