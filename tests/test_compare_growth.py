"""Two runs over steps: slopes and onsets that differ are told, those that do not are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mismatchctl.compare.growth import growth
from mismatchctl.render.pages.compare_words import growth_sentences
from mismatchctl.result import Groups, Series

STEPS = np.arange(24)


def run_of(log_k3: Any, labels: Any = STEPS) -> Any:
    values = [float(value) for value in np.exp(log_k3)]
    groups = Groups(labels=np.asarray(labels).tolist(), metrics={"k3": Series(value=values)}, corrections={})
    return SimpleNamespace(groups=groups)


def noisy(seed: int, slope: float, onset: int = 0, scale: float = 0.1) -> Any:
    rise = np.maximum(STEPS - onset, 0)
    return run_of(-8 + slope * rise + np.random.default_rng(seed).normal(0, scale, len(STEPS)))


def test_slopes_are_those_of_least_squares() -> None:
    first, second = noisy(0, 0.05), noisy(1, 0.0)
    found = growth(first, second)
    for run, side in zip((first, second), found.sides, strict=True):
        line = stats.linregress(STEPS, np.log(run.groups.metrics["k3"].value))
        assert side.slope == pytest.approx(line.slope, rel=1e-9)
        assert line.stderr * 0.99 <= side.se <= 2.5 * line.stderr  # autocorrelation only widens
    assert found.significant
    assert found.sides[0].grows and not found.sides[1].grows
    assert found.onsets_differ is None
    assert "grows more slowly" in next(growth_sentences(found))


def test_growth_alike_is_rarely_told_apart() -> None:
    """The same slope and onset on both sides: at most about 5 % of either are called different."""
    pairs = [growth(noisy(seed, 0.05, 8), noisy(1000 + seed, 0.05, 8)) for seed in range(100)]
    assert sum(found.significant for found in pairs) <= 10
    assert sum(bool(found.onsets_differ) for found in pairs) <= 12
    told = [side.onset_interval for found in pairs for side in found.sides if side.onset_interval is not None]
    assert len(told) > 150
    assert np.mean([low <= 8 <= high for low, high in told]) > 0.85


def test_onsets_apart_are_told() -> None:
    pairs = [growth(noisy(seed, 0.15, 4), noisy(1000 + seed, 0.15, 14)) for seed in range(20)]
    assert sum(bool(found.onsets_differ) for found in pairs) >= 18
    words = list(growth_sentences(pairs[0]))
    assert words[1].startswith("the growth began at another step: step 1")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_of(np.zeros(5), range(5)), "fewer than 8 numbered steps"),
        (run_of(np.zeros(24), [f"s{step}" for step in STEPS]), "fewer than 8 numbered steps"),
        (run_of(np.full(24, -np.inf)), "not above 0"),
    ],
)
def test_what_has_no_growth_says_why(run: Any, why: str) -> None:
    found = growth(run, noisy(0, 0.1))
    assert why in found.status
    assert list(growth_sentences(found)) == []
