"""Compiled scan of a block of log-probs for values that need a closer look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Extent, Float64s, Floats, Ints
from mismatchctl.core.machine_code import CompiledLoop, compiled_loops_in_use

scan_sequences = CompiledLoop("mismatchctl.core.file_loops", "scan_sequences")
LEVEL_CAP = 1.0
"""A log ratio beyond it counts as this much in a sequence's level."""
_COLUMNS = "train_log_probs", "rollout_log_probs"


@dataclass(frozen=True)
class RowScan:
    """What one loop over some rows found.

    Attributes:
        extents: of both columns, by name, masked tokens included.
        sums: of each sequence, over its valid tokens [4, S]: those with a finite log ratio, and of these the |log
            ratio| up to CAP and the trainer's probability; those whose two log-probs are equal.
    """

    extents: Mapping[str, Extent]
    sums: Float64s

    @property
    def levels(self) -> tuple[Ints, Float64s, Float64s]:
        """Tokens of each sequence whose log ratio is finite, their |log ratio| up to CAP, their probability [S]."""
        return self.sums[0].astype(np.int64), self.sums[1], self.sums[2]

    @property
    def identical(self) -> Ints:
        """Valid tokens of each sequence with the same log-prob on both sides [S]."""
        found: Ints = self.sums[3].astype(np.int64)
        return found

    def of(self, chosen: Ints | slice) -> RowScan:
        """That of some of the rows, whose extents are no wider."""
        return RowScan(self.extents, self.sums[:, chosen])


def can_scan() -> bool:
    """Return True if this process uses compiled loops. If not, loading them takes longer than a scan saves."""
    return compiled_loops_in_use()


def scan_log_probs(policy: Floats, reference: Floats, valid: Bools, offsets: Ints) -> RowScan:
    """Look at log-probs [T] of the trainer and the rollout, masked tokens included."""
    kind: np.dtype[Any] = np.result_type(policy, reference, np.float32)
    columns = tuple(np.ascontiguousarray(values, kind) for values in (policy, reference))
    unsigned, signed = (np.dtype(f"{letter}{kind.itemsize}") for letter in "ui")
    reach = np.tile(np.array([np.iinfo(unsigned).max, 0], unsigned), (2, 1))
    highest = np.full(2, np.iinfo(signed).min, signed)
    sums = np.zeros((len(offsets) - 1, 4))
    scan_sequences(
        columns, tuple(values.view(unsigned) for values in columns), tuple(values.view(signed) for values in columns),
        np.ascontiguousarray(valid, np.bool_).view(np.uint8), offsets, LEVEL_CAP, reach, highest, sums,
    )  # fmt: skip
    extents = {name: _scan_extent(reach[side], highest[side]) for side, name in enumerate(_COLUMNS)}
    return RowScan(extents, sums.T)


def _scan_extent(reach: NDArray[Any], highest: np.signedinteger[Any]) -> Extent:
    """The extent of floats by the smallest and largest of their bits, and the largest signed; NaN where one of them is.

    The sign is the topmost bit and magnitudes are below: the largest bits are those of the lowest negative number, and
    without any number that is none, the smallest are those of the highest. NaN is beyond all magnitudes.
    """
    if reach[0] > reach[1]:
        return math.nan, math.nan
    kind = f"f{reach.itemsize}"
    least, most = reach.view(kind).tolist()
    low, high = most if np.signbit(most) else least, float(highest.view(kind)) if highest >= 0 else least
    return (math.nan, math.nan) if math.isnan(low) or math.isnan(high) else (low, high)
