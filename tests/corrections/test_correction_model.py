"""Every field of a Correction, compared with a calculation in the test."""

import math
from typing import Any

import numpy as np
import polars as pl
import pytest
from pydantic import ValidationError

import mismatchctl as mm
from mismatchctl.api.advise.candidates import apply_to_sample, read_samples
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.application import apply_correction
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import load_framework
from tests.factories.sequence_samples import read_sample

LENGTHS = (7, 0, 12, 1, 30)
MASKED = {0: (3, 4), 4: (0, 10, 11, 20)}
"""Masked tokens between valid tokens, by sequence."""


def made(seed: int = 0, scale: float = 0.3) -> TokenBatch:
    rng = np.random.default_rng(seed)
    segments = Segments.from_lengths(LENGTHS)
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
    return apply_correction(correction, {"train/rollout": Ratios(batch.train, batch.rollout, batch.segments)}, batch)


def kept(**gate: Any) -> list[bool]:
    return list(applied(Correction(gates=(Gate(**gate),))).kept.expand())


def runs(row: slice) -> list[list[int]]:
    found: list[list[int]] = []
    for token in range(row.start, row.stop):
        if found and found[-1][-1] == token - 1 and BATCH.positions[token] == BATCH.positions[token - 1] + 1:
            found[-1].append(token)
        else:
            found.append([token])
    return found


def test_weights_can_be_computed_per_turn() -> None:
    weights = applied(Correction(weight=Weight(level="geometric", over="segment", truncate=1.05))).token_weights()
    wanted = np.zeros(len(D))
    for row in ROWS:
        for run in runs(row):
            wanted[run] = min(math.exp(sum(D[run]) / len(run)), 1.05)
    np.testing.assert_allclose(weights, wanted, rtol=1e-12)
    assert len({len(run) for row in ROWS for run in runs(row)}) > 2


def test_weights_can_use_the_remaining_tokens() -> None:
    gate = Gate(keep=(0.8, 1.25))
    weights = applied(Correction(weight=Weight(level="sequence", sees="remaining"), gates=(gate,))).token_weights()
    left = np.abs(D) <= np.log(1.25)
    for row in ROWS:
        np.testing.assert_allclose(weights[row], math.exp(sum(D[row][left[row]])), rtol=1e-12)


def test_weights_of_turns_can_use_the_remaining_tokens() -> None:
    weight = Weight(level="geometric", over="segment", sees="remaining")
    weights = applied(Correction(weight=weight, gates=(Gate(keep=(0.8, 1.25)),))).token_weights()
    left = np.abs(D) <= np.log(1.25)
    wanted = np.ones(len(D))  # a turn without kept tokens
    for run in (run for row in ROWS for run in runs(row) if left[run].any()):
        wanted[run] = math.exp(D[run][left[run]].mean())
    np.testing.assert_allclose(weights, wanted, rtol=1e-12)


@pytest.mark.filterwarnings("error")
def test_a_mean_ratio_of_zero_is_refused_as_normalizer() -> None:
    batch = TokenBatch(Segments(np.array([0, 2])), np.array([-1.0, -1.0]), np.array([-900.0, -900.0]))
    outcome = applied(Correction(gates=(Gate(level="mean", clamp="none", keep=(0.5, None)),)), batch)
    assert not outcome.kept.expand().any()


@pytest.mark.parametrize(("rule", "bound"), [({"limit": 0.2}, 0.2), ({"clamp": "none"}, math.inf)])
def test_weights_are_clamped_at_the_given_limit(rule: dict[str, Any], bound: float) -> None:
    batch = made(scale=15.0)
    log_ratio = batch.train.astype(np.float64) - batch.rollout.astype(np.float64)
    weights = applied(Correction(weight=Weight(**rule)), batch).token_weights()
    np.testing.assert_allclose(weights, np.exp(np.clip(log_ratio, -bound, bound)), rtol=1e-12)


def test_sequence_weights_can_clamp_tokens_before_the_sum() -> None:
    weights = applied(Correction(weight=Weight(level="sequence", clamp="token", limit=0.1))).token_weights()
    for row in ROWS:
        np.testing.assert_allclose(weights[row], math.exp(sum(np.clip(D[row], -0.1, 0.1))), rtol=1e-12)


