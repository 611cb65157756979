"""From replicates to intervals and p-values, and many of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatchctl.resample.bootstrap import Draws


def interval(draws: Draws, level: float = 0.90) -> tuple[float, float] | None:
    """The percentile interval of that level; None where too few replicates are defined."""
    ordered = np.sort(draws.resampled)  # NaN last
    defined = int(np.count_nonzero(~np.isnan(ordered)))
    place = max(int(round((1 - level) / 2 * (len(ordered) + 1), 6)) - 1, 0)
    if defined < len(ordered) - place:
        return None
    return float(ordered[place]), float(ordered[defined - 1 - place])


def p_above_zero(draws: Draws) -> float:
    """One-sided p-value of a number above zero; replicates in which it is undefined count as not above."""
    count = len(draws.resampled)
    above = int(np.count_nonzero(draws.resampled > 0))
    return (count - above + 1) / (count + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that one below a level means an error in all of them together below it (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
