"""Compiled loops over log-probs that look for tokens with a large log ratio."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl.measure.kernels.compiling import compiled
from mismatchctl.measure.kernels.kernel import TILE


@compiled
def _mark(policy: Any, reference: Any, low: float, high: float, marks: Any) -> None:
    """Mark log ratios of at most `low` or at least `high`: vector code, as it does not say where they are."""
    for j in range(len(policy)):
        x = np.float64(policy[j]) - np.float64(reference[j])
        marks[j] = (x <= low) | (x >= high)


@compiled
def search(
    policy: Any, reference: Any, offsets: Any, sequences: Any, low: float, high: float, marks: Any, found: Any
) -> int:
    """Write to `found` the tokens of some sequences with a log ratio of at most `low` or at least `high`: how many.

    They may be more than it has room for, of which the first are written. `marks` [TILE] are there to work in.
    """
    count, eights = 0, marks.view(np.uint64)
    for i in sequences:
        for start in range(offsets[i], offsets[i + 1], TILE):
            stop = min(start + TILE, offsets[i + 1])
            _mark(policy[start:stop], reference[start:stop], low, high, marks[: stop - start])
            marks[stop - start :] = False
            for eight in range((stop - start + 7) >> 3):
                if eights[eight]:
                    for place in range(8 * eight, 8 * eight + 8):
                        if marks[place]:
                            if count < len(found):
                                found[count] = start + place
                            count += 1
    return count