def test_weights_can_be_bounded_only_where_a_gate_rejects() -> None:
    where = Gate(level="max", keep=(None, 1.5))
    weights = applied(Correction(weight=Weight(clip=(0.9, 1.1), bound_where=where))).token_weights()
    for row in ROWS:
        beyond = max(D[row], default=0) > math.log(1.5)
        wanted = np.clip(np.exp(D[row]), 0.9, 1.1) if beyond else np.exp(D[row])
        np.testing.assert_allclose(weights[row], wanted, rtol=1e-12)


def test_non_finite_log_probs_are_rejected() -> None:
    batch = TokenBatch(Segments(np.array([0, 3])), np.array([-1.0, -np.inf, np.nan]), np.array([-1.0, -1.0, -1.0]))
    for said, wanted in (("keep", [1, np.inf, np.nan]), ("one", [1, 1, 1]), ("zero", [1, 0, 0])):
        rule = Weight(clamp="none", nonfinite=said)  # type: ignore[arg-type]
        np.testing.assert_array_equal(applied(Correction(weight=rule), batch).token_weights(), wanted)
    for said, left in (("reject", [1, 0, 0]), ("keep", [1, 0, 1]), ("one", [1, 1, 1])):
        gate = Gate(keep=(0.5, 2.0), nonfinite=said)  # type: ignore[arg-type]
        assert list(applied(Correction(gates=(gate,)), batch).kept.expand()) == [bool(flag) for flag in left]


@pytest.mark.parametrize("level", ["sequence", "geometric", "min", "max"])
def test_gates_can_judge_each_token_by_its_prefix(level: str) -> None:
    take = {"sequence": sum, "geometric": np.mean, "min": min, "max": max}[level]
    wanted = []
    for row in ROWS:
        for end in range(row.start, row.stop):
            wanted.append(abs(take(D[row.start : end + 1])) <= math.log(1.25))
    assert kept(level=level, over="prefix", keep=(0.8, 1.25)) == wanted
    assert 0 < sum(wanted) < len(wanted)


def test_arithmetic_sequence_gates_use_the_mean_ratio() -> None:
    """The arithmetic mean differs from the geometric one by a few large ratios."""
    means = [np.exp(D[row]).mean() if row.stop > row.start else 1.0 for row in ROWS]
    bound = float(np.median(means))
    wanted = [mean <= bound for mean, row in zip(means, ROWS, strict=True) for _ in D[row]]
    assert kept(level="mean", keep=(None, bound * (1 + 1e-12))) == wanted
    assert wanted != kept(level="geometric", keep=(None, bound))
    so_far = [np.exp(D[row])[: i + 1].mean() <= bound for row in ROWS for i in range(row.stop - row.start)]
    assert kept(level="mean", over="prefix", keep=(None, bound * (1 + 1e-12))) == so_far


def test_bounds_can_widen_with_the_position() -> None:
    wanted = []
    for row in ROWS:
        wanted += [abs(d) <= math.log(1.25) * math.sqrt(place + 1) for place, d in enumerate(D[row])]
    assert kept(keep=(0.8, 1.25), widen=0.5) == wanted
    assert wanted != kept(keep=(0.8, 1.25))


def test_trimming_drops_the_largest_until_the_mean_is_inside() -> None:
    left = sorted(range(len(D)), key=lambda token: D[token] ** 2)
    while len(left) > 1 and sum(D[left] ** 2) / len(left) >= 0.02:
        left.pop()
    gate = {"statistic": "k2", "level": "mean", "over": "batch", "keep": (None, 0.01), "inclusive": (True, False)}
    assert kept(**gate) == [token in set(left) for token in range(len(D))]
    assert 1 < len(left) < len(D)
    assert sum(kept(**(gate | {"keep": (None, 1e-30)}))) == 1


