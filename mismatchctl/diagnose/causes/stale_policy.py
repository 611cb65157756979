"""The rollout sampled with older weights than those that recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.evidence import LAG, version_lag
from mismatchctl.diagnose.levels import by_value, cells_of, slope
from mismatchctl.diagnose.measures import along_drift, fact, stretch, systematic
from mismatchctl.result import Confidence, Fact

_Z, _SYSTEMATIC, _ALONG = 4.0, 0.02, 0.45


@dataclass(frozen=True)
class _Signs:
    """What the versions say, and what the tokens say without them."""

    lags: dict[float, Float64s]
    growth: float
    growth_z: float
    shared: float
    shared_z: float
    along: float
    along_z: float

    @property
    def behind(self) -> dict[float, Float64s]:
        return {lag: sums for lag, sums in self.lags.items() if lag != 0}

    @property
    def grows(self) -> bool:
        return self.growth_z > _Z

    @property
    def weights_differ(self) -> bool:
        return self.shared > _SYSTEMATIC and self.shared_z > 6

    @property
    def learning(self) -> bool:
        return self.along > _ALONG and self.along_z > _Z


def _test(case: Case) -> Diagnosis | None:
    lags = _lags(case)
    untold = ((0.0, 0.0), (0.0, 0.0))  # under a temperature, tokens tell nothing about weights
    shared, along = untold if case.reshaped else (systematic(case), along_drift(case))
    signs = _Signs(lags, *(slope(lags) if len(lags) > 1 else (0.0, 0.0)), *shared, *along)
    confidence = _confidence(case, signs)
    if confidence is None:
        return None
    count = sum(float(sums[0]) for sums in signs.behind.values())
    return Diagnosis(
        confidence,
        _summary(signs),
        evidence=(*_evidence(signs), *_advantage(case)),
        where={"sequences": f"{int(count):,}, those behind"} if count else {},
        examples=np.argsort(-case.means(np.abs(case.x)), kind="stable")[:3],
        rivals=_rivals(signs),
    )


def _confidence(case: Case, signs: _Signs) -> Confidence | None:
    if signs.grows or (signs.behind and (signs.learning or signs.weights_differ)):
        return "high"
    if signs.behind:
        return "medium" if case.noise > BFLOAT16_NOISE and not case.reshaped else "low"
    return "medium" if signs.learning and signs.weights_differ else None


def _summary(signs: _Signs) -> str:
    if signs.behind:
        older = f"the rollout sampled with weights {_range(signs.behind)} versions older than the trainer's"
        return older + (f"; |log ratio| grows {math.exp(signs.growth):.3g}-fold per version" if signs.grows else "")
    different = (
        "the two sides have different weights: tokens differ along the direction in which the policy is learning"
    )
    return different + (", although the version columns say that they are the same" if signs.lags else "")


def _evidence(signs: _Signs) -> Iterator[Fact]:
    if signs.lags:
        meaning = "train_version minus rollout_version"
        yield fact("version_lag", _range(signs.lags), meaning, against=not signs.behind)
    if len(signs.lags) > 1:
        meaning = "factor by which |log ratio| grows with each version of lag"
        yield fact("growth", math.exp(signs.growth), meaning, against=not signs.grows)
        yield fact("growth_z", signs.growth_z, "the same in standard errors", against=not signs.grows)
    meaning = "share of the variance that is the same for a token everywhere: weights differ"
    yield fact("systematic", signs.shared, meaning, against=not signs.weights_differ)
    if signs.along_z:
        meaning = "correlation, over tokens of the vocabulary, with where the weights move next"
        yield fact("along_learning", signs.along, meaning, against=not signs.learning)


def _range(lags: dict[float, Float64s]) -> str:
    return stretch(int(lag) if lag.is_integer() else lag for lag in lags)


def _lags(case: Case) -> dict[float, Float64s]:
    """Sums by version lag, of the sequences that no cause has taken out."""
    lag = version_lag(case.rows)
    left = set() if lag is None else set(lag[case.counts > 0].tolist())
    found = by_value(cells_of(case, LAG)).items()
    return {value: sums for value, sums in found if isinstance(value, float) and value in left}


def _advantage(case: Case) -> list[Fact]:
    values = case.rows.tokens.get("advantages")
    if values is None:
        column = case.rows.columns.get("advantages")
        values = None if column is None or column.dtype == object else case.rows.segments.spread(column)
    if values is None or not len(case.x):
        return []
    z = case.clustered_z(np.clip(case.standard, -4, 4) * np.nan_to_num(values[case.index].astype(np.float64)))
    return [
        fact(
            "advantage_z",
            z,
            "log ratio times advantage, in standard errors: above 0 where the trainer has moved on",
            against=z < 2,
        )
    ]


def _rivals(signs: _Signs) -> dict[str, str]:
    if not signs.lags:
        return {"quantized_rollout": "rollout_version and train_version, as the engine and the trainer know them"}
    if not (signs.learning or signs.grows):
        return {"numerical_noise": "a step with lag 0: is its mismatch smaller?"}
    return {}


CAUSE = Cause(
    id="stale_policy",
    title="The rollout's weights are older",
    shows="Log ratios grow with the version lag; or they are tied to tokens, along the direction in which the "
    "policy moves next.",
    test=_test,
    advice="Expected in asynchronous training: bound the lag (verl trainer staleness_threshold, slime and Miles "
    "--update-weights-interval, TRL num_iterations and steps_per_generation), and check that every weight sync "
    "arrived. Where "
    "it is wanted, this is what importance weights are for: truncated token weights, or a decoupled three-policy loss.",
    pointless="",
    columns=("rollout_version", "train_version", "advantages", "current_log_probs", "token_ids"),
)
