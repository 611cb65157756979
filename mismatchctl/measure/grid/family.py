"""Families of corrections that differ only in their bounds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.corrections.model import SEQUENCE_LOSSES, Correction, Gate, Weight, parse_loss
from mismatchctl.measure.columns import CorrectionFacts, GridAxis, SumColumn, list_columns
from mismatchctl.measure.grid.thresholds import IntervalVariants, WeightBounds
from mismatchctl.measure.kernels.kernel import NestedItems

MIN_NESTED_GATES = 8
"""Variants of a gate from which they are a ladder."""
_AGGREGATED_COLUMNS = ("loss_mean", "loss_sequences")
_MOST_CELLS = 1 << 14
"""Bins of a token table, over all its rules, beyond which points are applied one by one."""


@dataclass(frozen=True)
class NestedGates:
    """The variants of a gate in an order in which each keeps all that the one before it keeps.

    Attributes:
        gate: the gate.
        places: the rung of each variant [V].
        rungs: where values enter.
    """

    gate: int
    places: Ints
    rungs: NestedItems

    @classmethod
    def of(cls, gate: int, thresholds: IntervalVariants) -> NestedGates | None:
        """None where the variants have no such order."""
        starts, stops = thresholds.inside.starts, thresholds.inside.stops
        order = np.lexsort((stops, -starts))
        starts, stops, bins = starts[order], stops[order], np.arange(thresholds.bins)
        if np.any(np.diff(stops) < 0):
            return None
        low, high = np.searchsorted(-starts, -bins), np.searchsorted(stops, bins, side="right")
        return cls(gate, np.argsort(order), NestedItems(thresholds.edges, low, high, len(order)))


@dataclass(frozen=True)
class NestedWeights:
    """Upper bounds of token weights in ascending order, so that each leaves all as it is that the one before it does.

    Attributes:
        places: the rung of each variant [V].
        edges: of each rung, where the weights begin that it does not leave as they are [V].
        high: what it makes of those [V].
        low: the lower bound of all; 0 where there is none.
        zeroes: whether weights outside the bounds become 0.
    """

    places: Ints
    edges: Float64s
    high: Float64s
    low: float
    zeroes: bool

    @classmethod
    def of(cls, bounds: WeightBounds, low: float) -> NestedWeights | None:
        """None where the variants differ in more than their upper bounds."""
        inside = bounds.thresholds.inside
        if any(len(np.unique(each)) > 1 for each in (inside.starts, bounds.watched.stops, bounds.low, bounds.zeroes)):
            return None
        order = np.argsort(inside.stops, kind="stable")
        edges = np.append(bounds.thresholds.edges, np.inf)[inside.stops[order] - 1]
        return cls(np.argsort(order), edges, bounds.high[order], low, bool(bounds.zeroes[0]))


@dataclass(frozen=True)
class CorrectionGrid:
    """Corrections that combine variants of their rules: each point has one variant of every rule.

    Attributes:
        base: a correction. The others differ from it in their rules only.
        weights: variants of the weight rule.
        losses: variants of the loss.
        gates: variants of each gate.
        places: the variants at each point: of the weight, of the loss, and of each gate [2 + gates, P].
    """

    base: Correction
    weights: tuple[Weight | None, ...]
    losses: tuple[str, ...]
    gates: tuple[tuple[Gate, ...], ...]
    places: Ints

    def correction(self, point: int) -> Correction:
        """The correction at a point."""
        weight, loss, *gates = self.places[:, point].tolist()
        own = tuple(variants[gate] for variants, gate in zip(self.gates, gates, strict=True))
        return self.base.model_copy(update={"weight": self.weights[weight], "loss": self.losses[loss], "gates": own})


@dataclass(frozen=True)
class CorrectionFamily:
    """Corrections alike in all but bounds: every weight rule with every variant of every gate.

    Attributes:
        weights: variants of the weight rule; a single None where every weight is 1.
        gates: the variants of each gate, in order.
        order: the numbers of the gates as the axes of the grid have them: those on tokens first.
        points: which points of the study these are.
        places: where each of them stands in the flattened grid.
        correction: the first of them.
    """

    weights: tuple[Weight | None, ...]
    gates: tuple[tuple[Gate, ...], ...]
    order: tuple[int, ...]
    points: Ints
    places: Ints
    correction: Correction

    @property
    def grid(self) -> tuple[int, ...]:
        """Variants of the weight, then of each gate in `order`."""
        return (len(self.weights), *(len(self.gates[gate]) for gate in self.order))

    def columns(self, *, losses: bool) -> tuple[SumColumn[CorrectionFacts], ...]:
        """Its columns; those of other aggregations of a loss are no column of a sweep."""
        return tuple(
            column for column in list_columns(self.correction, losses=losses) if column.name not in _AGGREGATED_COLUMNS
        )

    def shape(self, along: GridAxis) -> tuple[int, ...]:
        """The grid, with length 1 along axes that a column does not depend on."""
        gates = range(1, len(self.grid))
        axes: dict[GridAxis, Iterable[int]] = {"none": (), "weights": (0,), "kept": gates, "all": (0, *gates)}
        axes |= {gate: (axis,) for axis, gate in enumerate(self.order, 1)}
        if self.veto is not None:
            axes["veto"] = (self.veto + 1,)
        return tuple(size if axis in axes[along] else 1 for axis, size in enumerate(self.grid))

    @property
    def longest(self) -> int:
        """The axis of its grid with the most variants."""
        return int(np.argmax(self.grid))

    @cached_property
    def is_binned(self) -> bool:
        """Whether bins answer for it; otherwise its only point is applied as it is."""
        return _can_be_binned(self.correction)

    @cached_property
    def token_gates(self) -> int:
        """How many gates look at single tokens; they come first in `order`."""
        return sum(self.correction.gates[gate].level == "token" for gate in self.order)

    @cached_property
    def thresholds(self) -> tuple[IntervalVariants, ...]:
        """Those of each gate, in `order`."""
        return tuple(IntervalVariants.of_gates(self.gates[gate]) for gate in self.order)

    @cached_property
    def bounds(self) -> WeightBounds:
        """Those of the weights."""
        return WeightBounds([weight for weight in self.weights if weight is not None])

    @cached_property
    def cells(self) -> int:
        """Cells that the tokens of a sequence are counted in: bins of all rules on tokens, one within the other."""
        weight, rules = self.correction.weight, list(self.thresholds[: self.token_gates])
        if weight is not None and weight.level == "token":
            rules.append(self.bounds.thresholds)
        return math.prod(thresholds.bins for thresholds in rules)

    @cached_property
    def ladder(self) -> NestedGates | NestedWeights | None:
        """Where its points are many variants of a single gate that is no veto, or of the bound of a token weight."""
        axis = self.longest
        if not self.is_binned or axis - 1 == self.veto or not MIN_NESTED_GATES <= self.grid[axis] == np.prod(self.grid):
            return None
        if axis == 0:
            return self.weight_ladder
        return NestedGates.of(self.order[axis - 1], self.thresholds[axis - 1])

    @cached_property
    def weight_ladder(self) -> NestedWeights | None:
        """The bounds of its token weights, however few, where they differ in nothing but the upper one."""
        weight = self.correction.weight
        of_tokens = weight is not None and weight.level == "token"
        return NestedWeights.of(self.bounds, weight.bounds[0]) if weight is not None and of_tokens else None

    @cached_property
    def loosest(self) -> Correction:
        """The correction at the last rung of its ladder, which leaves most tokens as they are."""
        ladder, own = self.ladder, self.correction
        if ladder is None:
            return own
        last = int(ladder.places.argmax())
        if isinstance(ladder, NestedWeights):
            return own.model_copy(update={"weight": self.weights[last]})
        gates = [*own.gates]
        gates[ladder.gate] = self.gates[ladder.gate][last]
        return own.model_copy(update={"gates": tuple(gates)})

    @cached_property
    def veto(self) -> int | None:
        """The axis of the first veto's gate in `order`."""
        first = next((number for number, gate in enumerate(self.correction.gates) if gate.is_veto), None)
        return None if first is None else self.order.index(first)