def test_each_step_is_trimmed_as_one_batch(tmp_path: Any) -> None:
    """A step in several files is trimmed as a whole by every command."""
    rng = np.random.default_rng(4)
    steps = rng.integers(0, 3, 60)
    rows = [rng.normal(0, 0.05 * (1 + step), rng.integers(1, 30)) for step in steps]
    frame = pl.DataFrame(
        {
            "step": steps,
            "rollout_log_probs": [np.full(len(row), -2.0).tolist() for row in rows],
            "train_log_probs": [(row - 2.0).tolist() for row in rows],
        }
    )
    for part in range(3):
        frame[part::3].write_parquet(tmp_path / f"{part}.parquet")
    gates = [
        Gate(statistic="k2", level="mean", over="batch", keep=(None, bound), inclusive=(True, False))
        for bound in (0.001, 0.004, 1.0)
    ]
    wanted = []
    for gate in gates:
        left = 0
        for step in range(3):
            values = sorted(np.concatenate([row for row, own in zip(rows, steps, strict=True) if own == step]) ** 2 / 2)
            while len(values) > 1 and sum(values) / len(values) >= gate.keep[1]:  # type: ignore[operator]
                values.pop()
            left += len(values)
        wanted.append(1 - left / sum(map(len, rows)))
    assert wanted[0] > wanted[1] > wanted[2] == 0
    made = [Correction(name=str(number), gates=(gate,)) for number, gate in enumerate(gates)]
    (run,) = analyze([str(tmp_path)], made).runs.values()
    found = [run.overall.corrections[one.name]["rejected_tokens"].value for one in made]
    assert found == pytest.approx(wanted)
    swept = sweep([str(tmp_path)], [Study(made[0], (ThresholdAxis("gates.0.keep.1", (0.001, 0.004, 1.0)),))])
    assert swept.overall["rejected_tokens"].to_list() == found
    sample = read_sample([str(tmp_path)], made)
    assert list(1 - sample.kept.sum(axis=0) / sample.tokens.sum()) == pytest.approx(wanted)
    (advised,) = read_samples([str(tmp_path)]).values()
    assert [1 - apply_to_sample(one, advised).kept.sum() / advised.batch.tokens for one in made] == pytest.approx(
        wanted
    )
    late = Correction(gates=(Gate(keep=(0.5, 2.0)), gates[0].model_copy(update={"sees": "remaining"})))
    with pytest.raises(ConfigError, match=r"Put gates\.1 first"):
        analyze([str(tmp_path)], [late])


def test_sequences_above_the_age_limit_are_rejected(tmp_path: Any) -> None:
    """The age is the number of weight updates since sampling. Sequences without versions are too old."""
    rows, sampled = [[-1.0] * 3] * 5, [7, 4, 3, None, 9]
    columns = {"rollout_log_probs": rows, "train_log_probs": rows, "train_version": [7, 7, 7, 7, 9]}
    pl.DataFrame({**columns, "rollout_version": sampled}).write_parquet(tmp_path / "d.parquet")
    gate = Gate(statistic="age", level="sequence", keep=(None, 3.0))
    made = [
        Correction(name="fresh", gates=(gate,)),
        Correction(name="known", gates=(gate.model_copy(update={"nonfinite": "keep"}),)),
    ]
    (run,) = analyze([str(tmp_path)], made).runs.values()
    found = {name: own["rejected_sequences"].value for name, own in run.overall.corrections.items()}
    assert found == {"fresh": pytest.approx(2 / 5), "known": pytest.approx(1 / 5)}
    swept = sweep([str(tmp_path)], [Study(made[0], (ThresholdAxis("gates.0.keep.1", (0.0, 3.0, 4.0)),))])
    assert swept.overall["rejected_sequences"].to_list() == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    sample = read_sample([str(tmp_path)], made)
    assert list((sample.kept == 0).mean(axis=0)) == pytest.approx([2 / 5, 1 / 5])
    (advised,) = read_samples([str(tmp_path)]).values()
    assert apply_to_sample(made[0], advised).kept.sum() / advised.batch.tokens == pytest.approx(3 / 5)
    assert mm.keep(rows, rows, None, made[0], age=[0, 3, 4, np.nan, 0]) == [[age] * 3 for age in (1, 1, 0, 0, 1)]
    with pytest.raises(ConfigError, match="pass the argument age"):
        mm.keep(rows, rows, None, made[0])
    pl.DataFrame({name: columns[name] for name in list(columns)[:2]}).write_parquet(tmp_path / "d.parquet")
    with pytest.raises(DataError, match="rollout_version"):
        analyze([str(tmp_path)], made)


