"""The regression of the size of the mismatch on a number, compared with least squares."""

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.diagnosis.causes.staleness import StepCells, fit_slope
from tests.diagnosis.findings import found
from tests.factories.planted_causes import healthy


def cells_of(terms: np.ndarray, step: np.ndarray, value: np.ndarray) -> StepCells:
    """Return sums by step and value of the products of 1, level, length and doubt [S, 3]."""
    found: dict[tuple[int, float], np.ndarray] = defaultdict(lambda: np.zeros((4, 4)))
    for row, *key in zip(terms, step.tolist(), value.tolist(), strict=True):
        found[tuple(key)] += np.outer([1, *row], [1, *row])
    return dict(found)


def drawn(rng: np.random.Generator, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw sequences whose level depends on length and doubt only."""
    length, doubt = rng.normal(5, 0.5, rows), rng.normal(-1, 0.4, rows)
    level = 0.8 * length - 0.5 * doubt + rng.normal(0, 1, rows)
    return np.stack([level, length, doubt], 1), rng.integers(0, steps, rows), rng.integers(0, 3, rows).astype(float)


def test_the_slope_matches_least_squares_within_steps() -> None:
    terms, step, lag = drawn(np.random.default_rng(1), 60, 4)
    terms[:, 0] += 0.3 * lag
    value, z = fit_slope(cells_of(terms, step, 7 + lag))
    design = np.column_stack([lag, terms[:, 1:], step[:, None] == np.arange(4)])
    fit, (left,), *_ = np.linalg.lstsq(design, terms[:, 0], rcond=None)
    t = fit[0] / math.sqrt(left / 53 * np.linalg.inv(design.T @ design)[0, 0])
    assert value == pytest.approx(fit[0])
    assert z == pytest.approx(t, rel=0.03)  # the z of a normal distribution is slightly lower


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "steps"), [(32, 8), (16, 4), (5, 300), (12, 2)])
def test_constant_levels_rarely_give_a_slope(rows: int, steps: int) -> None:
    """A normal z exceeds 3 in 0.27%. A step of a single row must not count as a step without scatter."""
    rng = np.random.default_rng(2)
    z = [fit_slope(cells_of(*drawn(rng, rows, steps)))[1] for _ in range(1500)]
    assert np.mean(np.abs(z) > 3) < 0.007 and max(map(abs, z)) < 4.5


def test_growth_gives_a_slope() -> None:
    rng, reported = np.random.default_rng(3), []
    for _ in range(50):
        terms, step, lag = drawn(rng, 64, 8)
        terms[:, 0] += lag
        reported.append(fit_slope(cells_of(terms, step, lag))[1])
    assert np.mean(np.array(reported) > 4) > 0.9


def test_few_differing_sequences_give_no_slope(tmp_path: Path) -> None:
    """All but four rows are bit-identical, and chance can order four levels in any way."""
    dump = healthy()
    rows = len(dump)
    rollout = dump.tokens["rollout_log_probs"]
    keep, starts = np.zeros(len(rollout), np.bool_), np.cumsum(dump.lengths) - dump.lengths
    for row, scale in zip((3, 30, 50, 70), (0.05, 0.4, 0.4, 2.7), strict=True):
        inside = slice(starts[row], starts[row] + dump.lengths[row])
        train = dump.tokens["train_log_probs"][inside]
        rollout[inside] = train - scale * np.abs(train - rollout[inside])
        keep[inside] = True
    dump.tokens["rollout_log_probs"] = np.where(keep, rollout, dump.tokens["train_log_probs"])
    lag = np.arange(rows) % 3
    lag[[3, 30, 50, 70]] = [0, 1, 1, 2]
    dump.columns |= {"step": np.arange(rows) // 8, "rollout_version": 9 + 0 * lag, "train_version": 9 + lag}
    assert not [own for own in found(dump, tmp_path) if own.cause == "stale_policy" and own.confidence != "low"]
