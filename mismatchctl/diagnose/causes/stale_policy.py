"""The rollout sampled with older weights than those that recomputed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.evidence import LAG, version_lag
from mismatchctl.diagnose.levels import Cells, cells_of, slope
from mismatchctl.diagnose.measures import along_drift, fact, stretch, systematic
from mismatchctl.result import Confidence, Fact

_Z, _PERHAPS, _SYSTEMATIC, _ALONG = 4.0, 2.0, 0.02, 0.45


@dataclass(frozen=True)
class _Signs:
    """What the versions say, and what the tokens say without them: sequences by lag, and how it goes with the level."""

    lags: dict[float, float]
    growth: float
    growth_z: float
    shared: float
    shared_z: float
    along: float
    along_z: float

    @property
    def behind(self) -> dict[float, float]:
        """Those behind the newest: only the differences of versions that two sides number count."""
        newest = min([0.0, *self.lags])
        return {lag: count for lag, count in self.lags.items() if lag > newest}

    @property
    def odd(self) -> bool:
        """Whether some rollout claims weights that the trainer does not have yet."""
        return min(self.lags, default=0.0) < 0

    @property
    def grows(self) -> bool:
        return self.growth_z > _Z

    @property
    def idle(self) -> bool:
        """Whether several lags show no difference."""
        return len(self.lags) > 1 and self.growth_z < _PERHAPS

    @property
    def weights_differ(self) -> bool:
        return self.shared > _SYSTEMATIC and self.shared_z > 6

    @property
    def learning(self) -> bool:
        return self.along > _ALONG and self.along_z > _Z


def _test(case: Case) -> Detection | None:
    cells = _lag_cells(case)
    untold = ((0.0, 0.0), (0.0, 0.0))  # under a temperature, tokens tell nothing about weights
    shared, along = untold if case.reshaped else (systematic(case), along_drift(case))
    lags: dict[float, float] = {}
    for (_, lag), sums in cells.items():
        lags[float(lag or 0)] = lags.get(float(lag or 0), 0.0) + float(sums[0])
    signs = _Signs(lags, *(slope(cells) if len(lags) > 1 else (0.0, 0.0)), *shared, *along)
    confidence = _confidence(case, signs)
    if confidence is None:
        return None
    count = sum(signs.behind.values())
    return Detection(
        confidence,
        _summary(signs),
        evidence=(*_evidence(signs), *_advantage(case)),
        where={"sequences": f"{int(count):,}, those behind"} if count else {},
        rivals=_rivals(signs),
        everywhere=confidence != "low",
    )


def _confidence(case: Case, signs: _Signs) -> Confidence | None:
    if signs.grows:
        return "high"
    if signs.idle or signs.odd:
        return "low" if signs.behind or signs.odd else None
    if len(signs.lags) > 1:
        return "medium" if case.noise > BFLOAT16_NOISE or signs.weights_differ or signs.learning else "low"
    if signs.behind:
        if signs.learning or (signs.weights_differ and along_drift(case)[1] == 0):
            return "high" if signs.learning else "medium"
        return "medium" if case.noise > BFLOAT16_NOISE and not case.reshaped else "low"
    return "medium" if signs.learning and signs.weights_differ else None


def _summary(signs: _Signs) -> str:
    if signs.behind:
        older = f"the rollout sampled with weights {_range(signs.behind)} versions older than the trainer's"
        if signs.idle:
            return f"{older}, and nothing shows it: |log ratio| is no larger where the lag is"
        return older + (f"; |log ratio| grows {math.exp(signs.growth):.3g}-fold per version" if signs.grows else "")
    if signs.odd:
        return (
            f"the rollout's version is ahead of the trainer's by {-min(signs.lags):g}: the two count from another "
            "number, or one is written after the update; no sign of older weights"
        )
    different = (
        "the two sides have different weights: tokens differ along the direction in which the policy is learning"
    )
    return different + (", although the version columns say that they are the same" if signs.lags else "")


def _evidence(signs: _Signs) -> Iterator[Fact]:
    if signs.lags:
        meaning = "train_version minus rollout_version, as recorded: nothing is estimated"
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


def _range(lags: Iterable[float]) -> str:
    return stretch(int(lag) if lag.is_integer() else lag for lag in lags)


def _lag_cells(case: Case) -> Cells:
    """Sums by step and version lag, of the sequences that no cause has taken out."""
    lag = version_lag(case.rows)
    left = set() if lag is None else set(lag[case.counts > 0].tolist())
    return {key: sums for key, sums in cells_of(case, LAG).items() if isinstance(key[1], float) and key[1] in left}


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
    return {} if signs.grows else {"quantized_rollout": "the engine's dtype, and the weights' checksums"}


CAUSE = Cause(
    id="stale_policy",
    title="The rollout's weights are older",
    shows="Log ratios grow with the version lag; or they are tied to tokens, along the direction in which the "
    "policy moves next.",
    test=_test,
    advice="Expected in asynchronous training: bound the lag{settings}, and check that every weight sync "
    "arrived. Where it is wanted, this is what importance weights are for: truncated token weights, or a "
    "decoupled three-policy loss.",
    columns=("rollout_version", "train_version", "advantages", "current_log_probs", "token_ids"),
)
