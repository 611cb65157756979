"""Every kernel applies every rule like the plain kernel: counts exactly, sums to rounding.

Rules that act differently are all tested. Other fields are drawn at random.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mismatchctl.core.batch import TokenBatch
from mismatchctl.core.ratios import STATISTICS, Ratios
from mismatchctl.corrections.application import Selection, measure_gate
from mismatchctl.corrections.model import ARITHMETIC_LEVELS, STATISTIC_LEVELS, Correction, Gate, Weight
from mismatchctl.measure.columns import compute_token_loss, correction_columns
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL, Kernel
from mismatchctl.measure.reduction import MeasurePlan, correction_ratios
from tests.factories.batches import made_batch
from tests.factories.random_dumps import Shape, corrections

Columns = dict[str, NDArray[np.float64]]
COUNTS = ("kept", "counted", "touched", "emptied", "weight_low", "weight_high", "loss_tokens", "loss_kept")
SOURCES = ("train/rollout", "current/rollout", "current/train")

WITH_CURRENT = frozenset({"current_log_probs"})


def made_by(kernel: Kernel, given: list[Correction], batch: TokenBatch, *, losses: bool) -> list[Columns]:
    plan = MeasurePlan(tuple(given), available_columns=WITH_CURRENT, kernel=kernel)
    parts: list[list[Columns]] = []
    with np.errstate(all="ignore"):
        for _, block in kernel.split_blocks(batch):
            ratios = correction_ratios(block, plan)
            own = compute_token_loss("ppo", block)
            found = [
                correction_columns(
                    each,
                    ratios,
                    ratios["train/rollout"].k3_sum,
                    block,
                    own,
                    losses=losses,
                    all_tokens=kernel.evaluates_all_tokens,
                )
                for each in given
            ]
            parts.append([additive | {f"max {name}": v for name, v in largest.items()} for additive, largest in found])
    return [
        {name: np.concatenate([part[name] for part in each]) for name in each[0]} for each in zip(*parts, strict=True)
    ]


def check(kernel: Kernel, given: list[Correction], batch: TokenBatch, *, losses: bool = False) -> None:
    expected = made_by(NUMPY_KERNEL, given, batch, losses=losses)
    found = made_by(kernel, given, batch, losses=losses)
    rounding, squared = roundings(batch), squares(batch)
    for correction, own, other in zip(given, expected, found, strict=True):
        assert list(own) == list(other)
        for name, values in own.items():
            if name in COUNTS or name.startswith(("gate", "catastrophic")):
                assert np.array_equal(other[name], values), (name, other[name], values, correction)
                continue
            allowed = rounding * (np.abs(values) + 1.0) + (rounding * squared if "gradient" in name else 0)
            with np.errstate(invalid="ignore"):
                close = (np.abs(other[name] - values) <= allowed) | (other[name] == values)
            assert close.all(), (name, other[name], values, correction)


def roundings(batch: TokenBatch) -> NDArray[np.float64]:
    """Return the rounding error of each sequence, relative to 1."""
    with np.errstate(over="ignore"):
        pairs = [(batch.train, batch.rollout), (batch.current, batch.rollout), (batch.current, batch.train)]
        x = [np.subtract(a, b, dtype=np.float64) for a, b in pairs if a is not None]
        size = sum(batch.segments.sum(np.abs(each) + np.abs(np.expm1(np.clip(each, -20, 20)))) for each in x)
    return 1e-14 * (10 + batch.segments.lengths) * (1 + np.asarray(size))


def squares(batch: TokenBatch) -> NDArray[np.float64]:
    x = np.subtract(batch.current, batch.rollout, dtype=np.float64)
    return batch.segments.sum(np.exp(2 * np.clip(np.abs(x), 0, 20)))


def weights() -> Iterator[Weight]:
    bounds: list[dict[str, Any]] = [{}, {"truncate": 1.2}, {"clip": (0.8, 1.3)}, {"clip": (None, 1.1)}]
    bounds += [{"clip": (0.9, None)}, {"zero": (0.5, 1.5)}, {"zero": (0.9, None)}, {"zero": (None, 1.1)}]
    bounds += [{"watch_low": 0.8}, {"truncate": 1.2, "watch_low": 0.8}, {"truncate": 1e-30}, {"zero": (1e30, None)}]
    for level, bound, source in itertools.product(("token", "sequence", "geometric"), bounds, SOURCES):
        yield Weight(level=level, source=source, **bound)


def interval(batch: TokenBatch, ratios: Ratios, side: str, **rule: Any) -> tuple[float | None, float | None]:
    """Return bounds of a gate's statistic with values of the batch on both sides."""
    gate = Gate(keep=(0.5, None), **rule)
    with np.errstate(all="ignore"):
        measured = measure_gate(gate, ratios, Selection.everything(batch.segments), batch)
        low, high = np.quantile(measured[np.isfinite(measured)], (0.2, 0.8))
        low, high = (
            low - 1e-7 * abs(low) - 1e-9,
            high + 1e-7 * abs(high) + 1e-9,
        )  # not at a value, because kernels round
        if gate.statistic == "ratio":
            low, high = np.exp(np.clip([low, high], -50, 50))
    return (None if side == "high" else float(low)), (None if side == "low" else float(high))


