"""Growth of a metric over the steps: the start of the change, and its factor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import INTERVAL_Z, format_count, format_label, format_number
from mismatchctl.core.validation import FiniteModel

ChangeShape = Literal["jump", "ramp"]

SHORT_SERIES = 6
"""Series with fewer steps are too short to estimate the variance between neighboring steps."""
_MEDIAN_OF_CHI2 = 0.4549
_INTERVAL_RISE = 7.35
"""The onset's 95% interval contains the steps with a scaled squared error up to 7.35 above the best (Hansen 2000)."""
_POWERS = (0.0, 0.5, 1.0)
"""A slow change is fitted by a straight line to log(metric), to its square root, and to the metric itself."""
_DURATION_RATIO, _MOST_STARTS, _MOST_ENDS = 1.15, 4096, 30
_WINDOW = 5  # the running median of a step includes this number of steps before it and after it


@dataclass(frozen=True)
class OnsetFit:
    """The jump or ramp that best fits the logarithm of a series. `before` and `change` are logarithms."""

    onset: int  # index of the first step that leaves the old level
    end: int  # index of the last step of the change
    earliest: int  # with `latest`: 95% interval of the onset
    latest: int
    shape: ChangeShape
    corners: tuple[float, float]  # step numbers between which the change happens
    power: float  # see _POWERS
    before: float
    change: float
    error: float  # standard error of the change

    def at(self, where: Float64s) -> Float64s:
        return self.before + self.change * _completed_part(where, *self.corners, self.power, self.change)


def extra_variance(height: Float64s, error: Float64s) -> float:
    """Return the variance from step to step that `error` does not explain. A single jump does not change this value."""
    steps = np.diff(height)
    if len(height) < SHORT_SERIES:
        return 0.0
    expected = float(np.median(error[1:] ** 2 + error[:-1] ** 2))
    return max(0.0, float(np.median(steps**2)) / _MEDIAN_OF_CHI2 - expected) / 2


def _flag_outliers(residual: Float64s, scatter: float) -> Bools:
    """Flag groups of up to five steps with a large residual, unless they are at the start or end of the series."""
    count = len(residual)
    apart, none = np.abs(residual), np.zeros(count, np.bool_)
    if count < 2 * _WINDOW + 2:
        return none
    scatter = max(scatter, 1.4826 * float(np.median(apart)))
    # a bad step differs from its neighbors by 6 standard deviations and by a factor of 1.5
    bad = apart > max(6.0 * scatter, math.log(1.5))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], bad, [False]])))
    for first, end in edges.reshape(-1, 2):
        if first == 0 or end == count or end - first > _WINDOW:
            bad[first:end] = False
    return bad if bad.sum() <= max(1, 0.1 * count) else none


def running_median(height: Float64s) -> Float64s:
    padded = np.pad(height, _WINDOW, constant_values=np.nan)
    return np.asarray(np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * _WINDOW + 1), axis=1))


def fit_onset(where: Float64s, height: Float64s, error: Float64s, bad: Bools) -> tuple[OnsetFit, Bools]:
    """Fit a jump or a ramp by weighted least squares. Return the fit, and the outliers: steps that it ignores."""
    fit = _fit_good_steps(where, height, error, ~bad)
    again = _flag_outliers(height - fit.at(where), 0.0)
    if not np.array_equal(again, bad):
        bad, fit = again, _fit_good_steps(where, height, error, ~again)
    first, bad = fit.onset, bad.copy()
    # a bad step right before the change is the onset, if it shows more than half of the change
    while first > 0 and bad[first - 1] and (height[first - 1] - fit.before) / fit.change > 0.5:
        first -= 1
        bad[first] = False
    end = first if fit.shape == "jump" else fit.end
    return replace(fit, onset=first, earliest=min(fit.earliest, first), end=end), bad


