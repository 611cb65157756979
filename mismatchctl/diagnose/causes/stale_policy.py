"""The rollout sampled with older weights than those that recomputed."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Diagnosis
from mismatchctl.diagnose.evidence import LAG, version_lag
from mismatchctl.diagnose.levels import by_value, cells_of, slope
from mismatchctl.diagnose.measures import along_drift, fact, stretch, systematic
from mismatchctl.result import Confidence, Fact

_Z, _SYSTEMATIC, _ALONG = 4.0, 0.02, 0.45


def _test(case: Case) -> Diagnosis | None:
    lags = _lags(case)
    behind = {lag: sums for lag, sums in lags.items() if lag != 0}
    growth, growth_z = slope(lags) if len(lags) > 1 else (0.0, 0.0)
    shared, shared_z = (0.0, 0.0) if case.reshaped else systematic(case)
    along, along_z = (0.0, 0.0) if case.reshaped else along_drift(case)
    weights_differ = shared > _SYSTEMATIC and shared_z > 6
    learning = along > _ALONG and along_z > _Z
    confidence: Confidence
    if growth_z > _Z:
        confidence = "high"
    elif behind and (learning or weights_differ):
        confidence = "high" if not case.reshaped else "medium"
    elif behind:
        confidence = "medium" if not case.reshaped else "low"
    elif learning and weights_differ:
        confidence = "medium"
    else:
        return None
    evidence = []
    if lags:
        evidence.append(
            fact("version_lag", stretch(rounded_lags(lags)), "train_version minus rollout_version", against=not behind)
        )
    if len(lags) > 1:
        evidence.append(
            fact(
                "growth",
                math.exp(growth),
                "factor by which |log ratio| grows with each version of lag",
                against=growth_z < _Z,
            )
        )
        evidence.append(fact("growth_z", growth_z, "the same in standard errors", against=growth_z < _Z))
    evidence.append(
        fact(
            "systematic",
            shared,
            "share of the variance that is the same for a token everywhere: weights differ",
            against=not weights_differ,
        )
    )
    if along_z:
        evidence.append(
            fact(
                "along_learning",
                along,
                "correlation, over tokens of the vocabulary, with where the weights move next",
                against=not learning,
            )
        )
    evidence += _advantage(case)
    count = sum(float(sums[0]) for sums in behind.values())
    if behind:
        summary = f"the rollout sampled with weights {stretch(rounded_lags(behind))} versions older than the trainer's"
        summary += f"; |log ratio| grows {math.exp(growth):.3g}-fold per version" if growth_z > _Z else ""
    else:
        summary = (
            "the two sides have different weights: tokens differ along the direction in which the policy is learning"
            + (", although the version columns say that they are the same" if lags else "")
        )
    return Diagnosis(
        confidence,
        summary,
        share=1.0,
        evidence=tuple(evidence),
        where={"sequences": f"{int(count):,} behind"} if behind else {},
        examples=np.argsort(-case.means(np.abs(case.x)), kind="stable")[:3],
        rivals=_rivals(bool(lags), learning, growth_z),
    )


def _lags(case: Case) -> dict[float, Float64s]:
    """Sums by version lag, of the sequences that no cause has taken out."""
    lag = version_lag(case.rows)
    left = set() if lag is None else set(lag[case.counts > 0].tolist())
    found = by_value(cells_of(case, LAG)).items()
    return {value: sums for value, sums in found if isinstance(value, float) and value in left}


def rounded_lags(lags: dict[float, Float64s]) -> list[float]:
    """Lags as whole numbers where they are."""
    return [int(lag) if lag.is_integer() else lag for lag in lags]


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


def _rivals(recorded: bool, learning: bool, growth_z: float) -> dict[str, str]:
    rivals = {}
    if not recorded:
        rivals["quantized_rollout"] = "rollout_version and train_version, as the engine and the trainer know them"
    elif not learning and growth_z < _Z:
        rivals["numerical_noise"] = "a step with lag 0: is its mismatch smaller?"
    return rivals


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
