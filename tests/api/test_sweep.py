"""Parts of a sweep compared with hand calculation, and the command line of `sweep`."""

import json
import math
import re
import time
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mismatchctl.api.sweep.result
import mismatchctl.api.sweep.sweep
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.sweep import sweep as accumulate
from mismatchctl.api.sweep.result import (
    add_pareto_column,
    pareto_mask,
    sort_by_cost,
    sweep_from_json,
    sweep_sentences,
)
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study, ThresholdAxis, make_studies
from mismatchctl.api.sweep.sweep import price_targets, sweep
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.application import Selection, Weights, measure_gate
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.grid.sums import reduce_families
from mismatchctl.measure.grid.thresholds import (
    BinIntervals,
    IntervalVariants,
    TokenBins,
    group_families,
    sum_token_table,
)
from mismatchctl.measure.reduction import MeasurePlan
from tests.cli import command
from tests.factories.dumps import write_dump
from tests.factories.random_dumps import Files, Shape, make_rows, write
from tests.paths import SAMPLE_DATA

SAMPLE = str(SAMPLE_DATA / "dense")


run = partial(command.run, "sweep")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.integers(0, 2**16))
@settings(derandomize=True)
def test_sums_over_bins_match_numpy(runs: list[tuple[int, int]], seed: int) -> None:
    table = np.random.default_rng(seed).normal(size=(3, 9, 2))
    starts, stops = (np.array(ends) for ends in zip(*runs, strict=True))
    found = BinIntervals(starts, stops).sums(table, axis=1)
    expected = np.stack([table[:, start:stop].sum(axis=1) for start, stop in runs], axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_values_outside_the_bins_cost_no_digits() -> None:
    table = np.array([1e300, 1.0, 2.0, 1e300])
    assert BinIntervals(np.array([1, 0]), np.array([3, 4])).sums(table)[0] == 3.0


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=20), st.integers(0, 2**16))
@settings(derandomize=True)
def test_bins_match_comparisons(values: list[float], seed: int) -> None:
    x, rng = np.array(values), np.random.default_rng(seed)
    gates = [
        Gate(statistic="k1", keep=(0.0, 1.0), inclusive=(low, high)) for low in (True, False) for high in (True, False)
    ]
    cuts = np.sort(rng.integers(0, len(x) + 1, 2))
    segments = Segments(np.array([0, *cuts, len(x)]))
    thresholds = IntervalVariants.from_gates(gates)
    (counts,) = sum_token_table([TokenBins.find(x, thresholds)], [None], segments)
    found = thresholds.inside.sums(counts)
    for number, gate in enumerate(gates):
        above = x >= 0 if gate.inclusive[0] else x > 0
        kept = above & (x <= 1 if gate.inclusive[1] else x < 1)
        assert found[:, number].tolist() == segments.sum(kept).tolist()


def test_points_are_the_product_of_axes() -> None:
    axes = [ThresholdAxis.parse("weight.clip.1", "1.1,4"), ThresholdAxis.parse("gates.0.keep", "1.01:1.04:2:log")]
    (study,) = make_studies([find_preset("miles-moe-2-veto")], axes)
    assert study.points == ((1.1, 1.01), (1.1, 1.04), (4.0, 1.01), (4.0, 1.04))
    last = study.correction_at(len(study.points) - 1)
    assert last.weight is not None and last.weight.clip == (0.5, 4.0)
    assert last.gates[0].keep == (1 / 1.04, 1.04) and last.gates[1:] == find_preset("miles-moe-2-veto").gates[1:]
    (family,) = group_families(study.grid)
    assert family.is_binned and family.grid == (2, 2, 1)


def test_rules_without_bins_are_applied_per_point() -> None:
    base = Correction(name="s", gates=(Gate(level="min", over="segment", keep=(0.5, None)),))
    (study,) = make_studies([base], [ThresholdAxis("gates.0.keep.0", (0.1, 0.5))])
    assert [family.is_binned for family in group_families(study.grid)] == [False, False]