def _fit_good_steps(all_where: Float64s, all_height: Float64s, all_error: Float64s, good: Bools) -> OnsetFit:
    where, height, error = all_where[good], all_height[good], all_error[good]
    count, places = len(height), np.flatnonzero(good)
    weight = _weigh(height, error)
    coarse = _list_candidates(count)
    best_ramp = int(np.argmin(_fit_all(where, height, weight, *coarse).min(axis=0)))
    nearby = _list_neighbours(int(coarse[0, best_ramp]), int(coarse[1, best_ramp]), count)
    start, end = np.unique(np.hstack([coarse, nearby]), axis=1)
    squares = _fit_all(where, height, weight, start, end)
    jump = end == start + 1
    best = np.unravel_index(int(np.argmin(squares)), squares.shape)
    scale = _scale(float(squares[best]), count)
    power, chosen = _POWERS[best[0]], int(best[1])
    best_jump = int(np.flatnonzero(jump)[np.argmin(squares[:, jump].min(axis=0))])
    is_jump = bool(squares[:, best_jump].min() - squares[best] <= 2 * scale * math.log(count))
    if is_jump:
        power, chosen = 0.0, best_jump
    near = (squares <= squares[best] + _INTERVAL_RISE * scale).any(axis=0)
    near[chosen] = True
    first, last = int(start[chosen]), int(end[chosen])
    before, change, spread = _fit_levels(where, height, weight, first, last, power)
    # a ramp can leave the old level at its first step, a jump only after it, perhaps at a bad step
    earliest = int((places[start] + jump)[near].min())
    latest, onset, until = (int(places[place]) for place in (int(start[near].max()) + 1, first + 1, last))
    corners = (float(all_where[onset - 1] if is_jump else where[first]), float(where[last]))
    shape: ChangeShape = "jump" if is_jump else "ramp"
    error_of_change = math.sqrt(scale / spread)
    return OnsetFit(onset, until, earliest, latest, shape, corners, power, before, change, error_of_change)


def _weigh(height: Float64s, error: Float64s) -> Float64s:
    return 1 / np.maximum(error**2 + extra_variance(height, error), 1e-8)


def _scale(squares: float, count: int) -> float:
    """Return the variance of the residuals as a multiple of the variance that the weights assume (at least 1)."""
    return max(1.0, squares / max(count - 4, 1))


def _list_candidates(count: int) -> NDArray[np.int64]:
    """List start and end of the jumps and ramps to try. In a long series, ramps do not start at every step."""
    powers = np.arange(0, math.log(count) / math.log(_DURATION_RATIO) + 1)
    durations = np.unique(np.rint(_DURATION_RATIO**powers).astype(np.int64))
    every = np.arange(count - 1)
    some = every[:: _stride(count)]
    start = np.repeat(some, len(durations))
    ramps = np.stack([start, np.minimum(start + np.tile(durations, len(some)), count - 1)])
    return np.unique(np.hstack([ramps, np.stack([every, every + 1])]), axis=1)


def _stride(count: int) -> int:
    return count // _MOST_STARTS + 1


