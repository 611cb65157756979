"""Log-probs of another token than the sampled one: the likeliest, or the first entry of a dictionary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import format_count
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Cause, Detection
from mismatchctl.diagnosis.measures import calibration, find_loudest, make_fact, percent

_FEWEST, _FEW, _SURE = 200, 8, 20
_QUANTILE, _NORMAL = 0.2, 0.2533
"""Use the closest 20% of the tokens for the noise, because most tokens may be wrong."""
_NEAR, _FAR, _LEAST, _SMALLEST = 4.0, 12.0, 0.25, 1e-4
_OTHER_WAY, _SLACK, _VIOLATED, _POWER = 0.05, 0.1, 0.04, 0.1
_BETWEEN, _SPIKE = 0.16, 0.5
_UNSURE = (-3.0, -0.3)
_ALIKE = 0.5
_CERTAIN, _TOO_MANY = 0.8, 2.0
_SPOILED = 0.05
"""Share of tokens above which the others are a biased selection."""


@dataclass(frozen=True)
class _Signs:
    """Evidence that one side has the log-probs of likelier tokens.

    `far` marks tokens far below the side [N]; the next five are shares of them. `power` is `violated` after shuffling,
    `spike` the share of unsure tokens that agree over the expected share, and `share` estimates the affected tokens.
    """

    side: str
    far: Bools
    other_way: float
    violated: float
    power: float
    spike: float
    between: float
    share: float
    too_many: float

    @property
    def fits(self) -> bool:
        told = self.power > _POWER or (self.spike > _SPIKE and self.between < _BETWEEN)
        if self.too_many > _TOO_MANY:
            return False
        return self.other_way < _OTHER_WAY and self.violated < _VIOLATED and told and self.between < 0.5


def _signs(case: Case, side: str) -> _Signs | None:
    own, other = (case.r, case.t) if side == "rollout" else (case.t, case.r)
    down = other - own
    doubt = 1.0 - np.exp(np.minimum(own, 0.0))
    doubtful = case.doubtful | (own < -0.02)
    if doubtful.sum() < _FEWEST:
        return None
    scaled = down / (doubt + 0.02)
    noise = max(float(np.quantile(np.abs(scaled[doubtful]), _QUANTILE)) / _NORMAL, _SMALLEST)
    limit = np.maximum(_FAR * noise * (doubt + 0.02), _LEAST)
    far, up = down < -limit, down > limit
    count = int(far.sum())
    if count < _FEW or _one_value(own[far]) or _one_value(other[far]):
        return None
    room = _log1mexp(own[far])
    below = other[far]
    slack = _SLACK + 3 * noise
    shuffled = np.random.default_rng(0).permutation(below)
    possible = shuffled < own[far] - limit[far]
    near = np.abs(scaled) < _NEAR * noise
    unsure = (own > _UNSURE[0]) & (own < _UNSURE[1])
    agree = float(near[unsure].mean()) if unsure.any() else 0.0
    expected = float(np.exp(own[unsure]).mean()) if unsure.any() else 1.0
    return _Signs(
        side,
        far,
        float(up.sum()) / count,
        float((below > room + slack).mean()),
        float((shuffled > room + slack)[possible].mean()) if possible.any() else 0.0,
        agree / max(expected, 1e-9),
        float(((down < 0) & ~near & ~far & doubtful).sum()) / count,
        _affected(own, far),
        _too_many(own, far),
    )


def _log1mexp(values: Float64s) -> Float64s:
    return np.log(-np.expm1(np.minimum(values, -1e-12)))


def _one_value(values: Float64s) -> bool:
    _, counts = np.unique(values, return_counts=True)
    return bool(counts.max() > _ALIKE * len(values))


def _affected(own: Float64s, far: Bools) -> float:
    """Return the share of tokens with the log-prob of the likeliest token, sampled or not.

    Above 1/2 the column is that of the likeliest token. Sampled likeliest tokens have weight 1 / p, and 1 - p are far.
    """
    likely = own > np.log(0.5)
    p = np.exp(np.minimum(own, 0.0))
    expected = float(((1 - p) / p)[likely & ~far].sum())
    return min(1.0, float((far & likely).sum()) / expected) if expected > 0 else 1.0


def _too_many(own: Float64s, far: Bools) -> float:
    """Return far tokens of near-certain places over the number that the side's probabilities allow."""
    certain = own > np.log(_CERTAIN)
    allowed = float(-np.expm1(np.minimum(own[certain], 0.0)).sum())
    count = float((far & certain).sum())
    return max(count - 3 * math.sqrt(count), 0.0) / max(allowed, 1e-9)


def _test(case: Case) -> Detection | None:
    if len(case.x) < _FEWEST or case.reshaped:
        return None
    for side in ("rollout", "train"):
        signs = _signs(case, side)
        if signs is not None and signs.fits:
            return _diagnosis(case, signs)
    return None


def _diagnosis(case: Case, signs: _Signs) -> Detection:
    tokens, count = case.marked(signs.far), int(signs.far.sum())
    excess, z, inverse, inverse_z = calibration(case)
    rows = np.bincount(case.where[signs.far], minlength=case.size) > 0
    own, other = (case.r, case.t) if signs.side == "rollout" else (case.t, case.r)
    sums = np.exp(np.minimum(own[signs.far], 0.0)) + np.exp(np.minimum(other[signs.far], 0.0))
    mean, mean_z = (excess, z) if signs.side == "rollout" else (inverse, inverse_z)
    meaning = "E[ratio] - 1" if signs.side == "rollout" else "E[1 / ratio] - 1"
    sure = count >= _SURE and rows.sum() > 1
    return Detection(
        "high" if sure else "medium",
        f"{format_count(count, 'token')} ({percent(count / len(case.x))}) have a {signs.side} log-prob that belongs to "
        f"another, likelier token: it is {np.median((own - other)[signs.far]):.2g} nats higher there and never lower, "
        "while the other tokens agree. About "
        f"{percent(signs.share)} of all tokens are affected: it does not show if the likeliest token was sampled",
        share=case.share(tokens),
        evidence=(
            make_fact("tokens", count, f"tokens whose {signs.side} log-prob is far above the other side's"),
            make_fact("share", count / len(case.x), "share of all tokens"),
            make_fact("affected", signs.share, "estimated share of tokens with the likeliest token's log-prob"),
            make_fact(
                "other_way",
                signs.other_way,
                "tokens as far off in the other direction, over these; 0.5 or more for noise",
            ),
            make_fact(
                "sum_of_both",
                float(np.quantile(sums, 0.99)),
                "exp(rollout) + exp(train) there, 99% quantile: two different tokens have 1 at most",
            ),
            make_fact("between", signs.between, "tokens between noise and these, over these: few, if the others agree"),
            make_fact("ratio_mean_minus_one", mean, f"{meaning}: 0 if the column belongs to the sampled tokens"),
            make_fact("z", mean_z, "the same in standard errors"),
        ),
        where={"tokens": percent(count / len(case.x)), "column": f"{signs.side}_log_probs"},
        examples=find_loudest(case, rows, case.sums(np.abs(case.x) * signs.far)),
        rivals={}
        if sure and signs.power > _POWER
        else {"truncated_sampling": "are the token ids and the recorded log-probs about the same tokens?"},
        leaves=case.without(tokens).relabelled(reshaped=signs.share > _SPOILED),
    )


OTHER_TOKEN_RECORDED = Cause("other_token_recorded", _test)
