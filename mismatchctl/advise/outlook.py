"""How long the advice holds: where the trend of the mismatch leads, and what would be advised there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mismatchctl.advise.applied import Candidate, correct, ess_of
from mismatchctl.advise.choose import CandidateRanking
from mismatchctl.advise.limits import Limits
from mismatchctl.advise.model import Outlook
from mismatchctl.advise.sample import RunSample
from mismatchctl.batch import Float64s
from mismatchctl.predict.trend import at_step
from mismatchctl.ratios import ratios_of
from mismatchctl.result.story import MANY_REJECTED

_PARTS = (0.0, 0.25, 0.5, 1.0)
"""Of the way ahead, where it is looked what would be advised."""
_MUCH = 1.1
"""Times the K3 of the sample from which a trend may change the advice."""


def outlook(
    sample: RunSample,
    first: Candidate,
    choice: CandidateRanking,
    limits: Limits,
    again: Callable[[RunSample], CandidateRanking],
) -> Outlook | None:
    """Follow the trend of K3 as many steps ahead as the dump spans; None where it does not grow.

    Args:
        sample: of one run.
        first: what is advised on it.
        choice: the ranking.
        limits: what is out of the question.
        again: ranks the same candidates on another sample.
    """
    if not sample.is_in_time:
        return None
    labels = [float(label) for label in sample.steps]
    span = labels[-1] - labels[0]
    series = _k3(sample)
    mean = float((series * _tokens(sample)).sum() / sample.batch.tokens)
    factors = [_factor(labels, series, mean, part * span) for part in _PARTS]
    last = factors[-1]
    if last is None or last < _MUCH:
        return None
    limit = _limit_passed(sample, first, limits, labels, span)
    end = math.inf if limit is None else limit[0]
    reached = [
        (part * span, factor)
        for part, factor in zip(_PARTS, factors, strict=True)
        if factor is not None and factor >= _MUCH and part * span < end
    ]

    def instead_at(factor: float) -> str | None:
        then = again(_stretched(sample, math.sqrt(factor)))
        return None if then.ties(choice.first) else then.first

    at_last = instead_at(reached[-1][1]) if reached else None  # what holds there is not looked for on the way
    for ahead, factor in reached if at_last else ():
        instead = at_last if ahead == reached[-1][0] else instead_at(factor)
        if instead:
            return _told(span, last, ahead, instead, f"{instead} is advised instead, at {_times(factor)} times K3")
    if limit is not None:
        return _told(span, last, limit[0], None, limit[1])
    text = f"K3 grows: in {span:g} steps it is {_times(last)} times that of this sample, and the advice still holds"
    return Outlook(steps=span, k3_factor=last, text=text)


def _times(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def _told(span: float, factor: float, ahead: float, instead: str | None, what: str) -> Outlook:
    when = f"in {ahead:.3g} steps" if ahead else "at the last steps already"
    return Outlook(
        steps=span, k3_factor=factor, outgrown_in=ahead, instead=instead, text=f"the trend outgrows it: {when} {what}"
    )


def _limit_passed(
    sample: RunSample, first: Candidate, limits: Limits, labels: list[float], span: float
) -> tuple[float, str] | None:
    """The first step ahead, with words, at which what is advised rejects too much or leaves too small an ESS."""
    applied, segments = correct(first.correction, sample), sample.batch.segments
    tokens = _tokens(sample)
    sums = [np.bincount(sample.step, own, len(labels)) for own in (
        first.kept, segments.sum(applied.weights), segments.sum(np.square(applied.weights))
    )]  # fmt: skip
    rejected = 1 - sums[0] / np.maximum(tokens, 1)
    ess = np.array([ess_of(*of_step) for of_step in zip(*sums[1:], tokens, strict=True)])
    most, least = min(limits.max_rejection, MANY_REJECTED), limits.min_ess
    passed = (
        ("rejected_tokens", rejected, 1, most, f"it rejects more than {most:.0%} of the tokens"),
        ("ess", ess, -1, least, f"its ESS falls below {least:.2g}"),
    )
    found = []
    for quantity, values, side, bound, words in passed:
        for ahead in np.unique(np.linspace(1, max(span, 1), 20).round()):
            seen = at_step(quantity, labels, values.tolist(), float(ahead), is_fraction=True)
            if seen.status == "ok" and seen.value is not None and side * (seen.value - bound) > 0:
                found.append((float(ahead), words))
                break
    return min(found) if found else None


def _tokens(sample: RunSample) -> Float64s:
    return np.asarray(np.bincount(sample.step, sample.batch.segments.lengths, len(sample.steps)), np.float64)


def _k3(sample: RunSample) -> Float64s:
    """K3 of each step."""
    sums = sample.batch.segments.sum(ratios_of(sample.batch, {"train/rollout"})["train/rollout"].k3)
    return np.asarray(np.bincount(sample.step, sums, len(sample.steps)) / np.maximum(_tokens(sample), 1))


def _factor(labels: list[float], series: Float64s, mean: float, ahead: float) -> float | None:
    """K3 so many steps ahead over that of the sample; None where no trend says it."""
    seen = at_step("k3", labels, series.tolist(), ahead)
    return seen.value / mean if seen.status == "ok" and seen.value is not None and mean > 0 else None


def _stretched(sample: RunSample, factor: float) -> RunSample:
    """The sample with log ratios so many times as large: a stand-in for one of a mismatch that has grown."""
    batch = sample.batch
    rollout = batch.train - factor * (batch.train.astype(np.float64) - batch.rollout)
    return replace(sample, batch=replace(batch, rollout=rollout.astype(batch.rollout.dtype)))
