"""Columns of the sequences of a block along a grid, and their sums.

Gates on whole sequences are flags, so that sums over sequences are products of matrices: a sequence adds its `passing`
value where it passes them all, else its `failing`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.measure.grid.parts import Arrays, BlockParts

_FEW = 4
"""Sequences of a part from which products of matrices are faster than sums over each of them."""


@dataclass
class BlockColumns:
    """Columns of one block.

    Attributes:
        parts: the micro-batches of its cells.
        flags: which sequences pass the gates on whole sequences [S, 1, ..., variants]; None: all do.
        passing: columns by name where the sequence passes.
        failing: those that are not 0 where it does not.
        fixed: columns that do not depend on it.
        summed: the same of columns that are not kept by cluster, summed over each part [parts, ...].
        maxima: the largest of each part [parts, weights, 1, ...].
    """

    parts: BlockParts
    flags: Float64s | None = None
    passing: Arrays = field(default_factory=dict)
    failing: Arrays = field(default_factory=dict)
    fixed: Arrays = field(default_factory=dict)
    summed: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)

    def totals(self) -> Arrays:
        """Each column summed over the sequences of each part, [parts, weights, gate variants ...]."""
        return self.summed | self.by([*self.passing, *self.fixed], self.parts)

    def by(self, names: Collection[str], parts: BlockParts) -> Arrays:
        """Some columns summed over other parts, [parts, weights, gate variants ...]."""
        if self.flags is None or not (parts.count == 1 or parts.count * _FEW < len(parts.of)):
            return {name: parts.sum(self._of_sequences(name)) for name in names}
        found = {name: parts.sum(self.fixed[name]) for name in names if name in self.fixed}
        found |= _products(self.flags, {name: self.passing[name] for name in names if name not in found}, parts)
        rest = _products(1.0 - self.flags, {name: self.failing[name] for name in found if name in self.failing}, parts)
        for name, sums in rest.items():
            found[name] += sums
        return found

    def _of_sequences(self, name: str) -> NDArray[Any]:
        """One column of every sequence [S, weights, gate variants ...]."""
        values = self.fixed[name] if name in self.fixed else self.passing[name]
        if self.flags is None or name in self.fixed:
            return values
        with np.errstate(invalid="ignore"):
            found: NDArray[Any] = values * self.flags
        if not np.isfinite(found).all():  # 0 times an infinite K3 is nothing, not undefined
            found = np.where(self.flags == 0, 0.0, found)
        return found + self.failing[name] * (1.0 - self.flags) if name in self.failing else found


def _products(flags: Float64s, columns: Arrays, parts: BlockParts) -> Arrays:
    """Flags times columns, which vary along other axes, summed over the sequences of each part: those alike at once."""
    alike: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, values in columns.items():
        alike.setdefault((values.shape[1:], bool(np.isfinite(values).all())), []).append(name)
    found: Arrays = {}
    for (shape, is_finite), names in alike.items():
        along = np.broadcast_shapes(flags.shape[1:], shape)
        tall = np.stack([columns[name].reshape(len(flags), -1) for name in names], axis=1).reshape(len(flags), -1)
        sums = _product(flags.reshape(len(flags), -1), tall, parts, is_finite)
        found |= zip(names, sums.reshape(parts.count, len(names), *along).swapaxes(0, 1), strict=True)
    return found


def _product(flags: Float64s, values: Float64s, parts: BlockParts, is_finite: bool) -> Float64s:
    """Values [S, N], all of which may be finite, times flags [S, V]: sums over each part [parts, N, V]."""
    sums = np.empty((parts.count, values.shape[1], flags.shape[1]))
    for own, members in parts.alike:
        some, tall = (each[members].reshape(len(own), -1, each.shape[1]) for each in (flags, values))
        with np.errstate(invalid="ignore", over="ignore"):
            if is_finite:
                sums[own] = tall.swapaxes(1, 2) @ some
                continue
            for part, each, passes in zip(own, tall[..., None], some[:, :, None], strict=True):
                # 0 times an infinite K3 is nothing, not undefined.
                sums[part] = np.where(passes == 0, 0.0, each * passes).sum(axis=0)
    return sums
