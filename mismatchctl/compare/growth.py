"""Whether a metric grows faster on one side than on the other, and whether it began to at another step.

On the logarithm, over numbered steps. Growth: a straight line over all steps. Onset: a level that breaks into a line.
Both by least squares; residuals that go together count as fewer. Slopes are told apart by Welch's test, onsets by how
much worse one common onset fits than each side's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.compare.model import CONFIDENCE, Grown, Growth
from mismatchctl.predict.trend import FEWEST, effective_residuals, student
from mismatchctl.result import RunResult

HEADLINE = "k3"


@dataclass(frozen=True)
class _Series:
    """A metric over numbered steps: `steps` [N] ascending, `heights` the logarithms of its values [N]."""

    steps: Float64s
    heights: Float64s

    @classmethod
    def of(cls, run: RunResult, key: str) -> _Series | str:
        """The series of a run, or why it has none."""
        series = run.groups.metrics.get(key)
        pairs = [] if series is None else zip(run.groups.labels, series.value, strict=True)
        known = sorted(
            (float(step), value)
            for step, value in pairs
            if isinstance(step, (int, float)) and not isinstance(step, bool) and value is not None
        )
        if len({step for step, _ in known}) < FEWEST:
            return f"fewer than {FEWEST} numbered steps on a side"
        if any(value <= 0 for _, value in known):
            return "not above 0 at every step"
        steps, values = np.array(known).T
        return cls(steps, np.log(values))

    def line(self) -> tuple[float, float, float]:
        """Slope a step, its standard error, and its degrees of freedom."""
        centred = self.steps - self.steps.mean()
        slope = float((centred * self.heights).sum() / (centred**2).sum())
        residual = self.heights - self.heights.mean() - slope * centred
        count = effective_residuals(residual, len(residual))
        variance = float((residual**2).sum()) / (count - 2)
        return slope, math.sqrt(variance * len(residual) / count / float((centred**2).sum())), count - 2

    def broken(self, onset: float) -> float:
        """Sum of the squares that a level up to `onset` and a line from there leave."""
        rise = np.maximum(self.steps - onset, 0.0)
        rise -= rise.mean()
        level = self.heights - self.heights.mean()
        size = float((rise**2).sum())
        left = level - (float((rise * level).sum()) / size if size else 0.0) * rise
        return float((left**2).sum())


@dataclass(frozen=True)
class _Onsets:
    """How badly each onset fits one side, in units of what chance leaves [K]; 0 at the best.

    `rises` says whether a line that rises from the best one fits beyond chance.
    """

    steps: Float64s
    deviance: Float64s
    rises: bool

    @classmethod
    def of(cls, series: _Series, tried: Float64s) -> _Onsets:
        left = np.array([series.broken(onset) for onset in tried.tolist()])
        rise = np.maximum(series.steps - tried[int(left.argmin())], 0.0)
        line = np.polynomial.Polynomial.fit(rise, series.heights, 1).convert()
        count = effective_residuals(series.heights - line(rise), len(rise))
        variance = max(float(left.min()) / max(count - 3, 1.0) * len(rise) / count, np.finfo(np.float64).tiny)
        flat = float(((series.heights - series.heights.mean()) ** 2).sum())
        rises = line.coef[-1] > 0 and (flat - float(left.min())) / variance > _RISES
        return cls(tried, (left - left.min()) / variance, bool(rises))

    @property
    def best(self) -> float:
        return float(self.steps[int(self.deviance.argmin())])

    def interval(self) -> tuple[float, float]:
        """The onsets that fit nearly as well."""
        inside = self.steps[self.deviance <= _CRITICAL]
        return float(inside[0]), float(inside[-1])


_CRITICAL = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
_RISES = 9.2  # chi-square of two parameters, a slope and its onset, at 1 %


def growth(reference: RunResult, other: RunResult, key: str = HEADLINE) -> Growth:
    """Slopes and onsets of a metric on both sides, and their differences (other minus reference)."""
    found = [_Series.of(run, key) for run in (reference, other)]
    why = next((series for series in found if isinstance(series, str)), "")
    if why:
        return Growth(metric=key, status=why)
    both = [series for series in found if isinstance(series, _Series)]
    lines = [series.line() for series in both]
    difference = lines[1][0] - lines[0][0]
    error = math.hypot(lines[0][1], lines[1][1])
    freedom = error**4 / sum(se**4 / degrees for _, se, degrees in lines) if error else 1.0
    reach = student((1 + CONFIDENCE) / 2, freedom) * error
    grown = Growth(
        metric=key, sides=[_grown(series, line) for series, line in zip(both, lines, strict=True)],
        difference=difference, interval=(difference - reach, difference + reach), significant=abs(difference) > reach,
    )  # fmt: skip
    if all(side.onset is not None for side in grown.sides):
        tried = np.union1d(both[0].steps[:-2], both[1].steps[:-2])
        common = sum(_Onsets.of(series, tried).deviance for series in both)
        grown.onsets_differ = float(np.min(common)) > _CRITICAL
    return grown


def _grown(series: _Series, line: tuple[float, float, float]) -> Grown:
    slope, error, freedom = line
    reach = student((1 + CONFIDENCE) / 2, freedom) * error
    onsets = _Onsets.of(series, series.steps[:-2])
    side = Grown(slope=slope, se=error, grows=slope > reach or onsets.rises, steps=len(series.steps))
    if onsets.rises:
        side.onset, side.onset_interval = onsets.best, onsets.interval()
    return side
