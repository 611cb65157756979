"""The chance that no token of a response goes beyond a bound, at lengths that the dump does not have.

Each sequence has a rate of its own at which tokens go beyond the bound: rates are gamma distributed (Lomax's law).
Where they come the denser, or the rarer, the farther a response has got, time runs as a power of the position. All of
it is fitted to the length at which each sequence first goes beyond.
"""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.predict.sample import GRID, SequenceSample

_FRAILTIES = np.array([1e-6, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
_RATES = np.geomspace(1e-7, 1.0, 100)
_POWERS = (1.0, 0.7, 1.5, 2.0, 3.0)
_BETTER = 2.0
"""Log likelihood that another power than 1 must gain: what a free parameter gains by chance in one case of twenty."""


def survival(sample: SequenceSample, beyond: Bools, length: int, weights: Float64s) -> Float64s:
    """Chance that no token of `length` goes beyond the bounds of a gate, in each replicate [R].

    Args:
        sample: of one run.
        beyond: whether the extreme of each sequence is beyond, by GRID [S, OCTAVES].
        length: tokens.
        weights: of the sequences in each replicate [R, S].
    """
    start, end, has_ended = _first_beyond(sample, beyond)
    likelihood, alive = np.full(len(weights), -np.inf), np.ones(len(weights))
    for power in _POWERS:
        found, value = _fitted(start, end, has_ended, length, power, weights)
        found -= _BETTER * (power != 1.0) * weights.mean(axis=1)
        alive, likelihood = np.where(found > likelihood, value, alive), np.maximum(found, likelihood)
    return alive


def _fitted(
    start: Float64s, end: Float64s, has_ended: Bools, length: int, power: float, weights: Float64s
) -> tuple[Float64s, Float64s]:
    """The best log likelihood in each replicate [R], and the chance that it gives [R]."""
    frailty, rate = (grid.ravel() for grid in np.meshgrid(_FRAILTIES, _RATES, indexing="ij"))
    scale = float(GRID[0]) ** (1 - power)

    def alive(tokens: Float64s) -> Float64s:
        time = scale * tokens[..., None] ** power
        return np.asarray(np.exp(-np.log1p(frailty * rate * time) / frailty))

    with np.errstate(divide="ignore"):
        ended = np.log(np.maximum(alive(start) - alive(end), 1e-300))
        chances = weights @ np.where(has_ended[:, None], ended, np.log(np.maximum(alive(end), 1e-300)))
    best = chances.argmax(axis=1)
    return chances[np.arange(len(weights)), best], alive(np.array([float(length)]))[0][best]


def _first_beyond(sample: SequenceSample, beyond: Bools) -> tuple[Float64s, Float64s, Bools]:
    """Between which lengths each sequence first goes beyond, up to where it is seen where it does not [S]."""
    first = beyond.argmax(axis=1)
    grid = np.minimum(GRID[: beyond.shape[1]], sample.tokens[:, None])
    rows, has_ended = np.arange(len(sample)), beyond[:, -1]
    start = np.where(first > 0, grid[rows, first - 1], 0)
    end = np.where(has_ended, grid[rows, first], sample.tokens)
    return start.astype(np.float64), end.astype(np.float64), has_ended
