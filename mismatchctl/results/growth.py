"""Growth: whether, since when, and by what factor a metric changed over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mismatchctl.core.formatting import format_count, format_label, format_number
from mismatchctl.core.validation import FiniteModel
from mismatchctl.results.onset import SHORT_SERIES, ChangeShape, OnsetFit, extra_variance, find_bad_steps, fit_onset

Label = str | int | float | bool | None

Z_LIMIT = 4.0
"""Number of standard errors from which a change, or a mean ratio away from 1, counts."""
SMALLEST_CHANGE = 1.2
"""A smaller factor counts as steady even if it is significant."""
_SHORT_Z_LIMIT = 5.0
"""With fewer steps the scatter between steps is poorly known, so that a change must be clearer."""
_BLOCKS = 48
_ROBUST_SHARE = 1 / 3
"""Share of a change (of the logarithm) that a robust statistic must show, or else a few tokens make it."""
_SHOWN_STEPS = 5
INTERVAL_RISE = 2.71
"""Increase of the weighted squares at the ends of a 90 % interval."""

GrowthVerdict = Literal["grew", "fell", "steady", "uneven", "zero", "unknown"]


class Growth(FiniteModel):
    """A change of a metric by `factor` (95 % interval `interval`) from step `onset` to step `until`.

    `onset` is the first step above or below the earlier level, with a 95 % interval. A `jump` happens from one step to
    the next, a `ramp` takes several steps. `before` and `after` are the levels on either side of the change. `value` is
    the metric at the last step with a value. Without a significant change, `factor` and the steps are null and
    `verdict` gives the reason. `bad_steps` are a few steps far off their neighbours, which the fit leaves out.
    `driven_by` is the number of tokens that make the difference between the steps if other tokens stay the same.
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
    shape: ChangeShape | None = None
    before: float | None = None
    after: float | None = None
    bad_steps: list[str | int | float] = Field(default_factory=list)
    driven_by: int | None = None

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
        word = "at" if self.shape == "jump" else "from"
        return f"{arrow} {format_number(size)}x {word} step {format_label(self.onset)}"


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
    names = [labels[i] for i in known]
    where, height = step_positions(names), np.log(value)
    bad = find_bad_steps(height, relative)
    good = ~bad
    ramps = RampFits.fit(where[good], height[good], relative[good])
    ramp, steps = ramps.best, int(good.sum())
    if not ramp.is_significant(steps):
        found = _describe_no_change(ramps, value[good], metric, count)
    else:
        fit, bad = fit_onset(where, height, relative, bad)
        found = _describe_change(fit, names, metric, count, float(value[-1]))
    bad_names = [_label_name(names[i]) for i in np.flatnonzero(bad)]
    note = f"; without the bad {_format_steps(bad_names)}" if bad_names else ""
    return found.model_copy(update={"value": last, "text": found.text + note, "bad_steps": bad_names})


def _describe_no_change(ramps: RampFits, values: NDArray[np.float64], metric: str, steps: int) -> Growth:
    spread = f"between {format_number(values.min())} and {format_number(values.max())}"
    uneven = _is_uneven(ramps.height, ramps.error)
    text = f"no change over {steps} steps beyond the errors ({spread})"
    if uneven:
        text = f"goes up and down over {steps} steps by more than its errors, {spread}"
    return Growth(metric=metric, verdict="uneven" if uneven else "steady", steps=steps, text=text)


def _describe_change(fit: OnsetFit, names: Sequence[Label], metric: str, steps: int, last: float) -> Growth:
    factor = math.exp(fit.change)
    ends = math.exp(fit.change - 2 * fit.error), math.exp(fit.change + 2 * fit.error)
    onset, until, earliest, latest = (
        _label_name(names[place]) for place in (fit.onset, fit.end, fit.earliest, fit.latest)
    )
    shown, bounds = (factor, ends) if factor > 1 else (1 / factor, (1 / ends[1], 1 / ends[0]))
    before, after = math.exp(fit.before), math.exp(fit.before + fit.change)
    goes_on = fit.shape == "ramp" and fit.end == len(names) - 1
    when = f"at step {format_label(onset)}"
    if fit.shape == "ramp":
        when = f"from step {format_label(onset)} " + ("on" if goes_on else f"to {format_label(until)}")
    if earliest != latest:
        when += f" (onset between {format_label(earliest)} and {format_label(latest)})"
    verb = "rose" if factor > 1 else "fell"
    text = (
        f"{verb} {format_number(shown)}x ({format_number(bounds[0])} to {format_number(bounds[1])}) {when}, "
        f"from {format_number(before)} to {format_number(after)}; {format_number(last)} at the last step"
    )
    return Growth(
        metric=metric, verdict="grew" if factor > 1 else "fell", text=text,
        steps=steps, factor=factor, interval=ends, onset=onset, onset_interval=(earliest, latest),
        until=until, shape=fit.shape, before=before, after=after,
    )  # fmt: skip


