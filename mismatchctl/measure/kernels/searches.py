"""Compiled loops over log-probs that look for tokens with a large log ratio, or count them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatchctl.measure.kernels.compiling import compiled, compiled_sums

_TILE = 1024
"""Tokens that are looked at at once: what is noted of them stays in the processor's nearest cache."""


@compiled
def _mark(policy: Any, reference: Any, low: float, high: float, marks: Any) -> None:
    """Mark log ratios of at most `low` or at least `high`: vector code, as it does not say where they are."""
    for j in range(len(policy)):
        x = np.float64(policy[j]) - np.float64(reference[j])
        marks[j] = (x <= low) | (x >= high)


@compiled
def search(policy: Any, reference: Any, offsets: Any, sequences: Any, low: float, high: float, found: Any) -> int:
    """Write to `found` the tokens of some sequences with a log ratio of at most `low` or at least `high`; how many."""
    count, marks = 0, np.zeros(_TILE, np.bool_)
    eights = marks.view(np.uint64)
    for i in sequences:
        for start in range(offsets[i], offsets[i + 1], _TILE):
            stop = min(start + _TILE, offsets[i + 1])
            _mark(policy[start:stop], reference[start:stop], low, high, marks[: stop - start])
            marks[stop - start :] = False
            for eight in range((stop - start + 7) >> 3):
                if eights[eight]:
                    for place in range(8 * eight, 8 * eight + 8):
                        if marks[place]:
                            found[count] = start + place
                            count += 1
    return count


AT_ONCE = 3
"""Intervals that tokens are held against in one look at them."""


@compiled_sums
def _add_outside(policy: Any, reference: Any, low: Any, high: Any, found: Any) -> None:
    low_a, low_b, low_c = low[0], low[1], low[2]
    high_a, high_b, high_c = high[0], high[1], high[2]
    a = b = c = 0.0  # numbers of their own type would keep this from becoming vector code
    for j in range(len(policy)):
        x = np.float64(policy[j]) - np.float64(reference[j])
        a += 1.0 if (x < low_a) | (x > high_a) else 0.0
        b += 1.0 if (x < low_b) | (x > high_b) else 0.0
        c += 1.0 if (x < low_c) | (x > high_c) else 0.0
    found[0] += a
    found[1] += b
    found[2] += c


@compiled
def count_outside(
    policy: Any, reference: Any, offsets: Any, lowest: Any, highest: Any, low: Any, high: Any, found: Any
) -> None:
    """Add to `found` [S, N] the tokens of each sequence outside each interval, AT_ONCE of them and narrow ones first.

    Intervals that hold the extremes of a sequence cost nothing.
    """
    for i in range(len(offsets) - 1):
        own, other = policy[offsets[i] : offsets[i + 1]], reference[offsets[i] : offsets[i + 1]]
        for first in range(0, len(low), AT_ONCE):
            if lowest[i] < low[first] or highest[i] > high[first]:
                few = slice(first, first + AT_ONCE)
                _add_outside(own, other, low[few], high[few], found[i, few])
