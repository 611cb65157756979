"""Comparison of the growth of two runs: different growth and onsets are reported, equal ones are not."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatchctl.api.compare.compare import compare_growth
from mismatchctl.api.compare.comparison import describe_growth
from mismatchctl.results.growth import fit_growth
from mismatchctl.results.model import Groups, Series

STEPS = np.arange(24)


def run_of(log_k3: Any, labels: Any = STEPS) -> Any:
    values = [float(value) for value in np.exp(log_k3)]
    groups = Groups(labels=np.asarray(labels).tolist(), metrics={"k3": Series(value=values)}, corrections={})
    return SimpleNamespace(groups=groups)


def noisy(seed: int, slope: float, onset: int = 0, scale: float = 0.1) -> Any:
    rise = np.maximum(STEPS - onset, 0)
    return run_of(-8 + slope * rise + np.random.default_rng(seed).normal(0, scale, len(STEPS)))


def test_growth_of_one_side_is_reported() -> None:
    """The factor is exp(0.05 * 23), because K3 grows by exp(0.05) per step for 23 steps."""
    found = compare_growth(noisy(0, 0.0), noisy(1, 0.05))
    assert (found.reference.verdict, found.other.verdict, found.quotient.verdict) == ("steady", "grew", "grew")
    low, high = found.quotient.interval or (0, 0)
    assert low < np.exp(0.05 * 23) < high
    assert found.onsets_differ is None
    words = list(describe_growth(found))
    assert words == [f"K3 divided by the reference's K3, by step: {found.quotient.text}"]
    assert compare_growth(noisy(1, 0.05), noisy(0, 0.0)).quotient.verdict == "fell"


def test_each_side_matches_its_summary() -> None:
    run = noisy(1, 0.05)
    found = compare_growth(noisy(0, 0.0), run)
    assert found.other == fit_growth(STEPS.tolist(), run.groups.metrics["k3"].value, [None] * len(STEPS))


def test_steps_of_only_one_side_are_skipped() -> None:
    whole, part = noisy(0, 0.0), run_of(np.full(12, -8.0), range(6, 18))
    assert compare_growth(whole, part).quotient.steps == 12


def test_equal_growth_is_rarely_called_different() -> None:
    pairs = [compare_growth(noisy(seed, 0.05, 8), noisy(1000 + seed, 0.05, 8)) for seed in range(100)]
    assert sum(found.quotient.changed for found in pairs) <= 3
    assert sum(bool(found.onsets_differ) for found in pairs) <= 8
    told = [side.onset_interval for found in pairs for side in (found.reference, found.other)]
    known = [ends for ends in told if ends is not None]
    assert len(known) > 150
    assert np.mean([low <= 9 <= high for low, high in known]) > 0.85  # 8 is the last step at the level before


def test_different_onsets_are_reported() -> None:
    pairs = [compare_growth(noisy(seed, 0.15, 4), noisy(1000 + seed, 0.15, 14)) for seed in range(20)]
    assert sum(bool(found.onsets_differ) for found in pairs) >= 18
    words = list(describe_growth(pairs[0]))
    assert words[1].startswith("the growth starts at another step: step 1")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_of(np.zeros(1), range(1)), "one step only"),
        (run_of(np.zeros(24), [f"s{step}" for step in STEPS]), "undefined at every step"),
        (run_of(np.full(24, -np.inf)), "undefined at every step"),
    ],
)
def test_incomparable_growth_has_a_reason(run: Any, why: str) -> None:
    """The reasons are too few steps, no common step, or no value above 0."""
    found = compare_growth(run, noisy(0, 0.1))
    assert (found.quotient.verdict, found.quotient.text) == ("unknown", why)
    assert list(describe_growth(found)) == []
