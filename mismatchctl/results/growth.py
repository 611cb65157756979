"""Growth: whether, since when, and by what factor a metric changed over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.formatting import format_label, format_number
from mismatchctl.core.validation import FiniteModel

Label = str | int | float | bool | None

Z_LIMIT = 4.0
"""Number of standard errors from which a change, or a mean ratio away from 1, counts."""
SMALLEST_CHANGE = 1.2
"""A smaller factor counts as steady even if it is significant."""
_SHORT_SERIES, _SHORT_Z_LIMIT = 6, 5.0
"""With fewer steps the scatter between steps is poorly known, so that a change must be clearer."""
_BLOCKS = 48
_MEDIAN_OF_CHI2 = 0.4549
INTERVAL_RISE = 2.71
"""Increase of the weighted squares at the ends of a 90 % interval."""

GrowthVerdict = Literal["grew", "fell", "steady", "uneven", "zero", "unknown"]


class Growth(FiniteModel):
    """A change of a metric by `factor` (95 % interval `interval`) from step `onset` to step `until`.

    `onset` is the first step above or below the earlier level, with a 90 % interval. `value` is the metric at the last
    step with a value. Without a significant change, `factor` and the steps are null and `verdict` gives the reason.
    `text` describes the result.
    """

    metric: str = "k3"
    verdict: GrowthVerdict
    text: str
    steps: int
    value: float | None = None
    factor: float | None = None
    interval: tuple[float, float] | None = None
    onset: str | int | float | None = None
    onset_interval: tuple[str | int | float, str | int | float] | None = None
    until: str | int | float | None = None

    @property
    def changed(self) -> bool:
        """True if there is a significant change."""
        return self.factor is not None

    @property
    def z(self) -> float | None:
        """Change of the logarithm in standard errors."""
        if self.factor is None or self.interval is None:
            return None
        return math.log(self.factor) * 4 / math.log(self.interval[1] / self.interval[0])

    @property
    def brief(self) -> str:
        """Description for a table cell."""
        if self.factor is None:
            return self.text.split(" over ")[0]
        arrow, size = ("▲", self.factor) if self.factor > 1 else ("▼", 1 / self.factor)
        return f"{arrow} {format_number(size)}-fold, from step {format_label(self.onset)}"


def fit_growth(
    labels: Sequence[Label], values: Sequence[float | None], errors: Sequence[float | None], metric: str = "k3"
) -> Growth:
    """Fit the best ramp to a positive series. It counts as a change if it is significant.

    Args:
        labels: of the steps, in order.
        values: the metric per step, null if it is undefined.
        errors: standard errors, null if unknown.
        metric: its key.
    """
    known = [i for i, value in enumerate(values) if value is not None]
    positive = [i for i in known if (values[i] or 0.0) > 0]
    count, last = len(known), values[known[-1]] if known else None
    if count < 2:
        return Growth(metric=metric, verdict="unknown", steps=count, value=last,
                      text="one step only" if known else "undefined at every step")  # fmt: skip
    if len(positive) < count:
        text = f"0 at all {count} steps"
        if positive:
            largest = format_number(max(values[i] or 0.0 for i in positive))
            text = f"0 at {count - len(positive)} of {count} steps, up to {largest} at others"
        return Growth(metric=metric, verdict="uneven" if positive else "zero", steps=count, value=last, text=text)
    value = np.array([values[i] for i in known], np.float64)
    relative = np.array([(errors[i] or 0.0) / (values[i] or 1.0) for i in known])
    ramps = RampFits.fit(step_positions([labels[i] for i in known]), np.log(value), relative)
    names = [(labels[known[int(part[0])]], labels[known[int(part[-1])]]) for part in step_blocks(count)]
    return _describe_growth(names, ramps, value, metric)


def _describe_growth(
    names: Sequence[tuple[Label, Label]], ramps: RampFits, values: NDArray[np.float64], metric: str
) -> Growth:
    ramp, steps = ramps.best, len(values)
    factor, last = math.exp(ramp.change), float(values[-1])
    if not ramp.is_significant(steps):
        spread = f"between {format_number(values.min())} and {format_number(values.max())}"
        uneven = _is_uneven(ramps.height, ramps.error)
        text = f"no change over {steps} steps beyond the errors ({spread})"
        if uneven:
            text = f"goes up and down over {steps} steps by more than its errors, {spread}"
        verdict: GrowthVerdict = "uneven" if uneven else "steady"
        return Growth(metric=metric, verdict=verdict, steps=steps, value=last, text=text)
    ends = math.exp(ramp.change - 2 * ramp.error), math.exp(ramp.change + 2 * ramp.error)
    onset, until = (_label_name(names[place][0]) for place in (ramp.start + 1, ramp.end))
    earliest, latest = (_label_name(names[place + 1][0]) for place in ramp.starts)
    shown, bounds = (factor, ends) if factor > 1 else (1 / factor, (1 / ends[1], 1 / ends[0]))
    goes_on = ramp.end == len(names) - 1
    verb = "grew" if factor > 1 else "fell"
    text = f"{verb} {format_number(shown)}-fold ({format_number(bounds[0])} to {format_number(bounds[1])}) "
    text += (
        f"at step {format_label(onset)}" if onset == until and not goes_on else f"from step {format_label(onset)} on"
    )
    text += "" if earliest == latest else f" (onset between {format_label(earliest)} and {format_label(latest)})"
    text += f", up to step {format_label(until)}" if not goes_on and onset != until else ""
    return Growth(
        metric=metric, verdict="grew" if factor > 1 else "fell", text=f"{text}; {format_number(last)} at the last step",
        steps=steps, value=last, factor=factor, interval=ends, onset=onset, onset_interval=(earliest, latest),
        until=_label_name(names[ramp.end][1]),
    )  # fmt: skip


def _label_name(value: Label) -> str | int | float:
    return format_label(value) if value is None else value


def step_positions(labels: Sequence[Label]) -> NDArray[np.float64]:
    """Return the positions of steps: their numbers if all are ascending numbers, else 0, 1, 2, ..."""
    numbered = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in labels)
    where = np.array(labels, np.float64) if numbered else np.zeros(0)
    ascend = len(where) > 1 and bool(np.isfinite(where).all() and (np.diff(where) > 0).all())
    return where if ascend else np.arange(len(labels), dtype=np.float64)


def step_blocks(count: int) -> list[NDArray[np.int64]]:
    """Split the steps into a limited number of blocks."""
    return [part.astype(np.int64) for part in np.array_split(np.arange(count), min(count, _BLOCKS))]


@dataclass(frozen=True)
class Ramp:
    """A change from block `start` to block `end`. `starts` are the first and last start within the interval."""

    start: int
    end: int
    change: float
    error: float
    starts: tuple[int, int]

    def is_significant(self, steps: int) -> bool:
        """Return True if the change is significant in a series with this number of steps."""
        limit = Z_LIMIT if steps >= _SHORT_SERIES else _SHORT_Z_LIMIT
        return abs(self.change) >= limit * self.error and abs(self.change) >= math.log(SMALLEST_CHANGE)


@dataclass(frozen=True)
class RampFits:
    """All ramps (level, straight line, level) [K] on a series, each fitted by weighted least squares.

    Attributes:
        where, height, error: the series by blocks [N].
        start, end: corners, as blocks [K].
        change: difference between the levels [K].
        rise: weighted mean of the completed part of the change [K].
        spread: weighted squares of that part around its mean [K].
        squares: weighted squares of the residuals [K].
        middle, weight: weighted mean of the series, and the sum of its weights.
    """

    where: NDArray[np.float64]
    height: NDArray[np.float64]
    error: NDArray[np.float64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    change: NDArray[np.float64]
    rise: NDArray[np.float64]
    spread: NDArray[np.float64]
    squares: NDArray[np.float64]
    middle: float
    weight: float

    @classmethod
    def fit(cls, where: NDArray[np.float64], height: NDArray[np.float64], error: NDArray[np.float64]) -> RampFits:
        """Fit all ramps to a series of at least two steps [S]. `error` is the standard error of each height."""
        blocks = step_blocks(len(height))
        error = np.array([math.sqrt(float((error[part] ** 2).sum())) / len(part) for part in blocks])
        where, height = (np.array([series[part].mean() for part in blocks]) for series in (where, height))
        weight = 1 / np.maximum(error**2 + _extra_variance(height, error), 1e-12)
        total, middle = float(weight.sum()), float((height * weight).sum() / weight.sum())
        start, end = np.triu_indices(len(height), 1)
        risen = np.clip((where - where[start, None]) / (where[end] - where[start])[:, None], 0, 1)
        rise = (risen * weight).sum(axis=1) / total
        centred = risen - rise[:, None]
        spread = (centred**2 * weight).sum(axis=1)
        change = (centred * (height - middle) * weight).sum(axis=1) / spread
        squares = ((height - middle - change[:, None] * centred) ** 2 * weight).sum(axis=1)
        return cls(where, height, error, start, end, change, rise, spread, squares, middle, total)

    def progress(self, where: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the completed part of each change at positions [K, P]. A ramp at the end of the series continues."""
        corners = self.where[self.start, None], self.where[self.end, None]
        part = np.maximum((where - corners[0]) / (corners[1] - corners[0]), 0)
        goes_on = self.end[:, None] == len(self.where) - 1
        return np.asarray(np.where(goes_on, part, np.minimum(part, 1)))

    def evaluate(self, where: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the value of each ramp at positions [K, P]."""
        return np.asarray(self.middle + self.change[:, None] * (self.progress(where) - self.rise[:, None]))

    @property
    def scale(self) -> float:
        """Factor by which the errors underestimate the residuals of the best ramp, at least 1."""
        return max(1.0, float(self.squares.min()) / max(len(self.height) - 4, 1))

    @property
    def near(self) -> NDArray[np.bool_]:
        """Flags of the ramps that fit nearly as well as the best."""
        return np.asarray(self.squares <= self.squares.min() + INTERVAL_RISE * self.scale)

    @property
    def best(self) -> Ramp:
        """The best ramp."""
        found, starts = int(np.argmin(self.squares)), self.start[self.near]
        error = math.sqrt(self.scale / float(self.spread[found]))
        return Ramp(
            int(self.start[found]), int(self.end[found]), float(self.change[found]), error,
            (int(starts.min()), int(starts.max())),
        )  # fmt: skip


def _extra_variance(height: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    """Return the variance between neighbouring steps in excess of their errors. The median ignores jumps."""
    steps = np.diff(height)
    if len(height) < _SHORT_SERIES:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def _is_uneven(height: NDArray[np.float64], error: NDArray[np.float64]) -> bool:
    """Return True if values differ by more than their errors. False if the errors are unknown."""
    if not error.any():
        return False
    variance = np.maximum(error**2, 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)