@dataclass(frozen=True)
class TokenTail:
    """A robust statistic and the number of outlying tokens per step, null if undefined.

    Attributes:
        p99: 99th percentile of |log-prob difference|.
        outliers: tokens whose two probabilities differ by more than a factor of 2.
    """

    p99: Sequence[float | None]
    outliers: Sequence[float | None]


def check_outliers(growth: Growth, labels: Sequence[Label], values: Sequence[float | None], tail: TokenTail) -> Growth:
    """Compare a change of K3 with a robust statistic, and name the number of tokens that make it if they disagree.

    A change that few tokens make is one only if it also shows in the ranks of the steps: the standard error of a step
    without such a token does not include their rate.
    """
    rows = [
        (i, value, p99, count)
        for i, (value, p99, count) in enumerate(zip(values, tail.p99, tail.outliers, strict=True))
        if value and p99 and count is not None
    ]
    if growth.verdict not in ("grew", "fell", "uneven") or len(rows) < 2:
        return growth
    k3, robust, counts = (np.array(column, np.float64) for column in list(zip(*rows, strict=True))[1:])
    after = np.ones(len(rows), np.bool_)
    if growth.changed:
        first = [_label_name(label) for label in labels].index(growth.onset or "")
        after = np.array([i >= first for i, *_ in rows])
        if after.all() or not after.any():
            return growth
        sizes = [abs(float(np.median(part[after]) - np.median(part[~after]))) for part in (np.log(k3), np.log(robust))]
        sizes[0] = abs(math.log(growth.factor or 1.0))
    else:
        sizes = [float(np.ptp(part)) for part in (np.log(k3), np.log(robust))]
    tokens = round(float(counts[after if growth.verdict != "fell" else ~after].sum()))
    if not tokens or 2 * sizes[1] > _ROBUST_SHARE * sizes[0]:  # K3 goes with the square of a difference
        return growth
    is_change = growth.changed and abs(_rank_z(k3[after], k3[~after])) >= Z_LIMIT
    tokens = tokens if is_change else round(float(counts.sum()))
    named = f"driven by {format_count(tokens, 'token')} whose two probabilities differ more than 2x"
    if is_change:
        return growth.model_copy(update={"text": f"{growth.text}; {named}", "driven_by": tokens})
    text = (
        f"differs between {growth.steps} steps ({format_number(k3.min())} to {format_number(k3.max())}), {named}; "
        "other tokens show no change"
    )
    return Growth(
        metric=growth.metric, verdict="uneven", text=text, steps=growth.steps, value=growth.value, driven_by=tokens
    )


def _rank_z(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the difference of two groups' ranks in standard errors (Mann-Whitney)."""
    sizes = len(first), len(second)
    ranks = np.argsort(np.argsort(np.concatenate([first, second]))) + 1
    above = float(ranks[: sizes[0]].sum()) - sizes[0] * (sizes[0] + 1) / 2
    return (above - sizes[0] * sizes[1] / 2) / math.sqrt(sizes[0] * sizes[1] * (sum(sizes) + 1) / 12)


def _format_steps(names: Sequence[str | int | float]) -> str:
    shown = ", ".join(format_label(name) for name in names[:_SHOWN_STEPS])
    more = f" and {len(names) - _SHOWN_STEPS} more" if len(names) > _SHOWN_STEPS else ""
    return f"{'step' if len(names) == 1 else 'steps'} {shown}{more}"


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
        limit = Z_LIMIT if steps >= SHORT_SERIES else _SHORT_Z_LIMIT
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
        weight = 1 / np.maximum(error**2 + extra_variance(height, error), 1e-12)
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


def _is_uneven(height: NDArray[np.float64], error: NDArray[np.float64]) -> bool:
    """Return True if values differ by more than their errors. False if the errors are unknown."""
    if not error.any():
        return False
    variance = np.maximum(error**2, 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)