@pytest.mark.slow
def test_few_points_of_many_token_rules_use_little_memory() -> None:
    gates = tuple(Gate(level="token", keep=(0.5, 2.0)) for _ in range(6))
    axes = [ThresholdAxis(f"gates.{number}.keep", (1.5 + number / 10, 3.0 + number)) for number in range(6)]
    (study,) = make_studies([Correction(name="six", gates=gates)], axes)
    (family,) = group_families(study.grid)
    assert (len(study.points), family.cells) == (64, 5**6)
    x = np.random.default_rng(0).normal(0.0, 0.5, 3000)
    batch = TokenBatch(Segments(np.arange(0, 3001, 2)), np.full(3000, -9.0), x - 9.0, columns={"step": np.zeros(1500)})
    tracemalloc.start()
    sums = reduce_families(batch, "run", MeasurePlan((family.correction,)), (family,))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ((own,),) = sums.values()
    assert own.totals.sums[0, 0] == 3000
    assert peak < 150e6  # 1,500 sequences have 190 MB of a single column


def test_pareto_points_are_not_worse_anywhere_and_first_of_equals() -> None:
    costs = np.array([[0.1, 0.5], [0.2, 0.4], [0.2, 0.6], [0.1, 0.5], [math.nan, 0.0], [0.3, 0.4]])
    assert pareto_mask(costs).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@pytest.mark.parametrize("values", [1, 3, 30])
def test_the_pareto_front_matches_pairwise_comparison(objectives: int, values: int) -> None:
    rng = np.random.default_rng(objectives)
    costs = rng.choice([*range(values), math.nan], (80, 4), p=[0.96 / values] * values + [0.04])
    costs[:, objectives:] = 0.5  # equal columns
    better = [[(a <= b).all() and ((a < b).any() or i < j) for i, a in enumerate(costs)] for j, b in enumerate(costs)]
    expected = [not any(row) and not np.isnan(own).any() for row, own in zip(better, costs, strict=True)]
    assert pareto_mask(costs).tolist() == expected


@pytest.mark.slow
def test_the_front_of_the_largest_grid_is_fast() -> None:
    cut = np.linspace(0, 1, 100_000)
    start = time.process_time()
    assert pareto_mask(np.column_stack([cut, -cut, cut, -cut])).all()
    assert time.process_time() - start < 30  # one copy of the front per row would take minutes


@pytest.mark.parametrize(
    ("path", "values", "flagged"),
    [
        ("weight.truncate", (3.0, 2.0, 1.5, 1.05, 1.01), {3.0, 1.05, 1.01}),  # bounds from 1.5 to 3 have no effect
        ("weight.clip", (1.5, 3.0, None, 2.0), {None}),
        ("weight.clip.0", (0.1, 0.5, 0.3), {0.1}),
        ("gates.0.keep.1", (2.0, 4.0, 3.0), {4.0}),
        ("gates.0.keep.0", (0.3, 0.1, 0.2), {0.1}),
        ("gates.0.keep", (2.0, 5.0, 3.0), {5.0}),
        ("gates.1.keep", (0.5, 0.7, 0.6), {0.7}),
    ],
)
def test_inactive_bounds_flag_the_loosest_point(
    path: str, values: tuple[float | None, ...], flagged: set[float | None]
) -> None:
    """This must not depend on the last digits of the sums."""
    weight = Weight(truncate=9.0) if path == "weight.truncate" else Weight(clip=(0.01, 9.0))
    base = Correction(weight=weight, gates=(Gate(keep=(0.01, 9.0)), Gate(statistic="k1", keep=(-9.0, 9.0))))
    study = Study(base, (ThresholdAxis(path, values),))
    cut = {1.05: 0.01, 1.01: 0.02}
    for seed in range(5):
        noise = 1 + 2e-15 * np.random.default_rng(seed).uniform(-1, 1, (4, len(values)))
        lost = np.array([cut.get(value or 9.0, 0.0) for value in values])
        rows = pl.DataFrame({
            "run": "r", "correction": base.name, "point": range(len(values)), "rejected_tokens": 0.25 * noise[0],
            "ess_token": (0.9 + lost) * noise[1], "k3_kept": 0.01 * noise[2],
            "weight_mean": (1.01 - lost) * noise[3], "weight_bias": (1.01 - lost) * noise[3] - 1.01,
        })  # fmt: skip
        best = sort_by_cost(add_pareto_column(rows, [study]).filter("pareto").to_dicts())
        assert {values[row["point"]] for row in best} == flagged
        assert values[best[0]["point"]] == (1.01 if 1.01 in flagged else next(iter(flagged)))


