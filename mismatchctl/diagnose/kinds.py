"""Whether the rows of a dump are of one kind, or some were sampled or scored otherwise than the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.diagnose.case import Case, once

_APART, _LEAST_NOISE = 0.6, 1e-4
"""Variance of the rows' log levels beyond chance: of one kind, of nine models under many causes, 0.41 at most;
where half or a fifth were sampled otherwise, 1.5 at the least. Below this noise float32 has levels of its own."""
_TOKENS, _ROWS, _FEWEST = 5, 8, 2


@dataclass(frozen=True)
class Kinds:
    """Rows of two kinds.

    Attributes:
        louder: sequences whose tokens are all along farther apart than those of the others [S].
        times: how much, by their mean log levels.
        variance: of the levels beyond chance.
        rows: sequences that were told apart.
    """

    louder: Bools
    times: float
    variance: float
    rows: int


@once
def kinds(case: Case) -> Kinds | None:
    """Rows of two kinds; None where they are of one, or too few to tell.

    The level of a row is the mean loudness of its doubtful tokens. Every other token gives one of two levels of it,
    whose errors are independent: their covariance is the variance of what the row itself has.
    """
    if case.noise < _LEAST_NOISE:
        return None
    odd = case.place % 2 == 1
    halves = [case.doubtful & part for part in (odd, ~odd)]
    counts = [case.sums(half) for half in halves]
    known = np.flatnonzero((counts[0] >= _TOKENS) & (counts[1] >= _TOKENS))
    if len(known) < _ROWS:
        return None
    first, second = (
        case.sums(case.loudness * half)[known] / count[known] for half, count in zip(halves, counts, strict=True)
    )
    variance = float(np.cov(first, second)[0, 1])
    if variance < _APART:
        return None
    level = (first + second) / 2
    order = np.argsort(level)
    sizes = np.arange(1, len(level))
    sums = np.cumsum(level[order])[:-1]
    apart = (level.sum() - sums) / (len(level) - sizes) - sums / sizes
    between = np.where(np.minimum(sizes, len(level) - sizes) >= _FEWEST, sizes * (len(level) - sizes) * apart**2, 0.0)
    cut = int(between.argmax())
    louder = np.zeros(case.size, np.bool_)
    louder[known[order[cut + 1 :]]] = True
    return Kinds(louder, float(np.exp(apart[cut])), variance, len(known))
