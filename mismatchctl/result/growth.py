"""Whether a metric changed over the steps, since when and how far: the one model of it, whoever asks.

On the logarithm: a level, a straight line, another level; a jump is a line of one step, growth that goes on ends with
the run. Each step weighs by its standard error and by the scatter from step to step that the errors do not explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.finite import FiniteModel
from mismatchctl.numbers import label, number

Label = str | int | float | bool | None

Z_LIMIT = 4.0
"""A change, or a mean ratio off 1, counts from this many standard errors on."""
SMALLEST_CHANGE = 1.2
"""A smaller factor is called steady, however significant."""
_SHORT, _SHORT_Z_LIMIT = 6, 5.0
"""Over fewer steps the scatter between steps is hardly known: a change must stand out more."""
_BLOCKS = 48
_MEDIAN_OF_CHI2 = 0.4549
_WITHIN = 2.71
"""Rise of the weighted squares that bounds a 90 % interval."""

Verdict = Literal["grew", "fell", "steady", "uneven", "zero", "unknown"]


class Growth(FiniteModel):
    """A change of `factor` (with its 95 % interval) of a metric, from the step `onset` on, up to the step `until`.

    `onset` is the first step that is off the level before, `onset_interval` a 90 % one; `value` is the metric at the
    last step that has one. Without a change beyond the errors, `factor` and the steps are null, and `verdict` says
    what there is instead. `text` says it all.
    """

    metric: str = "k3"
    verdict: Verdict
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
    def brief(self) -> str:
        """The same in a table cell."""
        if self.factor is None:
            return self.text.split(" over ")[0]
        arrow, size = ("▲", self.factor) if self.factor > 1 else ("▼", 1 / self.factor)
        return f"{arrow} {number(size)}-fold, from step {label(self.onset)}"


def growth_of(
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
            largest = number(max(values[i] or 0.0 for i in positive))
            text = f"0 at {count - len(positive)} of {count} steps, up to {largest} at others"
        return Growth(metric=metric, verdict="uneven" if positive else "zero", steps=count, value=last, text=text)
    value = np.array([values[i] for i in known], np.float64)
    relative = np.array([(errors[i] or 0.0) / (values[i] or 1.0) for i in known])
    blocks = [part.astype(np.int64) for part in np.array_split(np.arange(count), min(count, _BLOCKS))]
    height = np.array([np.log(value[part]).mean() for part in blocks])
    error = np.array([math.sqrt(float((relative[part] ** 2).sum())) / len(part) for part in blocks])
    names = [(labels[known[int(part[0])]], labels[known[int(part[-1])]]) for part in blocks]
    return _told(names, height, error, value, metric)


def _told(
    names: Sequence[tuple[Label, Label]], height: NDArray[np.float64], error: NDArray[np.float64],
    values: NDArray[np.float64], metric: str,
) -> Growth:  # fmt: skip
    ramp, steps = best_ramp(height, error), len(values)
    limit = Z_LIMIT if steps >= _SHORT else _SHORT_Z_LIMIT
    factor, last = math.exp(ramp.change), float(values[-1])
    if abs(ramp.change) < limit * ramp.error or max(factor, 1 / factor) < SMALLEST_CHANGE:
        spread = f"between {number(values.min())} and {number(values.max())}"
        uneven = _uneven(height, error)
        text = f"no change over {steps} steps beyond the errors ({spread})"
        if uneven:
            text = f"goes up and down over {steps} steps by more than its errors, {spread}"
        verdict: Verdict = "uneven" if uneven else "steady"
        return Growth(metric=metric, verdict=verdict, steps=steps, value=last, text=text)
    ends = math.exp(ramp.change - 2 * ramp.error), math.exp(ramp.change + 2 * ramp.error)
    onset, until = (_named(names[place][0]) for place in (ramp.start + 1, ramp.end))
    earliest, latest = (_named(names[place + 1][0]) for place in ramp.starts)
    shown, bounds = (factor, ends) if factor > 1 else (1 / factor, (1 / ends[1], 1 / ends[0]))
    goes_on = ramp.end == len(names) - 1
    text = f"{'grew' if factor > 1 else 'fell'} {number(shown)}-fold ({number(bounds[0])} to {number(bounds[1])}) "
    text += f"at step {label(onset)}" if onset == until and not goes_on else f"from step {label(onset)} on"
    text += "" if earliest == latest else f" (onset between {label(earliest)} and {label(latest)})"
    text += f", up to step {label(until)}" if not goes_on and onset != until else ""
    return Growth(
        metric=metric, verdict="grew" if factor > 1 else "fell", text=f"{text}; {number(last)} at the last step",
        steps=steps, value=last, factor=factor, interval=ends, onset=onset, onset_interval=(earliest, latest),
        until=_named(names[ramp.end][1]),
    )  # fmt: skip


def _named(value: Label) -> str | int | float:
    return label(value) if value is None else value


@dataclass(frozen=True)
class Ramp:
    """A change that begins after `start` and is over at `end`; `starts` are the first and last that fit as well."""

    start: int
    end: int
    change: float
    error: float
    starts: tuple[int, int]


def best_ramp(height: NDArray[np.float64], error: NDArray[np.float64]) -> Ramp:
    """Level, straight line, level: least weighted squares over all pairs of corners of a series [N]."""
    variance = np.maximum(error**2 + _extra_variance(height, error), 1e-12)
    weight, where = 1 / variance, np.arange(len(height), dtype=np.float64)
    mean_height = (height * weight).sum() / weight.sum()
    lowest = np.full(len(height) - 1, math.inf)
    best, least = (0, len(height) - 1, 0.0, math.inf), math.inf
    for start in range(len(height) - 1):
        ends = np.arange(start + 1, len(height))
        rise = np.clip((where[None, :] - start) / (ends - start)[:, None], 0, 1)
        mean_rise = (rise * weight).sum(axis=1, keepdims=True) / weight.sum()
        spread = ((rise - mean_rise) ** 2 * weight).sum(axis=1)
        change = ((rise - mean_rise) * (height - mean_height) * weight).sum(axis=1) / spread
        left = height - mean_height - change[:, None] * (rise - mean_rise)
        squares = (left**2 * weight).sum(axis=1)
        found = int(np.argmin(squares))
        lowest[start] = squares[found]
        if squares[found] < least:
            least = float(squares[found])
            best = start, int(ends[found]), float(change[found]), float(spread[found])
    start, end, size, across = best
    scale = max(1.0, least / max(len(height) - 4, 1))
    near = np.flatnonzero(lowest <= least + _WITHIN * scale)
    return Ramp(start, end, size, math.sqrt(scale / across), (int(near[0]), int(near[-1])))


def _extra_variance(height: NDArray[np.float64], error: NDArray[np.float64]) -> float:
    """Scatter between neighbouring steps beyond their errors, by the median so that a jump does not count."""
    steps = np.diff(height)
    if len(height) < _SHORT:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def _uneven(height: NDArray[np.float64], error: NDArray[np.float64]) -> bool:
    """Whether the values differ by more than their errors explain, whatever the pattern."""
    variance = np.maximum(error**2, 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)
