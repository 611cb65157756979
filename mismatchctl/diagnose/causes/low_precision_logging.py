"""Log-probs stored in bfloat16, float16, or rounded to a few decimals."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Bools, Float64s, Floats
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, percent
from mismatchctl.numbers import counted

_BITS = {"bfloat16": 8, "float16": 11}
"""Significant bits of each format; float32 has 24."""
_LEAST_SHARE, _ALL = 0.02, 0.995
_DECIMALS = range(1, 6)
_FIRST = 2048
"""Values of which so many may have more decimals that no other needs a look."""
_UNSURE = -0.25
"""Log-probs nearer to 0 are differences of large logits: few of their bits can be set, whatever stored them."""
_MOST = 0.25
"""Share of the mean square that rounding explains where noise above bfloat16's needs no other cause."""
_FEWEST = 10
"""Different values; fewer are constants that stand for something."""


def _on_lattice(values: Floats, bits: int) -> Bools:
    """Which log-probs a format with so many significant bits would have kept as they are."""
    single = values.astype(np.float32, copy=False)
    low_bits = np.uint32((1 << (24 - bits)) - 1)
    kept: Bools = ((single.view(np.uint32) & low_bits) == 0) & (single == values)
    return kept


def _test(case: Case) -> Detection | None:
    if not len(case.x):
        return None
    for side, values in (("rollout", case.rows.rollout), ("train", case.rows.train)):
        decimals = _decimals(case.r if side == "rollout" else case.t)
        if decimals is not None:  # before formats of few bits, which hold many short decimals
            step = np.full(len(case.x), 10.0**-decimals)
            return _diagnosis(case, side, counted(decimals, "decimal"), 1.0, 1e-3, step)
        unsure = values[case.sound & (values < _UNSURE)]
        for name, bits in _BITS.items():
            kept = unsure[_on_lattice(unsure, bits)]
            share = len(kept) / max(len(unsure), 1)
            if share >= _LEAST_SHARE and len(np.unique(kept)) >= _FEWEST:
                return _diagnosis(case, side, name, share, 2.0 ** (bits - 24), _spacing(case, side, bits))
    return None


def _spacing(case: Case, side: str, bits: int) -> Float64s:
    """Distance between neighbouring values of a format at each sound token [N]."""
    values = np.abs(case.r if side == "rollout" else case.t)
    return np.asarray(np.ldexp(1.0, np.frexp(np.maximum(values, 1e-30))[1] - bits), np.float64)


def _decimals(values: Float64s) -> int | None:
    """The number of decimals that all values were rounded to, if any."""
    used = values[values < -1e-3]
    if len(used) < 50:
        return None
    some, stray = used[:_FIRST], (1 - _ALL) * len(used)
    for digits in _DECIMALS:
        if _off(some, digits) <= stray and _off(used, digits) <= stray and len(np.unique(used)) > 10:
            return digits
    return None


def _off(values: Float64s, digits: int) -> int:
    """How many values have more decimals, beyond what float32 makes of them."""
    scaled = values * 10.0**digits
    return int((np.abs(scaled - np.round(scaled)) > np.abs(scaled) * 2.0**-23 + 1e-9).sum())


def _diagnosis(case: Case, side: str, name: str, share: float, chance: float, spacing: Float64s) -> Detection:
    rounding, seen = float(spacing.mean()) / 4, float(np.abs(case.x).mean()) if len(case.x) else 0.0
    explained = min(1.0, (rounding / seen) ** 2) if seen else 0.0
    partly = share < _ALL
    doubt = -np.expm1(np.minimum(case.t, 0.0)) + 0.02
    as_noise = float(np.median(spacing / 4 / doubt)) / 0.6745 if len(case.x) else 0.0
    return Detection(
        "high",
        f"{percent(share)} of the {side} log-probs are exact in {name}: they were stored in it. Rounding alone makes a "
        f"mean difference of {rounding:.2g} nats, of {seen:.2g} seen",
        share=explained * (share if partly else 1.0),
        k3=explained * (share if partly else 1.0),
        everywhere=explained > _MOST or as_noise > _MOST / 2 * case.noise,
        evidence=(
            fact("on_lattice", share, f"share of {side} log-probs below {_UNSURE:g} that {name} holds exactly"),
            fact("by_chance", chance, "the share that would be by chance"),
            fact("rounding", rounding, "mean difference that such rounding makes, nats"),
            fact("difference", seen, "mean |log ratio|, nats", against=seen > 2 * rounding),
        ),
        where={"column": f"{side}_log_probs"} | ({"tokens": percent(share)} if partly else {}),
        examples=np.flatnonzero(case.counts > 0)[:3],
        rivals={
            "numerical_noise": "log-probs computed in low precision look the same: is log_softmax done in float32?"
        },
    )


CAUSE = Cause(
    id="low_precision_logging",
    title="Log-probs are stored with few digits",
    shows="The low bits of nearly all values are 0 (bfloat16, float16), or all have few decimals.",
    test=_test,
    advice="Keep log-probs in float32 from log_softmax to the file: no .bfloat16() or autocast around it, no float16 "
    "tensors between worker and trainer, no rounding in JSON. SGLang --enable-fp32-lm-head and float32 logits in the "
    "trainer help too.",
    pointless="thresholds finer than the rounding (geometric rejection at 1.001) reject by rounding alone",
)