def _list_neighbours(start: int, end: int, count: int) -> NDArray[np.int64]:
    reach = math.ceil((end - start) * (_DURATION_RATIO - 1)) + _stride(count)
    starts = np.arange(max(start - reach, 0), min(start + reach + 1, count - 1))
    ends = np.arange(max(end - reach, 1), min(end + reach + 1, count), reach // _MOST_ENDS + 1)
    found = np.stack([np.repeat(starts, len(ends)), np.tile(ends, len(starts))])
    return np.asarray(found[:, found[0] < found[1]])


def _fit_all(
    where: Float64s, height: Float64s, weight: Float64s, start: NDArray[np.int64], end: NDArray[np.int64]
) -> Float64s:
    return np.array([_fit_squares(where, height, weight, start, end, power) for power in _POWERS])


def _fit_squares(
    where: Float64s, height: Float64s, weight: Float64s, start: NDArray[np.int64], end: NDArray[np.int64], power: float
) -> Float64s:
    """Return the weighted sum of squared residuals of each ramp. Cumulative sums make this fast for long ramps."""
    if power * np.ptp(height) > 100.0:
        return np.full(len(start), np.inf)  # the squares would overflow
    if power:
        centred = height - float(np.median(height))
        value = np.exp(power * centred) / power
        weight = weight * np.exp(-2 * power * running_median(centred))
    else:
        value = height
    total = float(weight.sum())
    value = value - float((value * weight).sum()) / total
    place = where - where[0]
    rows = np.stack([weight, weight * place, weight * place**2, weight * value, weight * place * value])
    sums = np.concatenate([np.zeros((5, 1)), np.cumsum(rows, axis=1)], axis=1)
    inside, after = sums[:, end] - sums[:, start], sums[:, -1:] - sums[:, end]
    origin, length = place[start], place[end] - place[start]
    rise = (inside[1] - origin * inside[0]) / length + after[0]
    rise_squared = (inside[2] - 2 * origin * inside[1] + origin**2 * inside[0]) / length**2 + after[0]
    product = (inside[4] - origin * inside[3]) / length + after[3]
    spread = np.maximum(rise_squared - rise**2 / total, 1e-300)
    squares = float((value**2 * weight).sum()) - product**2 / spread
    return np.asarray(np.maximum(squares, 0.0))


def _fit_levels(
    where: Float64s, height: Float64s, weight: Float64s, start: int, end: int, power: float
) -> tuple[float, float, float]:
    """Return the level before the change, the size of the change, and the inverse of the size's variance."""
    total = float(weight.sum())
    change = float(np.sign(height[end:].mean() - height[: start + 1].mean())) or 1.0
    middle = float((height * weight).sum()) / total
    for _ in range(8 if power else 1):
        risen = _completed_part(where, float(where[start]), float(where[end]), power, change)
        centred = risen - float((risen * weight).sum()) / total
        spread = float((centred**2 * weight).sum())
        change = float((centred * (height - middle) * weight).sum()) / spread
    return middle - change * float((risen * weight).sum()) / total, change, spread


def _completed_part(where: Float64s, start: float, end: float, power: float, change: float) -> Float64s:
    """Return how much of a change is completed at each position: 0 before `start`, 1 after `end`."""
    part = np.clip((where - start) / (end - start), 0, 1)
    return np.asarray(np.log1p(np.expm1(power * change) * part) / (power * change) if power and change else part)


Label = str | int | float | bool | None

Z_LIMIT = 4.0
"""A significant change is at least 4 standard errors. The same limit applies to |mean ratio - 1|."""
_ROBUST_SHARE = 1 / 3
"""A few tokens cause a change of K3 if log(p99^2) of |log ratio| changes by less than 1/3 of the change of log K3."""
_SHOWN_STEPS = 5

GrowthVerdict = Literal["grew", "fell", "steady", "uneven", "zero", "unknown"]


class Growth(FiniteModel):
    """The change of a metric over the steps of a run. `text` describes it.

    Attributes:
        verdict: `grew` or `fell` after a significant change. With the other verdicts, most values below are null.
        steps: The number of steps with a value of the metric.
        value: The metric at the last step that has a value.
        factor: The level after the change divided by the level before, with a 95% `interval`.
        onset: The first step that leaves the old level, with a 95% `onset_interval`.
        until: The last step of the change.
        shape: `jump` (from one step to the next) or `ramp` (over several steps).
        before: The level before the change.
        after: The level after the change.
        bad_steps: Steps that the fit ignores, because the metric there is far from its value at the steps around them.
        driven_by: The number of tokens that cause the change, or null if more than a few tokens cause it.
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
        return self.factor is not None

    @property
    def z(self) -> float | None:
        """Return the z-score of the change: the change of the metric's logarithm, in standard errors."""
        if self.factor is None or self.interval is None:
            return None
        return math.log(self.factor) * 2 * INTERVAL_Z / math.log(self.interval[1] / self.interval[0])

    @property
    def brief(self) -> str:
        if self.factor is None:
            return self.text.split(" over ")[0]
        arrow, size = ("▲", self.factor) if self.factor > 1 else ("▼", 1 / self.factor)
        word = "at" if self.shape == "jump" else "from"
        return f"{arrow} {format_number(size)}x {word} step {format_label(self.onset)}"


def fit_growth(
    labels: Sequence[Label], values: Sequence[float | None], errors: Sequence[float | None], metric: str = "k3"
) -> Growth:
    """Fit a jump or a ramp to the values of a metric at the steps, and report it as a change if it is significant."""
    known = [i for i, value in enumerate(values) if value is not None]
    positive = [i for i in known if (values[i] or 0.0) > 0]
    count, last = len(known), values[known[-1]] if known else None
    if count < 2:
        return Growth(metric=metric, verdict="unknown", steps=count, value=last,
                      text="measured at one step only" if known else "undefined at every step")  # fmt: skip
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
    bad = _flag_outliers(height - running_median(height), math.sqrt(extra_variance(height, relative)))
    if not _has_change(where[~bad], height[~bad], relative[~bad]):
        found = _describe_no_change(height[~bad], relative[~bad], metric, count)
    else:
        fit, bad = fit_onset(where, height, relative, bad)
        found = _describe_change(fit, names, metric, count, float(value[-1]))
    bad_names = [_label_name(names[i]) for i in np.flatnonzero(bad)]
    note = f"; outliers left out: {_format_steps(bad_names)}" if bad_names else ""
    return found.model_copy(update={"value": last, "text": found.text + note, "bad_steps": bad_names})


def _has_change(where: Float64s, height: Float64s, error: Float64s) -> bool:
    weight = _weigh(height, error)
    start, end = _list_candidates(len(height))
    squares = _fit_squares(where, height, weight, start, end, 0.0)
    best = int(np.argmin(squares))
    _, change, spread = _fit_levels(where, height, weight, int(start[best]), int(end[best]), 0.0)
    deviation = math.sqrt(_scale(float(squares[best]), len(height)) / spread)
    return _is_significant(change, deviation, len(height))


def _is_significant(change: float, error: float, steps: int) -> bool:
    """Return True if `change` = log(after / before) is at least log 1.2 and 4 standard errors (short series: 5)."""
    # in a short series, the error itself is uncertain
    limit = Z_LIMIT if steps >= SHORT_SERIES else 5.0
    return abs(change) >= limit * error and abs(change) >= math.log(1.2)


def _describe_no_change(height: Float64s, error: Float64s, metric: str, steps: int) -> Growth:
    spread = f"between {format_number(math.exp(height.min()))} and {format_number(math.exp(height.max()))}"
    uneven = _is_uneven(height, error)
    text = f"did not change over {steps} steps by more than the standard errors ({spread})"
    if uneven:
        text = f"goes up and down over {steps} steps by more than the standard errors, {spread}"
    return Growth(metric=metric, verdict="uneven" if uneven else "steady", steps=steps, text=text)


def _describe_change(fit: OnsetFit, names: Sequence[Label], metric: str, steps: int, last: float) -> Growth:
    factor = math.exp(fit.change)
    reach = INTERVAL_Z * fit.error
    ends = math.exp(fit.change - reach), math.exp(fit.change + reach)
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
        when += f" (onset between steps {format_label(earliest)} and {format_label(latest)})"
    verb = "rose" if factor > 1 else "fell"
    text = (
        f"{verb} by a factor of {format_number(shown)} (95% interval {format_number(bounds[0])} to "
        f"{format_number(bounds[1])}) {when}: {format_number(before)} before, {format_number(after)} after, and "
        f"{format_number(last)} at the last step"
    )
    return Growth(
        metric=metric, verdict="grew" if factor > 1 else "fell", text=text,
        steps=steps, factor=factor, interval=ends, onset=onset, onset_interval=(earliest, latest),
        until=until, shape=fit.shape, before=before, after=after,
    )  # fmt: skip


def check_outliers(
    growth: Growth,
    labels: Sequence[Label],
    values: Sequence[float | None],
    p99: Sequence[float | None],
    outliers: Sequence[float | None],
) -> Growth:
    """Test whether a few tokens cause the change of K3. If so, add their number to the text, or report no change.

    `p99` is the 99th percentile of |log ratio| at each step. `outliers` is the number of tokens at each step whose two
    probabilities differ by more than a factor of 2. If K3 changes much more than `p99`, a few tokens cause its change.
    The number of such tokens varies by chance, which standard errors of K3 do not include. So the change is only
    reported if a rank test of the steps before and after it is significant too.
    """
    rows = [
        (i, value, high, count)
        for i, (value, high, count) in enumerate(zip(values, p99, outliers, strict=True))
        if value and high and count is not None
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
    if not tokens or 2 * sizes[1] > _ROBUST_SHARE * sizes[0]:  # times 2, because K3 is proportional to x^2
        return growth
    is_change = growth.changed and abs(_mann_whitney_z(k3[after], k3[~after])) >= Z_LIMIT
    tokens = tokens if is_change else round(float(counts.sum()))
    named = f"driven by {format_count(tokens, 'token')} whose two probabilities differ by more than 2x"
    if is_change:
        return growth.model_copy(update={"text": f"{growth.text}; {named}", "driven_by": tokens})
    text = (
        f"differs between {growth.steps} steps ({format_number(k3.min())} to {format_number(k3.max())}), {named}; "
        "the other tokens did not change"
    )
    return Growth(
        metric=growth.metric, verdict="uneven", text=text, steps=growth.steps, value=growth.value, driven_by=tokens
    )


def _mann_whitney_z(first: Float64s, second: Float64s) -> float:
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


def step_positions(labels: Sequence[Label]) -> Float64s:
    """Return the labels of the steps if they are ascending numbers, or else 0, 1, 2, ..."""
    numbered = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in labels)
    where = np.array(labels, np.float64) if numbered else np.zeros(0)
    ascend = len(where) > 1 and bool(np.isfinite(where).all() and (np.diff(where) > 0).all())
    return where if ascend else np.arange(len(labels), dtype=np.float64)


def step_blocks(count: int) -> list[NDArray[np.int64]]:
    return [part.astype(np.int64) for part in np.array_split(np.arange(count), min(count, 48))]


def _is_uneven(height: Float64s, error: Float64s) -> bool:
    """Return True if the means of blocks of steps differ significantly. If all errors are 0, return False."""
    if not error.any():
        return False
    blocks = step_blocks(len(height))
    height = np.array([height[part].mean() for part in blocks])
    variance = np.maximum([float((error[part] ** 2).sum()) / len(part) ** 2 for part in blocks], 1e-12)
    mean = (height / variance).sum() / (1 / variance).sum()
    freedom = len(height) - 1
    return float(((height - mean) ** 2 / variance).sum()) > freedom + Z_LIMIT * math.sqrt(2 * freedom)


NEAR_RISE = 2.71
"""A ramp fits nearly as well as the best if its chi-squared is at most 2.71 = 1.645^2 larger."""


@dataclass(frozen=True)
class Ramps:
    """Least-squares fits of all ramps (constant, straight line, new constant) to the averages of blocks of steps."""

    where: Float64s
    start: NDArray[np.int64]  # block at which each ramp starts
    end: NDArray[np.int64]
    change: Float64s  # difference between the levels
    rise: Float64s  # mean of `progress` over the blocks
    spread: Float64s  # weighted sum of squares of `progress` minus `rise`
    squares: Float64s  # weighted sum of squares of the residuals
    middle: float  # mean of the series
    weight: float

    @classmethod
    def fit(cls, where: Float64s, height: Float64s) -> Ramps:
        blocks = step_blocks(len(height))
        where, height = (np.array([series[part].mean() for part in blocks]) for series in (where, height))
        each = 1 / max(extra_variance(height, np.zeros_like(height)), 1e-12)
        middle = float(height.mean())
        start, end = np.triu_indices(len(height), 1)
        risen = np.clip((where - where[start, None]) / (where[end] - where[start])[:, None], 0, 1)
        rise = risen.mean(axis=1)
        centred = risen - rise[:, None]
        spread = (centred**2).sum(axis=1)
        change = (centred * (height - middle)).sum(axis=1) / spread
        squares = ((height - middle - change[:, None] * centred) ** 2).sum(axis=1)
        return cls(where, start, end, change, rise, spread * each, squares * each, middle, each * len(height))

    def progress(self, where: Float64s) -> Float64s:
        """Return the completed share of each ramp at each position. For a ramp to the last block, it can exceed 1."""
        corners = self.where[self.start, None], self.where[self.end, None]
        part = np.maximum((where - corners[0]) / (corners[1] - corners[0]), 0)
        goes_on = self.end[:, None] == len(self.where) - 1
        return np.asarray(np.where(goes_on, part, np.minimum(part, 1)))

    def evaluate(self, where: Float64s) -> Float64s:
        return np.asarray(self.middle + self.change[:, None] * (self.progress(where) - self.rise[:, None]))

    @property
    def best(self) -> int:
        return int(self.squares.argmin())

    @property
    def scale(self) -> float:
        return _scale(float(self.squares.min()), len(self.where))

    def has_change(self, steps: int) -> bool:
        error = math.sqrt(self.scale / float(self.spread[self.best]))
        return _is_significant(float(self.change[self.best]), error, steps)
