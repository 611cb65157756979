"""Whether rollout and train log-probs are about the same tokens: their correlation at lags -1, 0 and 1."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mismatchctl.errors import DataError

LAGS = (-1, 0, 1)
LEAST_PAIRS = 20
"""Pairs of tokens below which nothing is said."""
CLOSE, CLEAR, SURE = 0.5, 0.3, 4.0
"""A shift correlates at least so well, by so much better than none, and by so many standard errors (Fisher's z)."""
FLOOR = 20.0
"""Log-probs below minus this count as minus this, so that no single token decides."""

Floats = NDArray[np.float32]
Sums = NDArray[np.float64]


def alignment_sums(rollout: Floats, train: Floats, mask: NDArray[np.bool_], offsets: NDArray[np.int64]) -> Sums:
    """Sums of pairs (rollout token i, train token i + lag) of some sequences; of several parts they add up.

    Args:
        rollout: log-probs of all sequences, one after another.
        train: likewise.
        mask: which tokens are valid; a pair is of two valid ones.
        offsets: where sequences begin, and the end.

    Returns:
        [3 lags, 6]: count, x, y, xx, yy, xy, where x and y are square roots of minus the log-prob, which tames tails.
    """
    sequence = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    x, y = (np.sqrt(np.clip(-values.astype(np.float64), 0, FLOOR)) for values in (rollout, train))
    good = mask & np.isfinite(rollout) & np.isfinite(train)
    sums = np.zeros((len(LAGS), 6))
    for index, lag in enumerate(LAGS):
        first, second = slice(max(-lag, 0), len(x) - max(lag, 0)), slice(max(lag, 0), len(x) - max(-lag, 0))
        both = good[first] & good[second] & (sequence[first] == sequence[second])
        a, b = x[first][both], y[second][both]
        sums[index] = len(a), a.sum(), b.sum(), a @ a, b @ b, a @ b
    return sums


def check_alignment(sums: Sums, place: str, rollout: str, train: str) -> None:
    """Refuse log-probs that fit one token to the side and not as they stand.

    Args:
        sums: as of `alignment_sums`.
        place: the file or folder that they are of.
        rollout: what the source calls the rollout log-probs.
        train: what it calls the train log-probs.

    Raises:
        DataError: a shift by one.
    """
    correlation = {lag: _correlation(*row) for lag, row in zip(LAGS, sums.tolist(), strict=True)}
    best = max(correlation, key=lambda lag: correlation[lag])
    here, there = correlation[0], correlation[best]
    error = math.sqrt(2 / max(float(sums[:, 0].min()) - 3, 1))
    if best == 0 or there < CLOSE or there < here + CLEAR or math.atanh(there) - math.atanh(here) < SURE * error:
        return
    side = "later" if best > 0 else "earlier"
    raise DataError(
        f"is shifted by one token: it fits {rollout} at one token {side} (correlation {there:.2f}), "
        f"and not as it stands ({here:.2f})",
        file=place,
        column=train,
        remedy="one of both was saved with another alignment: save it again, or name the framework with --from",
    )


def _correlation(count: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
    if count < LEAST_PAIRS:
        return 0.0
    spread = (xx - x * x / count) * (yy - y * y / count)
    if spread <= 1e-12 * xx * yy:
        return 0.0
    return float(np.clip((xy - x * y / count) / math.sqrt(spread), -1 + 1e-9, 1 - 1e-9))
