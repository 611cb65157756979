"""Compiled scan of log-probs that finds values which need a closer check."""

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
"""Maximum value of each |log ratio| in `RowScan.levels`."""
_COLUMNS = "train_log_probs", "rollout_log_probs"


@dataclass(frozen=True)
class RowScan:
    """Extremes and sums of several rows, from one pass over their tokens."""

    extents: Mapping[str, Extent]  # minimum and maximum of each column by name, masked tokens included
    # per sequence, over its valid tokens [4, S]: tokens with a finite log ratio, their |log ratio| capped at LEVEL_CAP,
    # their train probability, and tokens with two equal log-probs
    sums: Float64s

    @property
    def levels(self) -> tuple[Ints, Float64s, Float64s]:
        """Return the first three sums: tokens, capped |log ratio| and train probability of each row [S]."""
        return self.sums[0].astype(np.int64), self.sums[1], self.sums[2]

    @property
    def identical(self) -> Ints:
        """Return the number of valid tokens whose rollout and train log-probs are equal, per sequence [S]."""
        found: Ints = self.sums[3].astype(np.int64)
        return found

    def take(self, chosen: Ints | slice) -> RowScan:
        return RowScan(self.extents, self.sums[:, chosen])


def can_scan() -> bool:
    """Return True if this process has loaded compiled loops. Loading them takes longer than a scan saves."""
    return compiled_loops_in_use()


def scan_log_probs(policy: Floats, reference: Floats, valid: Bools, offsets: Ints) -> RowScan:
    """Scan the log-probs [T] of trainer and rollout, masked tokens included."""
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
    """Return the minimum and maximum of floats, from the extremes of their bits.

    If a value is NaN, the result is NaN.
    """
    if reach[0] > reach[1]:
        return math.nan, math.nan
    kind = f"f{reach.itemsize}"
    least, most = reach.view(kind).tolist()
    low, high = most if np.signbit(most) else least, float(highest.view(kind)) if highest >= 0 else least
    return (math.nan, math.nan) if math.isnan(low) or math.isnan(high) else (low, high)
