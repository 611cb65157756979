"""The engine keeps its first weights while the recorded versions advance."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.cause import Cause, Detection
from mismatchctl.diagnosis.evidence import version_lag
from mismatchctl.diagnosis.levels import normal_z
from mismatchctl.diagnosis.measures import drift_correlation, format_range, make_fact, systematic_share
from mismatchctl.results.model import Confidence

_STEPS, _ROWS, _TOKENS, _Z, _IDLE, _STEADY = 4, 12, 5, 6.0, 3.0, 0.7
_FACTOR, _EARLY, _TIED, _LEARNING = 1.5, 1.15, 0.02, 0.45

_FIRST_Z = 3.0


def _test(case: Case) -> Detection | None:
    lag = version_lag(case.rows)
    if lag is None or case.reshaped or "growing_mismatch" in case.explained:
        return None
    train = np.asarray(case.rows.columns["train_version"], np.float64)
    rollout = train - lag
    known = np.flatnonzero((case.counts >= _TOKENS) & np.isfinite(lag))
    ages = np.unique(train[known])
    if len(known) < _ROWS or len(ages) < _STEPS or len(np.unique(rollout[known])) < 2:
        return None
    level = np.log(case.means(np.abs(case.scaled))[known] + 1e-12)
    age = train[known] - ages[0]
    means = np.array([level[age == value - ages[0]].mean() for value in ages])
    factor = float(np.exp(means[-2:].mean() - means[0]))
    half = len(ages) // 2
    early = float(np.exp(means[half - 1 : half + 1].mean() - means[0]))
    rise, rise_z, own_z = _slopes(level, np.log1p(age), lag[known])
    steady = _steadiness(means)
    if _first_rise(level, train[known], ages) < _FIRST_Z:
        return None  # flat at first: something stopped later
    if rise_z < _Z or steady < _STEADY or own_z > _IDLE or factor < _FACTOR or early < max(_EARLY, factor**0.25):
        return None
    lags = sorted({*lag[known].tolist()})
    constant = float(np.corrcoef(lag[known], age)[0, 1]) if len(lags) > 1 else 0.0
    if abs(constant) > 0.7:
        return None  # the recorded lag grows as well: it explains the rise
    shared, shared_z = systematic_share(case)
    along, along_z = drift_correlation(case)
    tied = (shared > _TIED and shared_z > 6) or (along > _LEARNING and along_z > 4)
    confidence: Confidence = "high" if tied and len(ages) >= 6 and steady > 0.8 else "medium"
    return Detection(
        confidence,
        f"the mismatch grows from the first step on, {factor:.3g} times by version {ages[-1]:g}, although the recorded "
        f"lag stays at {format_range(int(value) if float(value).is_integer() else value for value in lags)}: the "
        f"rollout looks like its first weights throughout, and the versions that it records ({rollout[known].min():g} to "
        f"{rollout[known].max():g}) never took effect",
        evidence=(
            make_fact("factor", factor, "mean difference (in logits) at the last two versions over that at the first"),
            make_fact("halfway", early, "the same at half of the versions: it grows throughout, not from one step on"),
            make_fact("growth_z", rise_z, "growth with the trainer's version at equal lag, in standard errors"),
            make_fact("growth_by_version", rise, "slope of the log level by the log of versions since the first"),
            make_fact(
                "lag_z", own_z, "growth with the recorded lag, in standard errors: none if these versions were not used"
            ),
            make_fact(
                "systematic",
                shared,
                "share of the variance that is the same for a token everywhere: weights differ",
                against=not tied,
            ),
        ),
        where={"steps": "all, from the first on"},
        rivals={
            "growing_mismatch": "checksums of the engine's weights at two steps: do they change?",
            "stale_policy": "the engine's own version counter after each sync (vLLM, SGLang /get_model_info)",
        },
        everywhere=True,
    )


def _first_rise(level: Float64s, version: Float64s, ages: Float64s) -> float:
    """By how many standard errors the level of the next versions is above that of the first one."""
    first = level[version == ages[0]]
    following = level[(version == ages[1]) | (version == ages[2])]
    if min(len(first), len(following)) < 2:
        return 0.0
    error = math.sqrt(first.var(ddof=1) / len(first) + following.var(ddof=1) / len(following))
    return float((following.mean() - first.mean()) / max(error, 1e-12))


def _steadiness(means: Float64s) -> float:
    """Kendall's tau of the levels with their order: 1 if every version differs more than all before it."""
    signs = [np.sign(means[j] - means[i]) for i in range(len(means)) for j in range(i + 1, len(means))]
    return float(np.mean(signs))


def _slopes(level: Float64s, age: Float64s, lag: Float64s) -> tuple[float, float, float]:
    """Slope of the level by age beside the lag, its z, and the z of the lag, over rows."""
    terms = [np.ones(len(level)), age]
    if np.ptp(lag) > 0:
        terms.append(lag)
    design = np.stack(terms, axis=1)
    inverse = np.linalg.pinv(design.T @ design)
    slopes = inverse @ design.T @ level
    left = level - design @ slopes
    scores = design * left[:, None]
    spread = np.diag(inverse @ (scores.T @ scores) @ inverse)
    z = [
        normal_z(float(slope / np.sqrt(max(v, 1e-30))), len(level) - 3) for slope, v in zip(slopes, spread, strict=True)
    ]
    return float(slopes[1]), z[1], z[2] if len(z) > 2 else 0.0


WEIGHTS_NEVER_UPDATED = Cause(
    id="weights_never_updated",
    title="The engine's weights never change",
    shows="At a constant recorded lag the mismatch grows with every version, from the first step on, and not with the "
    "lag: the rollout is that of the first weights.",
    test=_test,
    advice="Compare a checksum of the engine's weights before and after a sync (SGLang /get_weights_by_name, vLLM "
    "collective_rpc){settings}. The version counter advances even if no tensor arrives: wrong parameter names, a sync "
    "to another process group, an adapter that is loaded once.",
    pointless="importance weights: they cannot follow a policy that moves away without end",
    columns=("rollout_version", "train_version", "token_ids", "current_log_probs"),
    in_layers=False,
)