def test_rows_are_equal_however_groups_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = make_studies([find_preset("token_tis")], [ThresholdAxis.parse("weight.truncate", "1.1:4:5")])
    at_once = sweep([SAMPLE], chosen, threads=1).groups.collect()
    monkeypatch.setattr(accumulate.SweepAccumulator, "closing_size", 1)
    assert sweep([SAMPLE], chosen, threads=1).groups.collect().equals(at_once)
    assert at_once["group"].dtype == pl.Int64


def test_large_grids_are_refused_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = ThresholdAxis.parse("weight.clip.1", "1.1:4:3"), ThresholdAxis.parse("gates.0.keep.1", "1.001:1.1:4")
    chosen, reported = [Study(find_preset("miles-moe-2"), axes)], []
    sweep([SAMPLE], chosen, notice=reported.append)
    assert reported == []
    monkeypatch.setattr(mismatchctl.api.sweep.sweep, "MEMORY_WARNING_BYTES", 1000)
    sweep([SAMPLE], chosen, notice=reported.append, progress=lambda done, expected: reported.append("read"))
    assert reported[0].startswith("12 points may take 0.0 GB of memory") and reported[1] == "read"
    (family,) = group_families(chosen[0].grid)
    numbers = 2 + 3 + 2 * 4 + 4 * 3 * 4  # constants, and columns that vary along one or both axes
    assert family.layouts.rows.width == numbers


WISHES = [("rejected_tokens", 0.05), ("rejected_sequences", 0.2), ("ess_token", 0.93)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_targets_are_met_at_the_tightest_value(seed: int, tmp_path: Path) -> None:
    """`analyze` at the threshold meets the target, and at the next tighter value it does not."""
    rows = make_rows(Shape(seed, sequences=60, longest=40, flavours=("noise", "heavy", "grid"), masks=("all",)))
    path = str(write(rows, Files(tmp_path / "run", row_group=16)))
    found = sweep(
        [path], make_studies([find_preset("token_tis")], [ThresholdAxis("weight.truncate", (2.0,))]), wishes=WISHES
    )
    assert len(found.targets) == 9
    for target in found.targets:
        assert target.status == "ok" and target.correction is not None and target.threshold is not None
        here, tighter = (
            parse_correction(_scaled(target.correction, factor) | {"name": name})
            for name, factor in (("here", 1.0), ("tighter", 1 - 1e-9))
        )
        values = analyze([path], [here, tighter]).runs["run"].overall.corrections
        reached, beyond = (values[name][target.wish].value or 0.0 for name in ("here", "tighter"))
        assert math.isclose(reached, target.reached or 0.0, rel_tol=1e-12)
        if target.wish == "ess_token":
            assert reached >= target.wanted
        else:
            assert reached <= target.wanted < beyond
        low, high = target.interval or (None, None)
        assert (low is None or low <= target.threshold) and (high is None or target.threshold <= high)


def test_single_sequences_give_no_interval_of_a_target(tmp_path: Path) -> None:
    rows = make_rows(Shape(1, sequences=1, longest=40, flavours=("noise",), masks=("all",)))
    path = str(write(rows, Files(tmp_path / "run", row_group=16)))
    found = sweep(
        [path], make_studies([find_preset("token_tis")], [ThresholdAxis("weight.truncate", (2.0,))]), wishes=WISHES
    )
    solved = [target for target in found.targets if target.threshold is not None]
    assert solved and all(target.interval is None for target in solved)
    assert re.search(r"ratio within \[1/x, x\]: [\d.]+;", sweep_sentences(found, "run")[1])


def _scaled(correction: dict[str, Any], factor: float) -> dict[str, Any]:
    def inwards(bound: float | None) -> float | None:
        return None if bound is None else bound if factor == 1 else math.exp(math.log(bound) * factor)

    if "weight" in correction:
        return correction
    (gate,) = correction["gates"]
    return correction | {"gates": [gate | {"keep": [inwards(bound) for bound in gate["keep"]]}]}


@pytest.mark.parametrize(
    ("target", "answer"), [("0.5", "every threshold meets it"), ("0.9999", "no threshold meets it")]
)
def test_the_first_line_states_whether_thresholds_meet_a_target(target: str, answer: str) -> None:
    done = run(SAMPLE, "-c", "token_tis", "--vary", "weight.truncate=1.5,2", "--target-ess", target)
    assert done.stdout.splitlines()[0].endswith(f": {answer}")


def test_unreachable_targets_are_reported() -> None:
    found = sweep(
        [SAMPLE],
        make_studies([find_preset("token_tis")], [ThresholdAxis("weight.truncate", (2.0,))]),
        wishes=[("ess_token", 0.1)],
    )
    (target,) = found.targets
    assert target.threshold is None and target.status.startswith("met at every threshold")
    (_, sentence) = sweep_sentences(found, found.runs[0])
    assert "met at every threshold" in sentence and "no threshold" not in sentence


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-c", "token_tis"], "missing --vary"),
        (["-c", "nope"], "unknown preset 'nope'"),
        (["--vary", "weight.truncate=1:2:3"], "--vary needs --correction"),
        (["-c", "token_tis", "--vary", "weight.truncat=1:2:3"], "did you mean 'truncate'?"),
        (["-c", "token_tis", "--vary", "loss=ppo,cispo"], "no metric of a sweep depends on the loss"),
        (["-c", "token_tis", "--vary", "weight.truncate=1:2"], "write a range as START:END:COUNT"),
        (["-c", "token_tis", "--vary", "weight.truncate"], "write PATH=VALUES"),
        (["-c", "token_tis", "--vary", "weight.truncate=0:2:3:log"], "START and END must be above 0"),
        (["-c", "token_tis", "--vary", "weight.truncate=a,b"], "weight.truncate"),
        (["-c", "geo_rs", "--vary", "gates.7.keep=1.1,1.2"], "gates has no entry 7"),
        (["-c", "geo_rs", "--vary", "weight.truncate=1,2"], "the correction has no weight rule"),
        (["-c", "geo_rs", "--vary", "gates.0.level=token,sum"], "level 'sum' does not fit"),
        (["--target-rejection", "words=0.1"], "tokens=5% or sequences=5%"),
        (["--target-rejection", "7"], "between 0 and 1"),
        (["-o", "sweep.xlsx"], ".parquet, .csv, .json"),
    ],
)
def test_wrong_arguments_give_one_sentence(words: list[str], message: str) -> None:
    done = run(SAMPLE, *words)
    assert done.exit_code == 2 and message in " ".join(done.stderr.split()), done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.slow
