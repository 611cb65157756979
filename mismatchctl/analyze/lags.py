"""By how many steps K3 follows or leads what the run logged, where that can be told.

Two series that both rise always look alike, so their changes from step to step are compared, by rank: a spike counts
once. The largest correlation over all lags counts where chance over as many lags gives it once in a hundred times, by
Bartlett's variance, which knows that changes of a noisy series are correlated among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.result import Lag

LEVEL = 0.01
"""How often noise alone may show a lag."""
LEAST = 16
"""Steps below which no lag is looked for."""
_FARTHEST = 20
_OVERLAP = 8


def lag_of(k3: Sequence[float | None], logged: Sequence[float | None]) -> Lag:
    """The lag of one series of a run's log; positive: K3 follows it."""
    ours = np.array([math.log(value) if value else np.nan for value in k3], np.float64)
    theirs = np.array([np.nan if value is None else value for value in logged], np.float64)
    known = np.isfinite(ours) & np.isfinite(theirs)
    count = int(known.sum())
    if count < LEAST:
        return Lag(compared=count, status=f"only {count} steps have both: a lag takes {LEAST}")
    first, last = np.flatnonzero(known)[[0, -1]]
    if count < last - first + 1:
        return Lag(compared=count, status="steps are missing in between")
    x, y = _changes(ours[first : last + 1]), _changes(theirs[first : last + 1])
    if not x.any() or not y.any():
        return Lag(compared=count, status="it does not vary")
    reach = min(_FARTHEST, (len(x) - _OVERLAP) // 2)
    shifts = np.arange(-reach, reach + 1)
    found = np.array([_correlation(x, y, int(shift)) for shift in shifts])
    limit = NormalDist().inv_cdf(1 - LEVEL / 2 / len(shifts)) * math.sqrt(_spread(x, y))
    strength = np.abs(found) * np.sqrt(len(x) - np.abs(shifts))
    best = int(np.argmax(strength))
    if strength[best] < limit:
        return Lag(compared=count, status="no lag beyond chance")
    return Lag(steps=int(shifts[best]), correlation=float(found[best]), compared=count)


def _changes(values: Float64s) -> Float64s:
    """Changes from step to step by their rank, of mean 0 and variance 1; zeros where nothing changes."""
    changes = np.diff(values)
    order = np.unique(changes, return_inverse=True, return_counts=True)
    counts = order[2]
    middle = np.cumsum(counts) - (counts + 1) / 2
    ranks = middle[order[1].ravel()]
    spread = ranks.std()
    return (ranks - ranks.mean()) / spread if spread > 0 else np.zeros(len(ranks))


def _correlation(x: Float64s, y: Float64s, shift: int) -> float:
    """Of x now with y so many steps before."""
    if shift > 0:
        x, y = x[shift:], y[:-shift]
    elif shift < 0:
        x, y = x[:shift], y[-shift:]
    return float(np.mean(x * y))


def _spread(x: Float64s, y: Float64s) -> float:
    """What a cross-correlation of unrelated series scatters by, times their length (Bartlett 1946)."""
    most = min(_FARTHEST, len(x) // 4)
    return max(1.0, 1 + 2 * sum(_correlation(x, x, k) * _correlation(y, y, k) for k in range(1, most + 1)))