def test_the_proximal_policy_is_interpolated_by_version_age(tmp_path: Any) -> None:
    """The policy one update before the current one is interpolated. Ages 0 and 1 do not change."""
    rng = np.random.default_rng(6)
    ages = [0, 1, 2, 5, 40]
    rollout = [-rng.exponential(1.0, 8) for _ in ages]
    current = [np.minimum(row + rng.normal(0, 0.5, 8), 0.0) for row in rollout]
    columns = {
        "rollout_log_probs": [row.tolist() for row in rollout],
        "train_log_probs": [row.tolist() for row in rollout],
        "current_log_probs": [row.tolist() for row in current],
        "advantages": [1.0] * 5,
        "rollout_version": [50 - age for age in ages],
        "train_version": [50] * 5,
    }
    pl.DataFrame(columns).write_parquet(tmp_path / "d.parquet")
    shares = [0, 0, 1 / 2, 4 / 5, 39 / 40]
    d = [share * (c - r) for share, c, r in zip(shares, current, rollout, strict=True)]
    kept = [abs(row) <= math.log(1.25) for row in d]
    assert 0 < sum(map(sum, kept)) < 40
    areal = load_framework("areal")
    rule = {"level": "token", "action": "mask", "metric": "ratio", "upper": 1.25, "lower": 0.8}
    made = areal.correction({"prox_logp_method": "loglinear", "rejection_sampling": rule})
    plain = Correction(**{field: getattr(made, field) for field in Correction.model_fields})
    assert areal.native(plain)[0]["prox_logp_method"] == "loglinear"
    (run,) = analyze([str(tmp_path)], [made]).runs.values()
    assert run.overall.corrections[made.name]["rejected_tokens"].value == pytest.approx(1 - sum(map(sum, kept)) / 40)
    replayed = areal.replay(pl.DataFrame(columns).to_arrow(), made)
    assert replayed.weights is not None
    for found, left, own, wanted in zip(replayed.keep, replayed.weights, d, kept, strict=True):
        assert list(found) == list(wanted)
        np.testing.assert_allclose(left, np.where(wanted, np.exp(own), 0), rtol=1e-12)


def test_random_gates_depend_on_the_seed() -> None:
    rng = np.random.default_rng(3)
    size = 40_000
    rollout = -rng.exponential(1.0, size)
    batch = TokenBatch(Segments(np.arange(0, size + 1, 4)), rollout, rollout + np.log(2.0))
    gate = Gate(keep=(None, 1.0), seed=7)
    flags = applied(Correction(gates=(gate,)), batch).kept.expand()
    assert abs(flags.mean() - 0.5) < 4 * 0.5 / math.sqrt(size)
    again = applied(Correction(gates=(gate.model_copy(update={"seed": 8}),)), batch).kept.expand()
    assert abs((flags == again).mean() - 0.5) < 4 * 0.5 / math.sqrt(size)


def test_gate_statistics_of_a_token_match_formulas() -> None:
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


def test_gates_can_reject_only_drifting_tokens() -> None:
    outside = np.array([not flag for flag in kept(keep=(0.9, 1.1))])
    assert BATCH.advantages is not None
    away = D * BATCH.advantages > 0
    assert kept(keep=(0.9, 1.1), when="drifting") == list(~(outside & away))


def test_precision_decides_at_a_bound_of_one() -> None:
    batch = TokenBatch(Segments(np.array([0, 1])), np.array([-1e-9], np.float32), np.array([0.0], np.float32))
    for precision, keeps in (("float64", False), ("float32", True)):
        gate = Gate(keep=(None, 1.0), precision=precision)  # type: ignore[arg-type]
        assert applied(Correction(gates=(gate,)), batch).kept.expand()[0] == keeps


@pytest.mark.parametrize(
    "rule",
    [
        {"over": "segment", "level": "sequence"},
        {"bound_where": {"keep": [0.5, 2.0]}, "clip": [0.5, 2.0]},
        {"limit": 0.0},
    ],
)
def test_contradictory_weights_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Weight.model_validate(rule)


