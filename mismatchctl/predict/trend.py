"""Where a trend over steps leads, or that there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.numbers import label
from mismatchctl.predict.prediction import LEVEL, Prediction, unknown
from mismatchctl.result.growth import WITHIN, Ramps, blocks_of

FEWEST = 8
"""Steps below which no trend is looked for."""
_MODEL = (
    "the growth that the story of a run tells: a level, a straight line, a level, of {scale}; the interval is of the "
    "lines that fit, with the scatter of the steps, which count as fewer where neighbours go together"
)


def at_step(
    quantity: str, steps: Sequence[object], values: Sequence[float | None], ahead: float, *, is_fraction: bool = False
) -> Prediction:
    """A metric's value so many steps after the last, if its growth goes on.

    Without a change over the steps, the value is their mean and the status says "no trend"; where a change is over, it
    is the level after it.

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
    place, spread, status = _ahead(x, straight.forth(y), float(x[-1]) + ahead)
    low, high = (float(straight.back(np.array(place + side * spread))) for side in (-1, 1))
    if ahead > x[-1] - x[0] and status == "ok":
        status = f"too far: the dump spans {x[-1] - x[0]:g} steps"
    return Prediction(question, quantity, float(straight.back(np.array(place))), (low, high), status, model)


def _ahead(x: Float64s, y: Float64s, where: float) -> tuple[float, float, str]:
    """Value of a series at `where`, half the width of its interval, and what is to be known of it."""
    ramps = Ramps.over(x, y, np.zeros_like(y))
    best = ramps.best
    if not best.stands_out(len(y)):
        return float(y.mean()), _flat_spread(y), "no trend"
    left = y - ramps.at(x)[int(ramps.squares.argmin())]
    effective = effective_residuals(left, len(left))
    variance = float((left**2).sum()) / (max(effective - 4, 1))
    scale = ramps.scale * len(y) / effective
    on, worse = ramps.end == len(ramps.height) - 1, (ramps.squares - ramps.squares.min()) / scale
    goes_on = bool((worse <= WITHIN)[on].any())
    likely = np.exp(-worse / 2) * (on == goes_on)
    likely /= likely.sum()
    values = ramps.at(np.array([where]))[:, 0]
    value = float(likely @ values)
    errors = scale * (1 / ramps.weight + (ramps.risen(np.array([where]))[:, 0] - ramps.rise) ** 2 / ramps.spread)
    width = math.sqrt(variance + float(likely @ (errors + (values - value) ** 2)))
    status = "ok" if goes_on else f"no trend since step {label(float(x[blocks_of(len(x))[best.end][-1]]))}"
    return value, student((1 + LEVEL) / 2, max(effective - 4, 1)) * width, status


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