def test_all_outputs_have_equal_rows(tmp_path: Path) -> None:
    words = [SAMPLE, "-c", "geo_rs", "--vary", "gates.0.keep.1=1.001,1.01", "--by", "worker"]
    for name in ("a.parquet", "a.csv", "a.json"):
        run(*words, "-q", "-o", str(tmp_path / name), code=0)
    table, csv = pl.read_parquet(tmp_path / "a.parquet"), pl.read_csv(tmp_path / "a.csv", infer_schema_length=None)
    printed = run(*words, "--json")
    assert printed.stdout == (tmp_path / "a.json").read_text()
    first = ["run", "correction", "point", "gates.0.keep.1", "scope", "group"]
    assert table.columns[: len(first)] == first == csv.columns[: len(first)] and len(table) == len(csv)
    assert set(table["scope"]) == {"overall", "group", "worker"}
    assert csv["rejected_tokens"].to_list() == table["rejected_tokens"].to_list()
    assert {"rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean"} <= set(table.columns)
    for name in ("a.parquet", "a.csv", "a.json"):
        run(*words, "-q", "-o", str(tmp_path / name), code=0)  # the command may replace its own output
        (tmp_path / name).write_text("mine")
        assert "already exists" in run(*words, "-o", str(tmp_path / name)).stderr
    assert run(*words, "-o", "-").stdout == printed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_terminal_shows_selected_points(columns: str) -> None:
    targets = ["--target-rejection", "0.05", "--target-rejection", "sequences=0.1", "--target-ess", "0.9"]
    done = run(SAMPLE, *targets, code=0, COLUMNS=columns)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns) and len(lines) < 140
    assert "geometric mean within" in done.stdout and "token weights truncated at x" in done.stdout


def test_geo_varies_the_geometric_gate() -> None:
    (study,) = json.loads(run(SAMPLE, "--geo", "1.001,1.01", "--json").stdout)["studies"]
    assert study["axes"] == [{"path": "gates.0.keep", "values": [1.001, 1.01], "log": False}]
    assert study["correction"]["gates"][0]["level"] == "geometric"


