"""Where a trend over steps leads, or that there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.predict.prediction import LEVEL, Prediction, unknown

FEWEST = 8
"""Steps below which no trend is looked for."""
SIGNIFICANT = 0.05
_MODEL = (
    "a straight line over steps of {scale}, its interval from its own residuals, whose autocorrelation makes them "
    "count as fewer"
)


def at_step(
    quantity: str, steps: Sequence[object], values: Sequence[float | None], ahead: float, *, is_fraction: bool = False
) -> Prediction:
    """A metric's value so many steps after the last, if its trend over steps goes on.

    Without a significant slope, the value is the mean over steps and the status says "no trend".

    Args:
        quantity: registry key of the metric.
        steps: labels of the groups; those that are no number are left out.
        values: the metric in each group; None where it is undefined.
        ahead: steps after the last one, in the unit of the labels.
        is_fraction: whether values lie in [0, 1].
    """
    question = f"{ahead:+g} steps"
    scale = "log odds" if is_fraction else "the logarithm"
    pairs = [
        (float(step), float(value))
        for step, value in zip(steps, values, strict=True)
        if isinstance(step, (int, float)) and not isinstance(step, bool) and value is not None
    ]
    different = len({step for step, _ in pairs})
    if different < FEWEST:
        return unknown(
            question, quantity, f"{different} steps with a number: too few for a trend", _MODEL.format(scale=scale)
        )
    x, y = np.array(sorted(pairs)).T
    straight = _Scale(y, is_fraction)
    model = _MODEL.format(scale=straight.words)
    place, slope, spread = _line(x, straight.forth(y), float(x[-1]) + ahead)
    if abs(slope) <= 1:
        centre = straight.forth(y)
        place, spread = float(centre.mean()), _flat_spread(centre)
    low, high = (float(straight.back(np.array(place + side * spread))) for side in (-1, 1))
    status = "ok" if abs(slope) > 1 else "no trend"
    if ahead > x[-1] - x[0]:
        status = f"too far: the dump spans {x[-1] - x[0]:g} steps" if status == "ok" else status
    return Prediction(question, quantity, float(straight.back(np.array(place))), (low, high), status, model)


class _Scale:
    """The scale on which a line is drawn: log odds of fractions, the logarithm of what is positive, else as it is."""

    def __init__(self, values: Float64s, is_fraction: bool) -> None:
        self.is_fraction = is_fraction
        self.is_log = not is_fraction and bool((values > 0).all())
        inner = values[(values > 0) & (values < 1)] if is_fraction else values
        self.edge = float(np.minimum(inner, 1 - inner).min(initial=0.5)) / 2 if is_fraction else 0.0
        self.words = "log odds" if is_fraction else "the logarithm" if self.is_log else "the value"

    def forth(self, values: Float64s) -> Float64s:
        if self.is_fraction:  # 0 and 1 become half of the smallest distance that was seen
            inner = np.clip(values, self.edge, 1 - self.edge)
            return np.asarray(np.log(inner) - np.log1p(-inner))
        return np.asarray(np.log(values)) if self.is_log else values

    def back(self, values: Float64s) -> Float64s:
        if self.is_fraction:
            return np.asarray(1 / (1 + np.exp(-values)))
        return np.asarray(np.exp(values)) if self.is_log else values


def _line(x: Float64s, y: Float64s, where: float) -> tuple[float, float, float]:
    """Value of the line at `where`, its slope in units of what is significant, and half the width of its interval."""
    n, centre = len(x), x - x.mean()
    spread_x = float((centre**2).sum())
    slope = float((centre * y).sum()) / spread_x
    residual = y - y.mean() - slope * centre
    effective = effective_residuals(residual, n)
    variance = float((residual**2).sum()) / max(effective - 2, 1)
    error = math.sqrt(variance * n / effective / spread_x)
    limit = student(1 - SIGNIFICANT / 2, effective - 2) * error
    distance = where - float(x.mean())
    width = math.sqrt(variance * (1 + 1 / effective + distance**2 * n / effective / spread_x))
    significance = math.inf if limit == 0 and slope else slope / limit if limit else 0.0
    return float(y.mean()) + slope * distance, significance, student((1 + LEVEL) / 2, effective - 2) * width


def _flat_spread(y: Float64s) -> float:
    """Half the width of the interval of one more value, where there is no trend."""
    effective = effective_residuals(y - y.mean(), len(y))
    variance = float(((y - y.mean()) ** 2).sum()) / max(effective - 1, 1)
    return student((1 + LEVEL) / 2, effective - 1) * math.sqrt(variance * (1 + 1 / effective))


def effective_residuals(residual: Float64s, n: int) -> float:
    """How many independent residuals they are worth, at least 4."""
    total = float((residual**2).sum())
    rho = float((residual[1:] * residual[:-1]).sum()) / total if total > 0 else 0.0
    rho = min(max(rho + (1 + 3 * rho) / n, 0.0), 0.9)  # of few residuals, it is estimated too low
    return max(n * (1 - rho) / (1 + rho), 4.0)


def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t for a probability above 1/2; with t = sqrt(freedom) tan(angle) its density is a power."""
    angles = np.linspace(0, math.pi / 2, 1 << 14)
    density = np.cos(angles).clip(0) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, area / area[-1], angles)))