def group_families(grid: CorrectionGrid) -> tuple[CorrectionFamily, ...]:
    """The points of a study as families."""
    kinds = [_number([_weight_kind(weight) for weight in grid.weights]), _number(grid.losses)]
    kinds += [_number([_gate_kind(gate) for gate in variants]) for variants in grid.gates]
    of_point = np.stack([kind[places] for kind, places in zip(kinds, grid.places, strict=True)])
    _, firsts, inverse = np.unique(of_point, axis=1, return_index=True, return_inverse=True)
    alike: list[Ints] = []
    for number, first in enumerate(firsts.tolist()):
        points = np.flatnonzero(inverse.reshape(-1) == number)
        alike += [points] if _can_be_binned(grid.correction(first)) else np.split(points, len(points))
    made = [_build_family(grid, points) for points in sorted(alike, key=lambda points: int(points[0]))]
    return tuple(part for family in made for part in _split_large_family(family, grid))


def _number(keys: Sequence[Hashable]) -> Ints:
    """A number for each key, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _build_family(grid: CorrectionGrid, points: Ints) -> CorrectionFamily:
    first = grid.correction(int(points[0]))
    order = sorted(range(len(first.gates)), key=lambda gate: (first.gates[gate].level != "token", gate))
    found = [np.unique(places, return_inverse=True) for places in grid.places[:, points]]
    (of_weight, weight_places), _, *of_gates = found
    weights = tuple(grid.weights[variant] for variant in of_weight.tolist())
    gates = tuple(
        tuple(variants[variant] for variant in numbers.tolist())
        for variants, (numbers, _) in zip(grid.gates, of_gates, strict=True)
    )
    shape = (len(weights), *(len(gates[gate]) for gate in order))
    flat = np.ravel_multi_index((weight_places, *(of_gates[gate][1] for gate in order)), shape)
    return CorrectionFamily(weights, gates, tuple(order), points, flat, first)


def _split_large_family(family: CorrectionFamily, grid: CorrectionGrid) -> list[CorrectionFamily]:
    """The family itself, or its points one by one where their bins would be too many."""
    if not family.is_binned or family.cells <= _MOST_CELLS:
        return [family]
    return [_build_family(grid, point) for point in np.split(family.points, len(family.points))]


def _weight_kind(weight: Weight | None) -> Hashable:
    """Everything but bounds."""
    if weight is None:
        return None
    return weight.level, weight.source, weight.normalize, weight.normalize_over, weight.is_usual


def _gate_kind(gate: Gate) -> Hashable:
    """Everything but bounds."""
    return (*gate.model_dump(exclude={"keep", "inclusive"}).values(), gate.is_veto)


def _can_be_binned(correction: Correction) -> bool:
    """Whether each gate judges by itself, and whole sequences or single tokens; what it leaves, it leaves alike.

    And whether the loss takes the weights.
    """
    effects = {gate.effect for gate in correction.gates}
    if correction.weight is not None and not correction.weight.is_usual:
        return False
    weighted = correction.weight is None or correction.weights_loss
    return (
        weighted
        and parse_loss(correction.loss)[0] not in SEQUENCE_LOSSES
        and len(effects) < 2
        and all(
            gate.is_usual and (gate.sees == "original" or not number) for number, gate in enumerate(correction.gates)
        )
    )