def gates(batch: TokenBatch) -> Iterator[Gate]:
    """Yield every statistic and level of a gate, with changing masks, bounds and effects."""
    every_source = MeasurePlan(
        (Correction(gates=(Gate(source="current/rollout", keep=(0.5, None)),)),), available_columns=WITH_CURRENT
    )
    ratios = correction_ratios(batch, every_source)
    rest = itertools.cycle(itertools.product(("both", "low", "high"), (True, False), ("mask", "zero"), SOURCES))
    for statistic in ("ratio", *STATISTICS):
        levels = STATISTIC_LEVELS.get(statistic, ARITHMETIC_LEVELS)
        for level, over, clamp, when in itertools.product(
            levels, ("sequence", "segment"), ("aggregate", "token", "none"),
            ("always", "positive_advantage", "negative_advantage"),
        ):  # fmt: skip
            if over == "segment" and level == "token":
                continue
            side, inclusive, effect, source = next(rest)
            what = {"statistic": statistic, "level": level, "clamp": clamp, "source": source}
            keep = interval(batch, ratios[source], side, **what)
            yield Gate(
                **what, over=over, when=when, keep=keep, inclusive=(inclusive, not inclusive), effect=effect,
                sees="original",
            )  # fmt: skip


LENGTHS = [7, 0, 25, 1, 40, 3, 0, 90, 12]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "gaps"), [(np.float32, False), (np.float64, True)])
def test_kernels_agree_on_every_gate(kernel: Kernel, dtype: type, gaps: bool) -> None:
    """Each gate is tested with a weight, and with masked gaps after another gate."""
    batch = made_batch(3 if gaps else 8, LENGTHS, dtype, gaps=gaps)
    first, weight = Gate(level="token", keep=(0.9, None)), Weight(clip=(0.7, 1.4))
    every = [
        Correction(gates=(first, gate.model_copy(update={"sees": "remaining"})))
        if gaps
        else Correction(weight=weight, gates=(gate,))
        for gate in gates(batch)
    ]
    assert len(every) > 500
    check(kernel, every, batch)


@pytest.mark.slow
def test_kernels_agree_on_rare_fields(kernel: Kernel) -> None:
    """These fields change the aggregation, the clamp or the decision."""
    batch = made_batch(4, LENGTHS, np.float32, gaps=True)
    changes: list[dict[str, Any]] = [{"over": "prefix", "level": level} for level in STATISTIC_LEVELS["ratio"][1:]]
    changes += [{"widen": 0.5}, {"seed": 3}, {"seed": 3, "level": "geometric"}, {"when": "drifting"}, {"limit": 0.1}]
    changes += [{"precision": "float32"}, {"precision": "float32", "statistic": "binary_kl_max"}, {"nonfinite": "one"}]
    changes += [{"when": "nonpositive_advantage"}, {"limit": 0.1, "clamp": "token", "level": "geometric"}]
    every = [Correction(gates=(Gate(keep=(None, 1.03), **change),)) for change in changes]
    every += [Correction(gates=(Gate(statistic="k2", level="mean", over="batch", keep=(None, 0.01)),))]
    every += [Correction(gates=(Gate(statistic="age", level="sequence", keep=(None, 2.0)),))]
    every += [
        Correction(weight=Weight(source="proximal/rollout"), gates=(Gate(source="proximal/rollout", keep=(0.8, 1.2)),))
    ]
    sequences = Gate(level="max", keep=(None, 1.3))
    rules: list[dict[str, Any]] = [
        {"over": "segment", "level": "geometric"},
        {"sees": "remaining", "level": "sequence"},
    ]
    rules += [{"limit": 0.2}, {"clamp": "token", "limit": 0.1, "level": "sequence"}, {"bound_where": sequences}]
    rules += [{"nonfinite": "zero"}, {"clamp": "none", "level": "geometric"}]
    every += [Correction(weight=Weight(clip=(0.8, 1.2), **rule), gates=(Gate(keep=(0.7, 1.5)),)) for rule in rules]
    check(kernel, every, batch)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [False, True])
def test_kernels_agree_on_every_weight(kernel: Kernel, losses: bool) -> None:
    batch = made_batch(5, LENGTHS, np.float32)
    veto = Gate(level="min", keep=(1e-3, None))
    kinds = ("ppo", "ppo_bypass", "policy_gradient") if losses else ("ppo",)
    every = [
        Correction(weight=weight, gates=own, loss=loss)
        for weight, own, loss in itertools.product([None, *weights()], ((), (veto,), (Gate(keep=(0.8, 1.2)),)), kinds)
    ]
    check(kernel, every, batch, losses=losses)


@settings(derandomize=True, max_examples=30)
@hypothesis.given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    dtype=st.sampled_from([np.float32, np.float64]),
    gaps=st.booleans(),
    scale=st.sampled_from([0.0, 1e-9, 1e-2, 0.3, 40.0]),
    correction=corrections(Shape(0)),
    loss=st.sampled_from(["ppo", "ppo_bypass", "policy_gradient", None]),
)
def test_kernels_agree_on_any_correction(
    kernel: Kernel, seed: int, lengths: list[int], dtype: type, gaps: bool, scale: float, correction: Correction,
    loss: str | None,
) -> None:  # fmt: skip
    # loops compute a train probability to 1e-16, so they can round one below that to 0
    hypothesis.assume(not any(gate.statistic == "train_prob" and 0 in gate.keep for gate in correction.gates))
    drawn = correction if loss is None else correction.model_copy(update={"loss": loss})
    check(kernel, [drawn], made_batch(seed, lengths, dtype, gaps=gaps, scale=scale), losses=loss is not None)
