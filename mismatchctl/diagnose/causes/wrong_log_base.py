"""Natural logarithms on one side, another base, the other sign or a multiple of them on the other."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.distributions import cut
from mismatchctl.diagnose.measures import better_as, cannot_be_logs, could_be_better, fact, loudest, percent

_BASES = {"base 2": math.log(2), "base 10": math.log(10)}
"""What to multiply by to have natural log-probs again."""
_OPPOSITE = "the opposite sign"
_READINGS = _BASES | {_OPPOSITE: -1.0} | {f"{base} and {_OPPOSITE}": -factor for base, factor in _BASES.items()}
_LEAST_SHARE, _MUCH_BETTER = 0.05, 0.15
_SCALED, _STEADY = 0.03, 0.005
"""A factor differs from 1 by the one, in logs, and by no more than the other from likely to unlikely tokens."""
_SURE, _LIKELY, _UNLIKELY, _ENOUGH = -0.02, -0.7, -1.0, 30
_PARTS = ((-0.15, _SURE), (_LIKELY, -0.15), (-2.5, _UNLIKELY), (-math.inf, -2.5))
"""Log-probs in each of which a factor is the same."""

Reading = tuple[str, str, float]
"""The side, how it is to be read (empty: as a multiple), and what to multiply it by."""


def _test(case: Case) -> Detection | None:
    if cut(case) is not None:
        return None  # recorded lists tell what makes rollout log-probs larger
    best, (side, reading, factor) = _best(case)
    share = float(best.mean())
    if best.sum() < 3 or share < _LEAST_SHARE:
        return None
    rollout, train = _read(case, side, factor)
    tokens = best[case.sequence]
    before = float(np.median(np.abs(case.x[tokens[case.index]])))
    after = float(np.median(np.abs(train - rollout)[case.index][tokens[case.index]]))
    if share < 0.5 and after > _MUCH_BETTER * before:
        return None  # a few rows that agree a little better by chance
    return Detection(
        "high",
        f"{_claim(side, reading, 1 / factor)}; read so, the median difference is {after:.3g} nats, not {before:.3g}",
        share=case.share(tokens),
        evidence=(
            fact("difference_as_given", before, "median |log ratio| as the columns stand, nats"),
            fact("difference_reread", after, f"the same with {side}_log_probs times {factor:.4g}"),
            fact("slope", _slope(case), "median rollout log-prob over train log-prob; 1 where both are natural"),
        ),
        where={"sequences": percent(share), "column": f"{side}_log_probs"},
        examples=loudest(case, best),
        rivals={} if reading else {"temperature": "the code: is a temperature applied to logits, or to log-probs?"},
        leaves=case.repaired(
            rollout=np.where(tokens, rollout, case.rollout), train=np.where(tokens, train, case.train)
        ),
    )


def _best(case: Case) -> tuple[Bools, Reading]:
    """The reading that most sequences agree with, and those [S]."""
    factor = None if case.reshaped else _factor(case)
    if factor is not None:
        found = better_as(case, case.rollout / factor, case.train)
        if found.mean() > 0.5:
            return found, ("rollout", "", 1 / factor)
    best, chosen = np.zeros(case.size, np.bool_), ("", "", 1.0)
    least = min(abs(multiple - 1) for multiple in _READINGS.values())
    sides = [side for side, values in (("rollout", case.r), ("train", case.t)) if could_be_better(case, least * values)]
    for reading, multiple in _READINGS.items():
        for side in sides:
            found = better_as(case, *_read(case, side, multiple))
            if found.sum() > best.sum():
                best, chosen = found, (side, reading, multiple)
    for side, values in (("rollout", case.r), ("train", case.t)):
        if cannot_be_logs(values) and best.mean() < 0.5:
            return case.means(values > 0) > 0.5, (side, _OPPOSITE, -1.0)
    return best, chosen


def _factor(case: Case) -> float | None:
    """The rollout's log-probs over the trainer's, if that is one number at every probability, and neither 1 nor a base.

    Neither a temperature nor a truncation makes the same factor of likely and of unlikely tokens.
    """
    unsure = (case.r < _SURE) & (case.t < _SURE)
    likely, unlikely = (np.log(_quotients(case, unsure & part)) for part in (case.t > _LIKELY, case.t < _UNLIKELY))
    if min(len(likely), len(unlikely)) < _ENOUGH:
        return None
    factor = float(np.median(np.append(likely, unlikely)))
    if abs(factor) < _SCALED:
        return None
    doubt = _STEADY + 3 * math.hypot(_error(likely), _error(unlikely))
    known = (math.log(base) * sign for base in _BASES.values() for sign in (1, -1))
    if abs(np.median(likely) - np.median(unlikely)) > doubt:
        return None
    for low, high in _PARTS:
        part = np.log(_quotients(case, unsure & (case.t > low) & (case.t <= high)))
        if len(part) >= _ENOUGH and abs(np.median(part) - factor) > _STEADY + 3 * _error(part):
            return None
    return None if min(abs(factor - base) for base in known) < doubt else math.exp(factor)


def _slope(case: Case) -> float:
    """Median quotient of the two columns where neither is near 0."""
    quotients = _quotients(case, (np.abs(case.r) > -_SURE) & (np.abs(case.t) > -_SURE))
    return float(np.median(quotients)) if len(quotients) else 1.0


def _quotients(case: Case, chosen: Bools) -> Float64s:
    return case.r[chosen] / case.t[chosen]


def _error(values: Float64s) -> float:
    """Standard error of a median, from the median deviation."""
    return 1.86 * float(np.median(np.abs(values - np.median(values)))) / math.sqrt(len(values))


def _read(case: Case, side: str, factor: float) -> tuple[Float64s, Float64s]:
    return (case.rollout * factor, case.train) if side == "rollout" else (case.rollout, case.train * factor)


def _claim(side: str, reading: str, multiple: float) -> str:
    if not reading:
        return (
            f"rollout_log_probs are {multiple:.4g} times the trainer's at every probability, as if log-probs, not "
            f"logits, had been divided by a temperature: of {1 / multiple:.3g} on the rollout side, or of "
            f"{multiple:.3g} on the trainer's side"
        )
    return f"{side}_log_probs {'have' if reading == _OPPOSITE else 'are in'} {reading}"


CAUSE = Cause(
    id="wrong_log_base",
    title="Another logarithm, or a multiple of it, on one side",
    shows="The columns agree about three times better when one is multiplied by ln 2, ln 10, -1 or another number; "
    "or one lies above 0.",
    test=_test,
    advice="Convert where the log-probs are recorded: log2 times 0.6931, log10 times 2.3026; negative log-likelihoods "
    "(cross-entropy losses) change their sign; a temperature divides logits, before log_softmax. Look at the code that "
    "writes the dump first, not at the engine.",
    pointless="every correction: the ratios are not ratios of probabilities",
)
