"""What a Correction can say beyond a ratio in an interval, each word against a calculation of its own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

from mismatchctl.analyze import analyze
from mismatchctl.batch import Segments, TokenBatch
from mismatchctl.correction import Correction, Gate, Weight, apply, correction_from_mapping
from mismatchctl.errors import ConfigError
from mismatchctl.ratios import Ratios
from mismatchctl.sweep import Study, sweep

LENGTHS = (7, 0, 12, 1, 30)
MASKED = {0: (3, 4), 4: (0, 10, 11, 20)}
"""Tokens that are masked between valid ones, by sequence."""


def made(seed: int = 0, scale: float = 0.3) -> TokenBatch:
    rng = np.random.default_rng(seed)
    segments = Segments(np.cumsum([0, *LENGTHS]))
    rollout = -rng.exponential(1.0, segments.tokens).astype(np.float32)
    train = np.minimum(rollout + rng.normal(0, scale, segments.tokens), 0).astype(np.float32)
    places = []
    for row, length in enumerate(LENGTHS):
        free = [place for place in range(length + 9) if place not in MASKED.get(row, ())]
        places += free[:length]
    return TokenBatch(segments, rollout, train, position=np.array(places), advantages=rng.normal(0, 1, segments.tokens))


BATCH = made()
D = BATCH.train.astype(np.float64) - BATCH.rollout.astype(np.float64)
ROWS = [slice(a, b) for a, b in zip(BATCH.segments.offsets[:-1], BATCH.segments.offsets[1:], strict=True)]


def applied(correction: Correction, batch: TokenBatch = BATCH) -> Any:
    return apply(correction, {"train/rollout": Ratios(batch.train, batch.rollout, batch.segments)}, batch)


def kept(**gate: Any) -> list[bool]:
    return list(applied(Correction(gates=(Gate(**gate),))).kept.expanded())


def runs(row: slice) -> list[list[int]]:
    found: list[list[int]] = []
    for token in range(row.start, row.stop):
        if found and found[-1][-1] == token - 1 and BATCH.positions[token] == BATCH.positions[token - 1] + 1:
            found[-1].append(token)
        else:
            found.append([token])
    return found


def test_a_weight_of_each_turn() -> None:
    weights = applied(Correction(weight=Weight(level="geometric", over="segment", truncate=1.05))).token_weights()
    wanted = np.zeros(len(D))
    for row in ROWS:
        for run in runs(row):
            wanted[run] = min(math.exp(sum(D[run]) / len(run)), 1.05)
    np.testing.assert_allclose(weights, wanted, rtol=1e-12)
    assert len({len(run) for row in ROWS for run in runs(row)}) > 2


def test_a_weight_of_what_the_gates_left() -> None:
    gate = Gate(keep=(0.8, 1.25))
    weights = applied(Correction(weight=Weight(level="sequence", sees="remaining"), gates=(gate,))).token_weights()
    left = np.abs(D) <= np.log(1.25)
    for row in ROWS:
        np.testing.assert_allclose(weights[row], math.exp(sum(D[row][left[row]])), rtol=1e-12)


@pytest.mark.parametrize(("rule", "bound"), [({"limit": 0.2}, 0.2), ({"clamp": "none"}, math.inf)])
def test_where_a_weight_is_clamped(rule: dict[str, Any], bound: float) -> None:
    batch = made(scale=15.0)
    log_ratio = batch.train.astype(np.float64) - batch.rollout.astype(np.float64)
    weights = applied(Correction(weight=Weight(**rule)), batch).token_weights()
    np.testing.assert_allclose(weights, np.exp(np.clip(log_ratio, -bound, bound)), rtol=1e-12)


def test_clamped_before_the_sum() -> None:
    weights = applied(Correction(weight=Weight(level="sequence", clamp="token", limit=0.1))).token_weights()
    for row in ROWS:
        np.testing.assert_allclose(weights[row], math.exp(sum(np.clip(D[row], -0.1, 0.1))), rtol=1e-12)


def test_bounded_where_a_gate_would_reject() -> None:
    where = Gate(level="max", keep=(None, 1.5))
    weights = applied(Correction(weight=Weight(clip=(0.9, 1.1), bound_where=where))).token_weights()
    for row in ROWS:
        beyond = max(D[row], default=0) > math.log(1.5)
        wanted = np.clip(np.exp(D[row]), 0.9, 1.1) if beyond else np.exp(D[row])
        np.testing.assert_allclose(weights[row], wanted, rtol=1e-12)


def test_what_is_not_finite() -> None:
    batch = TokenBatch(Segments(np.array([0, 3])), np.array([-1.0, -np.inf, np.nan]), np.array([-1.0, -1.0, -1.0]))
    for said, wanted in (("keep", [1, np.inf, np.nan]), ("one", [1, 1, 1]), ("zero", [1, 0, 0])):
        rule = Weight(clamp="none", nonfinite=said)  # type: ignore[arg-type]
        np.testing.assert_array_equal(applied(Correction(weight=rule), batch).token_weights(), wanted)
    for said, left in (("reject", [1, 0, 0]), ("keep", [1, 0, 1]), ("one", [1, 1, 1])):
        gate = Gate(keep=(0.5, 2.0), nonfinite=said)  # type: ignore[arg-type]
        assert list(applied(Correction(gates=(gate,)), batch).kept.expanded()) == [bool(flag) for flag in left]


@pytest.mark.parametrize("level", ["sequence", "geometric", "min", "max"])
def test_each_token_by_its_prefix(level: str) -> None:
    take = {"sequence": sum, "geometric": np.mean, "min": min, "max": max}[level]
    wanted = []
    for row in ROWS:
        for end in range(row.start, row.stop):
            wanted.append(abs(take(D[row.start : end + 1])) <= math.log(1.25))
    assert kept(level=level, over="prefix", keep=(0.8, 1.25)) == wanted
    assert 0 < sum(wanted) < len(wanted)


def test_the_mean_of_the_ratios_of_a_sequence() -> None:
    """Not their geometric mean: a few large ratios carry it."""
    means = [np.exp(D[row]).mean() if row.stop > row.start else 1.0 for row in ROWS]
    bound = float(np.median(means))
    wanted = [mean <= bound for mean, row in zip(means, ROWS, strict=True) for _ in D[row]]
    assert kept(level="mean", keep=(None, bound * (1 + 1e-12))) == wanted
    assert wanted != kept(level="geometric", keep=(None, bound))
    so_far = [np.exp(D[row])[: i + 1].mean() <= bound for row in ROWS for i in range(row.stop - row.start)]
    assert kept(level="mean", over="prefix", keep=(None, bound * (1 + 1e-12))) == so_far


def test_bounds_that_widen() -> None:
    wanted = []
    for row in ROWS:
        wanted += [abs(d) <= math.log(1.25) * math.sqrt(place + 1) for place, d in enumerate(D[row])]
    assert kept(keep=(0.8, 1.25), widen=0.5) == wanted
    assert wanted != kept(keep=(0.8, 1.25))


def test_the_largest_are_dropped_until_the_mean_is_inside() -> None:
    left = sorted(range(len(D)), key=lambda token: D[token] ** 2)
    while len(left) > 1 and sum(D[left] ** 2) / len(left) >= 0.02:
        left.pop()
    gate = {"statistic": "k2", "level": "mean", "over": "batch", "keep": (None, 0.01), "inclusive": (True, False)}
    assert kept(**gate) == [token in set(left) for token in range(len(D))]
    assert 1 < len(left) < len(D)
    assert sum(kept(**(gate | {"keep": (None, 1e-30)}))) == 1


def test_an_analysis_has_no_whole_batch(tmp_path: Any) -> None:
    pl.DataFrame({"rollout_log_probs": [[-1.0]], "train_log_probs": [[-1.1]]}).write_parquet(tmp_path / "d.parquet")
    gate = Gate(statistic="k2", level="mean", over="batch", keep=(None, 1.0))
    with pytest.raises(ConfigError, match="over: batch"):
        analyze([str(tmp_path)], [Correction(gates=(gate,))])


def test_by_chance_under_a_seed() -> None:
    rng = np.random.default_rng(3)
    size = 40_000
    rollout = -rng.exponential(1.0, size)
    batch = TokenBatch(Segments(np.arange(0, size + 1, 4)), rollout, rollout + np.log(2.0))
    gate = Gate(keep=(None, 1.0), seed=7)
    flags = applied(Correction(gates=(gate,)), batch).kept.expanded()
    assert abs(flags.mean() - 0.5) < 4 * 0.5 / math.sqrt(size)
    again = applied(Correction(gates=(gate.model_copy(update={"seed": 8}),)), batch).kept.expanded()
    assert abs((flags == again).mean() - 0.5) < 4 * 0.5 / math.sqrt(size)


def test_statistics_of_a_token() -> None:
    p, q = (np.clip(np.exp(values.astype(np.float64)), 1e-8, 1 - 1e-8) for values in (BATCH.train, BATCH.rollout))
    forth = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    back = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    for name, values in {
        "k3_reversed": np.exp(-D) - 1 + D,
        "ratio_gap": abs(np.exp(D) - 1),
        "binary_kl": forth,
        "binary_kl_max": np.maximum(forth, back),
    }.items():
        middle = float(np.sort(values)[len(values) // 2 : len(values) // 2 + 2].mean())
        assert kept(statistic=name, keep=(None, middle)) == list(values <= middle), name


def test_drifting_tokens_alone() -> None:
    outside = np.array([not flag for flag in kept(keep=(0.9, 1.1))])
    assert BATCH.advantages is not None
    away = D * BATCH.advantages > 0
    assert kept(keep=(0.9, 1.1), when="drifting") == list(~(outside & away))


def test_float32_at_a_bound_of_1() -> None:
    batch = TokenBatch(Segments(np.array([0, 1])), np.array([-1e-9], np.float32), np.array([0.0], np.float32))
    for precision, keeps in (("float64", False), ("float32", True)):
        gate = Gate(keep=(None, 1.0), precision=precision)  # type: ignore[arg-type]
        assert applied(Correction(gates=(gate,)), batch).kept.expanded()[0] == keeps


@pytest.mark.parametrize(
    "rule",
    [
        {"over": "segment", "level": "sequence"},
        {"bound_where": {"keep": [0.5, 2.0]}, "clip": [0.5, 2.0]},
        {"limit": 0.0},
    ],
)
def test_weights_that_mean_nothing(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Weight.model_validate(rule)


@pytest.mark.parametrize(
    "gate",
    [
        {"over": "prefix", "keep": [0.5, 2.0]},
        {"over": "batch", "statistic": "k2", "level": "sum", "keep": [None, 1.0]},
        {"widen": 0.5, "level": "sequence", "keep": [0.5, 2.0]},
    ],
)
def test_gates_that_mean_nothing(gate: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Gate.model_validate(gate)


def test_an_analysis_takes_every_word(tmp_path: Any) -> None:
    """Its counts and sums against the plain application to all rows at once; a sweep says the same."""
    rng = np.random.default_rng(5)
    rollout = [(-rng.exponential(1.0, 20)).tolist() for _ in range(30)]
    train = [[min(x + rng.normal(0, 0.2), 0.0) for x in row] for row in rollout]
    pl.DataFrame({"rollout_log_probs": rollout, "train_log_probs": train}).write_parquet(tmp_path / "d.parquet")
    rules = [
        {"weight": {"level": "geometric", "over": "segment", "truncate": 1.05}},
        {"weight": {"limit": 0.3, "clip": [0.9, 1.1], "bound_where": {"level": "max", "keep": [None, 1.5]}}},
        {"gates": [{"statistic": "binary_kl_max", "precision": "float32", "keep": [None, 0.02]}]},
        {"gates": [{"level": "sequence", "over": "prefix", "keep": [0.5, 2.0], "widen": 0.5}]},
    ]
    made = [correction_from_mapping({"name": f"c{number}", **rule}) for number, rule in enumerate(rules)]
    result = analyze([str(tmp_path)], made)
    (run,) = result.runs.values()
    flat = [np.concatenate([np.array(row, np.float64) for row in rows]) for rows in (rollout, train)]
    batch = TokenBatch(Segments(np.arange(0, 601, 20)), *flat)
    for correction in made:
        found, wanted = run.overall.corrections[correction.name], applied(correction, batch)
        flags = wanted.kept.expanded()
        weights = wanted.token_weights() * flags
        assert found["rejected_tokens"].value == pytest.approx(1 - flags.mean(), abs=1e-9)
        assert found["ess_token"].value == pytest.approx(sum(weights) ** 2 / (600 * sum(weights**2)), rel=1e-6)
    swept = sweep([str(tmp_path)], [Study(correction, ()) for correction in made]).overall.to_dicts()
    for row in swept:
        assert row["rejected_tokens"] == run.overall.corrections[row["correction"]]["rejected_tokens"].value
