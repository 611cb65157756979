"""Onset of growth in simulated runs: coverage of the interval, jumps, ramps, levels and bad steps."""

import numpy as np
import pytest

from mismatchctl.api.analyze.run_log import describe_order
from mismatchctl.results.growth import Growth, check_outliers, fit_growth
from tests.factories.growing_runs import LEVEL, SHAPES, simulate_run


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_interval_contains_the_true_onset(shape: str, bad: int) -> None:
    """With a coverage of 0.95, fewer than 54 of 60 runs have a probability of 3%."""
    draw = np.random.default_rng(11)
    runs = [simulate_run(draw, shape, bad, lengths=(50, 400)) for _ in range(60)]
    assert all(run.growth.verdict == "grew" for run in runs)
    assert np.mean([run.covered for run in runs]) >= 0.9
    assert np.mean([run.growth.shape == ("jump" if shape == "jump" else "ramp") for run in runs]) >= 0.9
    levels = [(run.growth.after or 0) / (run.growth.before or 1) / run.factor for run in runs]
    assert np.mean(np.abs(np.log(levels)) < 0.25) >= 0.9
    assert np.mean([run.growth.bad_steps == run.bad_steps for run in runs]) >= 0.9


@pytest.mark.parametrize(("count", "onset"), [(200, 122), (1000, 517), (2000, 1900)])
def test_a_jump_is_found_at_its_step(count: int, onset: int) -> None:
    noise = np.random.default_rng(3).normal(0, 0.08, count)
    values = LEVEL * np.where(np.arange(count) >= onset, 22, 1) * np.exp(noise)
    found = fit_growth(list(range(count)), values.tolist(), (0.08 * values).tolist())
    assert (found.shape, found.onset, found.onset_interval, found.until) == ("jump", onset, (onset, onset), onset)
    assert f"at step {onset}: " in found.text


def test_bad_steps_are_reported_and_excluded() -> None:
    values = LEVEL * np.exp(np.random.default_rng(4).normal(0, 0.1, 100))
    values[[40, 41]] *= 50
    steady = fit_growth(list(range(100)), values.tolist(), (0.1 * values).tolist())
    assert (steady.verdict, steady.bad_steps) == ("steady", [40, 41])
    assert steady.text.endswith("outliers left out: steps 40, 41")
    values[70:] *= 3
    grown = fit_growth(list(range(100)), values.tolist(), (0.1 * values).tolist())
    assert (grown.onset, grown.bad_steps) == (70, [40, 41])


def test_a_change_at_the_end_is_not_a_bad_step() -> None:
    values = [LEVEL] * 37 + [LEVEL * 8] * 3
    assert fit_growth(list(range(40)), values, [0.1 * value for value in values]).bad_steps == []


def test_an_overshoot_is_part_of_the_change() -> None:
    values = LEVEL * np.exp(np.random.default_rng(5).normal(0, 0.05, 60))
    values[31:] *= 0.3
    values[31] *= 0.5
    found = fit_growth(list(range(60)), values.tolist(), [None] * 60)
    assert (found.verdict, found.onset, found.bad_steps) == ("fell", 31, [])


def check(k3: list[float], p99: list[float], outliers: list[float], error: float = 0.03) -> Growth:
    labels = list(range(len(k3)))
    growth = fit_growth(labels, k3, [error * value for value in k3])
    return check_outliers(growth, labels, k3, p99, outliers)


def test_rare_tokens_are_not_growth() -> None:
    found = check([1e-3, 1e9, 2e9], [0.1, 0.1, 0.1], [0, 1, 2])
    assert (found.verdict, found.driven_by, found.factor) == ("uneven", 3, None)
    assert "driven by 3 tokens" in found.text
    falls = check([2e9, 1e9, 1e-3, 1.1e-3], [0.1] * 4, [2, 1, 0, 0])
    assert (falls.verdict, falls.driven_by) == ("uneven", 3)


def test_growth_of_all_tokens_is_found_despite_outliers() -> None:
    found = check([1e-3] * 6 + [9e-3] * 6, [0.1] * 6 + [0.3] * 6, [0] * 6 + [4] * 6)
    assert (found.verdict, found.driven_by) == ("grew", None)


def test_outliers_at_every_later_step_count_as_growth() -> None:
    found = check([1e-3] * 20 + [9e-3] * 20, [0.1] * 40, [0] * 20 + [4] * 20)
    assert (found.verdict, found.onset, found.driven_by) == ("grew", 20, 80)
    assert found.text.endswith("driven by 80 tokens whose two probabilities differ by more than 2x")


def test_the_order_of_changes_is_reported() -> None:
    steps, noise = np.arange(60), np.random.default_rng(6).normal(0, 0.05, (3, 60))
    rise = np.clip((steps - 34) / 10, 0, None)
    k3 = fit_growth(steps.tolist(), (LEVEL * (1 + 8 * rise) ** 2 * np.exp(noise[0])).tolist(), [None] * 60)
    log = {
        "train/grad_norm": (np.where(steps < 30, 0.07, 0.02) * np.exp(noise[1])).tolist(),
        "rollout/raw_reward": (np.where(steps < 39, 0.6, 0.1) + noise[2]).tolist(),
        "lr": [1e-6] * 60,
    }
    order = describe_order(steps.tolist(), k3, log)
    assert order.startswith("train/grad_norm fell at step 30, then K3 rose from step 3")
    assert order.endswith(", then rollout/raw_reward fell at step 39")
    steady = fit_growth(steps.tolist(), [LEVEL] * 60, [LEVEL / 10] * 60)
    assert describe_order(steps.tolist(), steady, log) == ""
    together = describe_order(
        steps.tolist(), k3, {"reward": log["rollout/raw_reward"], "entropy": log["train/grad_norm"]}
    )
    assert together.startswith("entropy fell at step 30, then K3")


def test_huge_values_do_not_overflow() -> None:
    values = [1e-3] * 30 + [1e140] * 30
    with np.errstate(all="raise"):
        found = fit_growth(list(range(60)), values, [0.1 * value for value in values])
    assert (found.verdict, found.onset) == ("grew", 30)


def _least_squares_corner(heights: np.ndarray) -> float:
    rows, places = np.arange(len(heights)), np.arange(3, len(heights) - 3, 0.1)
    ramps = [np.stack([np.ones(len(rows)), np.maximum(rows - place, 0)], axis=1) for place in places]
    errors = [((ramp @ np.linalg.lstsq(ramp, heights, rcond=None)[0] - heights) ** 2).sum() for ramp in ramps]
    return float(places[int(np.argmin(errors))])


def test_the_onset_of_a_ramp_is_the_first_step_above_the_corner() -> None:
    """The ramp starts at step 34, which is still at the level. Step 36 is the first above it."""
    steps, noise = np.arange(0, 60, 2), np.random.default_rng(6)
    ramp = np.where(steps > 34, 0.11 * (steps - 34), 0.0)
    covered, distances = 0, []
    for _ in range(40):
        heights = ramp + noise.normal(0, 0.075, len(steps))
        found = fit_growth(steps.tolist(), (4e-4 * np.exp(heights)).tolist(), [None] * len(steps))
        assert found.onset is not None and found.onset_interval is not None
        first, last = found.onset_interval
        covered += float(first) <= 34 <= float(last)
        distances.append(float(found.onset) - 2 * _least_squares_corner(heights))
    assert covered >= 36
    assert 0 <= np.median(distances) <= 2 and max(map(abs, distances)) <= 6
