"""Growth: whether a metric changed over the steps, since when, and by what factor."""

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
"""A change, or a mean ratio off 1, counts from this many standard errors on."""
SMALLEST_CHANGE = 1.2
"""A smaller factor is called steady, however significant."""
_SHORT_SERIES, _SHORT_Z_LIMIT = 6, 5.0
"""Over fewer steps the scatter between steps is hardly known: a change must stand out more."""
_BLOCKS = 48
_MEDIAN_OF_CHI2 = 0.4549
INTERVAL_RISE = 2.71
"""Rise of the weighted squares that bounds a 90 % interval."""

GrowthVerdict = Literal["grew", "fell", "steady", "uneven", "zero", "unknown"]


class Growth(FiniteModel):
    """A change of `factor` (with its 95 % interval) of a metric, from the step `onset` on, up to the step `until`.

    `onset` is the first step that is off the level before, `onset_interval` a 90 % one; `value` is the metric at the
    last step that has one. Without a change beyond the errors, `factor` and the steps are null, and `verdict` says
    what there is instead. `text` says it all.
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
        """Whether there is a change beyond the errors."""
        return self.factor is not None

    @property
    def z(self) -> float | None:
        """The change of the logarithm in standard errors."""
        if self.factor is None or self.interval is None:
            return None
        return math.log(self.factor) * 4 / math.log(self.interval[1] / self.interval[0])

    @property
    def brief(self) -> str:
        """The same in a table cell."""
        if self.factor is None:
            return self.text.split(" over ")[0]
        arrow, size = ("▲", self.factor) if self.factor > 1 else ("▼", 1 / self.factor)
        return f"{arrow} {format_number(size)}-fold, from step {format_label(self.onset)}"


def fit_growth(
    labels: Sequence[Label], values: Sequence[float | None], errors: Sequence[float | None], metric: str = "k3"
) -> Growth:
    """Find the one ramp that describes a positive series best; it is a change if it stands out from the errors.

    Args:
        labels: of the steps, in order.
        values: the metric at each; None where it is undefined.
        errors: their standard errors; None where there is none.
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
    ramps = RampFits.over(step_positions([labels[i] for i in known]), np.log(value), relative)
    names = [(labels[known[int(part[0])]], labels[known[int(part[-1])]]) for part in step_blocks(count)]
    return _describe_growth(names, ramps, value, metric)


def _describe_growth(
    names: Sequence[tuple[Label, Label]], ramps: RampFits, values: NDArray[np.float64], metric: str
) -> Growth:
    ramp, steps = ramps.best, len(values)
    factor, last = math.exp(ramp.change), float(values[-1])
    if not ramp.stands_out(steps):
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
    text = f"{'grew' if factor > 1 else 'fell'} {format_number(shown)}-fold ({format_number(bounds[0])} to {format_number(bounds[1])}) "
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
    """Where steps lie: at their numbers, if all have one and these ascend, else one after another."""
    numbered = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in labels)
    where = np.array(labels, np.float64) if numbered else np.zeros(0)
    ascend = len(where) > 1 and bool(np.isfinite(where).all() and (np.diff(where) > 0).all())
    return where if ascend else np.arange(len(labels), dtype=np.float64)


def step_blocks(count: int) -> list[NDArray[np.int64]]:
    """Steps in blocks that are looked at as one, where there are many."""
    return [part.astype(np.int64) for part in np.array_split(np.arange(count), min(count, _BLOCKS))]


@dataclass(frozen=True)
class Ramp:
    """A change that begins after the block `start` and is over at `end`; `starts`: the first and last that fit."""

    start: int
    end: int
    change: float
    error: float
    starts: tuple[int, int]

    def stands_out(self, steps: int) -> bool:
        """Whether it is a change, of a series of so many steps."""
        limit = Z_LIMIT if steps >= _SHORT_SERIES else _SHORT_Z_LIMIT
        return abs(self.change) >= limit * self.error and abs(self.change) >= math.log(SMALLEST_CHANGE)


@dataclass(frozen=True)
class RampFits:
    """Every level, straight line, level [K] that a series may be, by least weighted squares.

    Attributes:
        where, height, error: the series, by blocks [N].
        start, end: corners, as blocks [K].
        change: from level to level [K].
        rise: mean part of the change that the blocks have made, by weight [K].
        spread: weighted squares of that part around its mean [K].
        squares: weighted squares that are left [K].
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
    def over(cls, where: NDArray[np.float64], height: NDArray[np.float64], error: NDArray[np.float64]) -> RampFits:
        """Fit all of them to a series of at least two steps [S]; `error` is the standard error of each height."""
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

    def risen(self, where: NDArray[np.float64]) -> NDArray[np.float64]:
        """Parts of the change that each has made at places [K, P]; those that end with the series go on beyond it."""
        corners = self.where[self.start, None], self.where[self.end, None]
        part = np.maximum((where - corners[0]) / (corners[1] - corners[0]), 0)
        goes_on = self.end[:, None] == len(self.where) - 1
        return np.asarray(np.where(goes_on, part, np.minimum(part, 1)))

    def at(self, where: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values of each at places [K, P]."""
        return np.asarray(self.middle + self.change[:, None] * (self.risen(where) - self.rise[:, None]))

    @property
    def scale(self) -> float:
        """By how much the errors fall short of what the best leaves."""
        return max(1.0, float(self.squares.min()) / max(len(self.height) - 4, 1))

    @property
    def near(self) -> NDArray[np.bool_]:
        """Which fit nearly as well as the best."""
        return np.asarray(self.squares <= self.squares.min() + INTERVAL_RISE * self.scale)

    @property
    def best(self) -> Ramp:
        """The one that fits best."""
        found, starts = int(np.argmin(self.squares)), self.start[self.near]
        error = math.sqrt(self.scale / float(self.spread[found]))
        return Ramp(
            int(self.start[found]), int(self.end[found]), float(self.change[found]), error,
            (int(starts.min()), int(starts.max())),
        )  # fmt: skip


def _extra_variance(height: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    """Scatter between neighbouring steps beyond their errors, by the median so that a jump does not count."""
    steps = np.diff(height)
    if len(height) < _SHORT_SERIES:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def _is_uneven(height: NDArray[np.float64], error: NDArray[np.float64]) -> bool:
    """Whether the values differ by more than their errors explain, whatever the pattern; no, if errors are unknown."""
    if not error.any():
        return False
    variance = np.maximum(error**2, 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)
