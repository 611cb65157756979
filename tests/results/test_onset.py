"""Onset of growth in simulated runs: coverage of its interval, jumps and ramps, levels and bad steps."""

from __future__ import annotations

import numpy as np
import pytest

from mismatchctl.results.growth import Growth, fit_growth

LEVEL = 2e-4


def simulate(
    draw: np.random.Generator, shape: str, bad: int = 0, longest: int = 2000
) -> tuple[Growth, int, float, list[int]]:
    """Return the fitted growth of a random run, the true onset and factor, and its bad steps.

    A run has 50 to `longest` steps of 8 to 512 responses, and its K3 grows 2x to 100x. Ramps are straight in the
    logarithm of K3, in the size of the noise, or in K3.
    """
    count, responses = (int(np.exp(draw.uniform(*np.log(ends)))) for ends in ((50, longest), (8, 512)))
    factor, edge = float(np.exp(draw.uniform(*np.log((2, 100))))), max(3, count // 10)
    onset, steps = int(draw.integers(edge, count - edge)), np.arange(count)
    duration = 1 if shape == "jump" else int(draw.integers(4, max(5, count // 3)))
    part = np.clip((steps - onset + (shape == "jump")) / duration, 0, 1)
    power = {"logarithm": 0.0, "noise": 0.5}.get(shape, 1.0)
    rise = factor**part if not power else (1 + (factor**power - 1) * part) ** (1 / power)
    freedom = draw.choice([1, 3]) * responses
    scatter = np.exp(draw.normal(0, draw.choice([0.0, 0.05, 0.1]), count))
    k3 = LEVEL * rise * scatter * draw.gamma(freedom, 1 / freedom, count)
    errors = k3 * np.sqrt(draw.chisquare(responses - 1, count) / (responses - 1) / freedom)
    start = int(draw.integers(8, count - 8))
    bad_steps = list(range(start, start + bad))
    k3[bad_steps] *= 10
    errors[bad_steps] *= 10
    reached = rise[-1]
    return fit_growth(steps.tolist(), k3.tolist(), errors.tolist()), onset, float(reached), bad_steps


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("shape", ["jump", "logarithm", "noise", "k3"])
def test_the_interval_contains_the_true_onset(shape: str, bad: int) -> None:
    """At a coverage of 0.95, fewer than 50 of 60 runs have a probability of 2e-5."""
    draw = np.random.default_rng(11)
    inside, shapes, factors, exact = [], [], [], []
    for _ in range(60):
        found, onset, factor, bad_steps = simulate(draw, shape, bad, longest=400)
        assert found.verdict == "grew"
        low, high = (float(end) for end in found.onset_interval or (0, 0))
        inside.append(low <= onset <= high)
        shapes.append(found.shape == ("jump" if shape == "jump" else "ramp"))
        factors.append(abs(np.log((found.after or 0) / (found.before or 1) / factor)) < 0.25)
        exact.append(found.bad_steps == bad_steps)
    assert np.mean(inside) >= 0.9
    assert np.mean(shapes) >= 0.9
    assert np.mean(factors) >= 0.9
    assert np.mean(exact) >= 0.9


@pytest.mark.parametrize(("count", "onset"), [(200, 122), (1000, 517), (2000, 1900)])
def test_a_jump_is_found_at_its_step(count: int, onset: int) -> None:
    noise = np.random.default_rng(3).normal(0, 0.08, count)
    values = LEVEL * np.where(np.arange(count) >= onset, 22, 1) * np.exp(noise)
    found = fit_growth(list(range(count)), values.tolist(), (0.08 * values).tolist())
    assert (found.shape, found.onset, found.onset_interval, found.until) == ("jump", onset, (onset, onset), onset)
    assert f"at step {onset}, from" in found.text


def test_bad_steps_are_named_and_left_out() -> None:
    values = LEVEL * np.exp(np.random.default_rng(4).normal(0, 0.1, 100))
    values[[40, 41]] *= 50
    steady = fit_growth(list(range(100)), values.tolist(), (0.1 * values).tolist())
    assert (steady.verdict, steady.bad_steps) == ("steady", [40, 41])
    assert steady.text.endswith("without the bad steps 40, 41")
    values[70:] *= 3
    grown = fit_growth(list(range(100)), values.tolist(), (0.1 * values).tolist())
    assert (grown.onset, grown.bad_steps) == (70, [40, 41])


def test_a_change_at_the_end_is_not_a_bad_step() -> None:
    values = [LEVEL] * 37 + [LEVEL * 8] * 3
    assert fit_growth(list(range(40)), values, [0.1 * value for value in values]).bad_steps == []