@pytest.mark.parametrize(
    "gate",
    [
        {"over": "prefix", "keep": [0.5, 2.0]},
        {"over": "batch", "statistic": "k2", "level": "sum", "keep": [None, 1.0]},
        {"widen": 0.5, "level": "sequence", "keep": [0.5, 2.0]},
        {"statistic": "age", "level": "max", "keep": [None, 4]},
        {"statistic": "age", "level": "sequence", "over": "prefix", "keep": [None, 4]},
    ],
)
def test_contradictory_gates_are_refused(gate: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Gate.model_validate(gate)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"weight": {"truncate": "abc"}}, "weight.truncate takes a number, found 'abc'"),
        ({"weight": {"level": "tokn"}}, "weight.level must be 'token', 'sequence' or 'geometric', found 'tokn'"),
        ({"weight": {"clip": [1]}}, "weight.clip.1 is missing"),
        ({"weight": {"clip": [1, 2, 3]}}, "weight.clip takes a list of 2 values, found a list of 3 values"),
        ({"weight": {"limit": -1}}, "weight.limit must be greater than 0, found -1"),
        ({"weight": {"bound_where": {"lvel": 1}}}, "unknown key 'weight.bound_where.lvel' (did you mean 'level'?)"),
        ({"weight": 5}, "weight takes keys and values, found 5"),
        ({"gates": {"keep": [1, 2]}}, "gates takes a list, found keys and values"),
        ({"gates": [{"keep": None}]}, "gates.0.keep takes a list, found null"),
        ({"gates": [{"keep": [2, 1]}]}, "gates.0: lower bound 2.0 is above upper bound 1.0"),
        ({"gates": [{"keep": [1, 2], "seed": 1.5}]}, "gates.0.seed takes a whole number, found 1.5"),
        ({"name": ""}, "name must not be empty, found ''"),
        ({1: 2}, "unknown key '1'"),
    ],
)
def test_errors_of_corrections_name_field_and_remedy(data: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_correction(data, "mine.yaml")
    assert str(error.value) == f"mine.yaml: {said}"


def test_analyze_and_sweep_apply_every_field(tmp_path: Any) -> None:
    """Counts and sums match the plain application to all rows, in analyze and sweep."""
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
    made = [parse_correction({"name": f"c{number}", **rule}) for number, rule in enumerate(rules)]
    result = analyze([str(tmp_path)], made)
    (run,) = result.runs.values()
    flat = [np.concatenate([np.array(row, np.float64) for row in rows]) for rows in (rollout, train)]
    batch = TokenBatch(Segments(np.arange(0, 601, 20)), *flat)
    for correction in made:
        found, wanted = run.overall.corrections[correction.name], applied(correction, batch)
        flags = wanted.kept.expand()
        weights = wanted.token_weights() * flags
        assert found["rejected_tokens"].value == pytest.approx(1 - flags.mean(), abs=1e-9)
        assert found["ess_token"].value == pytest.approx(sum(weights) ** 2 / (600 * sum(weights**2)), rel=1e-6)
    swept = sweep([str(tmp_path)], [Study(correction, ()) for correction in made]).overall.to_dicts()
    for row in swept:
        assert row["rejected_tokens"] == run.overall.corrections[row["correction"]]["rejected_tokens"].value


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"weight": {"truncate": True}}, "weight: truncate needs a number, not true or false"),
        ({"gates": [{"keep": [False, 2.0]}]}, r"gates.0: keep needs a number, not true or false"),
        ({"gates": [{"keep": [0.5, 2.0], "seed": True}]}, r"gates.0: seed needs a number, not true or false"),
        (
            {"weight": {"truncate": math.nan}},
            r"weight.truncate: NaN is not a valid bound; write a finite number >= 0, or null",
        ),
        (
            {"gates": [{"statistic": "k1", "keep": [math.inf, None]}]},
            "inf is not a valid bound; write a finite number, or null",
        ),
    ],
)
def test_invalid_bounds_are_refused(mapping: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_correction(mapping)


def test_inclusive_flags_stay_booleans() -> None:
    gate = {"keep": [0.5, 2.0], "inclusive": [True, False]}
    assert parse_correction({"gates": [gate]}).gates[0].inclusive == (True, False)