def test_default_studies_contain_the_usual_thresholds() -> None:
    values = {study.name: study.axes[0].values for study in DEFAULT_STUDIES}
    usual = {"token_truncate": 2.0, "seq_reject": 2.0, "geo": 1.001, "veto": 1e-4}
    assert all(value in values[name] and len(values[name]) == 41 for name, value in usual.items())


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("sequences=5%", 0.05)])
def test_targets_can_be_percentages(text: str, share: float) -> None:
    targets = json.loads(run(SAMPLE, "--geo", "1.001,1.01", "--target-rejection", text, "--json").stdout)["targets"]
    assert {target["wanted"] for target in targets} == {share}


def test_targets_show_the_metrics_of_their_correction() -> None:
    """This includes two targets with different thresholds of one rule."""
    wishes = [("rejected_tokens", 0.05), ("rejected_tokens", 0.02)]
    found = sweep([SAMPLE], DEFAULT_STUDIES[:1], wishes=wishes)
    prices = price_targets(found, [SAMPLE])
    for target, price in zip(found.targets, prices, strict=True):
        correction = parse_correction({**(target.correction or {}), "name": "solved"}, "test")
        values = analyze([SAMPLE], [correction]).runs[target.run].overall.corrections["solved"]
        assert price["rejected_tokens"] == pytest.approx(target.reached, abs=1e-12)
        for key in ("rejected_sequences", "k3_kept"):
            assert price[key] == pytest.approx(values[key].value, rel=1e-9)


def test_extreme_ratios_match_single_corrections() -> None:
    """Next to e^20, 1 + (w - 1) would lose the digits of a weight of e^-20."""
    correction = parse_correction(
        {
            "name": "far",
            "weight": {"level": "token", "truncate": 2},
            "gates": [{"level": "token", "statistic": "ratio", "keep": [0.5, 1e12]}],
        }
    )
    rollout = np.full(3, -40.0)
    segments = Segments.from_lengths([3])
    ratios = Ratios(rollout + np.array([-20.0, 0.0, 30.0]), rollout, segments)
    assert correction.weight is not None
    found = Weights(correction.weight, ratios).bounded
    np.testing.assert_allclose(found, [math.exp(-20.0), 1.0, 2.0], rtol=1e-15)
    batch = TokenBatch(segments, ratios.log_probs[0], rollout, rows=np.arange(1))
    measured = measure_gate(correction.gates[0], ratios, Selection.everything(segments), batch)
    assert np.abs(measured).max() == correction.gates[0].limit == 20.0


def test_rules_are_built_once_per_variant() -> None:
    axes = [ThresholdAxis.parse("weight.clip.1", "1.1:4:100"), ThresholdAxis.parse("gates.0.keep", "1.01:1.04:200:log")]
    study = Study(find_preset("miles-moe-2-veto"), tuple(axes))
    assert len(study.points) == 20_000
    assert (len(study.grid.weights), [len(variants) for variants in study.grid.gates]) == (100, [200, 1])
    point = 7 * 200 + 11
    weight, gate = study.correction_at(point).weight, study.correction_at(point).gates[0]
    assert weight is not None and (weight.clip, gate.keep[1]) == ((0.5, axes[0].values[7]), axes[1].values[11])
    mirrored = Study(find_preset("geo_rs"), (ThresholdAxis("gates.0.keep", (2.0, 0.5, 3.0)),))
    assert mirrored.grid.places[1].tolist() == [0, 0, 1]  # 2 and 1/2 give the same interval


def test_invalid_points_are_named() -> None:
    axes = (ThresholdAxis("weight.clip.1", (1.1, 4.0)), ThresholdAxis("gates.0.keep", (1.01, -1.0)))
    with pytest.raises(ConfigError, match=r"at weight.clip.1=1.1, gates.0.keep=-1.0: "):
        make_studies([find_preset("miles-moe-2")], axes)


def test_saved_sweeps_may_contain_whole_numbers_without_a_point(tmp_path: Path) -> None:
    made = sweep([str(write_dump(tmp_path / "run"))], DEFAULT_STUDIES)
    data = json.loads(made.to_json())
    for name, values in data["table"].items():
        whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
        data["table"][name] = whole
    assert sweep_from_json(data).overall["rejected_tokens"].to_list() == made.overall["rejected_tokens"].to_list()
