"""Simulate K3 series that grow, with a jump or a ramp of known onset and a few bad steps."""

from dataclasses import dataclass

import numpy as np

from mismatchctl.results.growth import Growth, fit_growth

LEVEL = 2e-4
SHAPES = {
    "jump": "jump",
    "logarithm": "ramp, linear in log K3",
    "noise": "ramp, linear in the square root of K3",
    "k3": "ramp, linear in K3",
}


@dataclass(frozen=True)
class GrowingRun:
    """A simulated run and its fitted growth. `onset` of a ramp is the last step at the earlier level."""

    growth: Growth
    onset: int
    factor: float
    bad_steps: list[int]

    @property
    def covered(self) -> bool:
        low, high = (float(end) for end in self.growth.onset_interval or (0, -1))
        return low <= self.onset <= high

    @property
    def width(self) -> float:
        low, high = (float(end) for end in self.growth.onset_interval or (0, 0))
        return high - low


def simulate_run(
    draw: np.random.Generator, shape: str, bad: int = 0, lengths: tuple[int, int] = (50, 2000)
) -> GrowingRun:
    """Simulate a run whose K3 grows 2x to 100x, with 8 to 512 responses per step and `bad` bad steps in a row."""
    count, responses = (int(np.exp(draw.uniform(*np.log(ends)))) for ends in (lengths, (8, 512)))
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
    growth = fit_growth(steps.tolist(), k3.tolist(), errors.tolist())
    return GrowingRun(growth, onset, float(rise[-1]), bad_steps)
