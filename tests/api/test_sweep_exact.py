"""Each point of a sweep equals an analysis with the same threshold, for every metric, step and run."""

import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze import analyze as analyze_module
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.sweep.result import METRICS_WITH_ERRORS, Sweep
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL, Kernel
from mismatchctl.measure.metrics.registry import COST_METRICS
from mismatchctl.results.model import Groups, Value
from tests.factories.random_dumps import BOUNDS, RATIO_BOUNDS, Files, Shape, corrections, make_rows, shapes, write
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA
COUNTS = ("kept_tokens", "tokens", "sequences")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("row_groups_apart")]
MANY = settings(
    derandomize=True,
    max_examples=8,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def _all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyze_module, "CORRECTION_DIGITS", 17)


def brute_force(paths: Sequence[str], studies: Sequence[Study], by: Sequence[str] = ()) -> Any:
    """Analyze each point. Return the Result, and the name of each (correction, point)."""
    named = {
        f"{study.name}-{point}": correction.model_copy(update={"name": f"{study.name}-{point}"})
        for study in studies
        for point, correction in enumerate(map(study.correction_at, range(len(study.points))))
    }
    return analyze(paths, list(named.values()), by=by, threads=1)


def check(found: Sweep, truth: Any) -> int:
    """Compare every value of a sweep with `analyze`, and return the number of values."""
    groups = found.groups.collect()
    compared = 0
    for run, expected in truth.runs.items():
        for row in found.overall.filter(pl.col("run") == run).to_dicts():
            wanted = expected.overall.corrections[f"{row['correction']}-{row['point']}"]
            compared += check_row(found, row, wanted, errors=True)
        for scope, series in {"group": expected.groups, **expected.by}.items():
            rows = groups.filter((pl.col("run") == run) & (pl.col("scope") == scope)).to_dicts()
            by_label = {(row["correction"], row["point"], text(row["group"])): row for row in rows}
            for name, (index, label) in itertools.product(series.corrections, enumerate(series.labels)):
                correction, _, point = name.rpartition("-")
                row = by_label.pop((correction, int(point), text(label)))
                compared += check_row(found, row, at(series, name, index), errors=False)
            assert not by_label
    return compared


def text(label: Any) -> str | None:
    return None if label is None else str(label)


def at(groups: Groups, correction: str, index: int) -> dict[str, Value]:
    return {
        key: Value(value=series.value[index], status=series.status_at(index))
        for key, series in groups.corrections[correction].items()
    }


def check_row(found: Sweep, row: dict[str, Any], wanted: dict[str, Value], *, errors: bool) -> int:
    assert all(
        key.startswith(("loss", "gradient")) for key in set(wanted) - set(row)
    )  # names that only `analyze` computes
    for key, value in wanted.items():
        if key not in row:
            continue
        where = f"{row['correction']} {row['point']} {row['scope']} {row['group']} {key}: {row[key]} {value.value}"
        status = found.reason(row, key)
        assert status == value.status, f"{where}: {status!r}, {value.status!r}"
        if value.value is not None:
            assert same(key, row, value.value), where
            assert key not in COUNTS or row[key] == value.value, where
        if errors and key in METRICS_WITH_ERRORS and value.value is not None:
            se = row[f"{key}_se"]
            assert (se is None) == (value.se is None), where
            assert se is None or math.isclose(se, value.se or 0.0, rel_tol=1e-7, abs_tol=1e-10 / smallness(row)), (
                f"{where} {se} {value.se}"
            )
    costs = {metric.key for metric in COST_METRICS}
    assert all(row[key] is None for key in found.metrics if key not in wanted and key not in costs)
    if row["weight_mean"] is not None:
        bias, mean_square = (
            row["weight_mean"] - row["raw_weight_mean"],
            row["weight_std"] ** 2 + row["weight_mean"] ** 2,
        )
        assert math.isclose(row["weight_bias"], bias, rel_tol=1e-9, abs_tol=1e-12 * max(1.0, row["raw_weight_mean"]))
        assert math.isclose(row["weight_chi2"], mean_square - 1, rel_tol=1e-9, abs_tol=1e-11 / smallness(row) ** 2)
    return len(wanted)


def smallness(row: dict[str, Any]) -> float:
    """Return the mean weight if it is below 1, else 1."""
    return max(min(1.0, row["normalization_factor"] or 1.0, row["weight_mean"] or 1.0), 1e-9)


def same(key: str, row: dict[str, Any], value: float) -> bool:
    """Return True for equality to 1e-9 relative, or to the rounding error of a sum of w - 1."""
    scale = smallness(row)
    if not key.endswith("_std"):
        return math.isclose(row[key], value, rel_tol=1e-9, abs_tol=1e-13 / scale)
    square = max(1.0, (row[key.replace("_std", "_mean")] - 1) ** 2) / scale**2
    return math.isclose(row[key] ** 2, value**2, rel_tol=1e-9, abs_tol=2e-13 * square)


def paths_of(correction: Correction) -> list[str]:
    found = []
    weight = correction.weight
    if weight is not None:
        found += ["weight.truncate"] if weight.truncate is not None else []
        found += [f"weight.{name}.{i}" for name in ("clip", "zero") if getattr(weight, name) for i in (0, 1)]
        found += ["weight.normalize"]
    found += [f"gates.{number}.keep.{i}" for number in range(len(correction.gates)) for i in (0, 1)]
    return found


@st.composite
def a_study(draw: st.DrawFn, shape: Shape, name: str, *, binned: bool) -> Study:
    """Draw a correction whose bounds vary along up to three axes."""
    correction = draw(corrections(shape, name))
    if binned:  # independent gates
        alike = {
            "over": "sequence",
            "when": "always",
            "sees": "original",
            "effect": draw(st.sampled_from(["mask", "zero"])),
        }
        gates = tuple(gate.model_copy(update=alike) for gate in correction.gates)
        correction = correction.model_copy(update={"gates": gates})
    paths = paths_of(correction)
    if not paths:
        correction, paths = Correction(name=name, weight=Weight(truncate=2.0)), ["weight.truncate"]
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
    study = Study(correction, tuple(draw(an_axis(correction, path)) for path in chosen))
    try:
        assert study.grid
    except ConfigError:
        return draw(a_study(shape, name, binned=binned))
    return study


@st.composite
def an_axis(draw: st.DrawFn, correction: Correction, path: str) -> ThresholdAxis:
    values: Sequence[Any] = RATIO_BOUNDS
    if path == "weight.normalize":
        values = ("none", "token", "sequence")
    elif path.startswith("gates") and correction.gates[int(path.split(".")[1])].statistic != "ratio":
        values = BOUNDS
    return ThresholdAxis(path, tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))))


@MANY
@given(st.data(), st.booleans())
def test_random_studies_match_single_analyses(data: st.DataObject, binned: bool) -> None:
    few_studies(data, binned=binned)


def few_studies(data: st.DataObject, *, binned: bool) -> None:
    shape = data.draw(shapes())
    rows = make_rows(shape)
    studies = [data.draw(a_study(shape, name, binned=binned)) for name in ("a", "b")]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(write(rows, Files(Path(folder) / "run", shape.row_group, shape.float32, shape.mask_type)))]
        by = ["worker"] if data.draw(st.booleans()) else []
        check(sweep(paths, studies, by=by, threads=1), brute_force(paths, studies, by))


USED = {
    "token": ("token_tis", "weight.truncate", "0.5,0.999,1,1.0001,1.05,2,50"),
    "icepop": ("decoupled_token_icepop", "weight.zero.1", "1,1.02,1.5,5"),
    "sequence": ("seq_mis", "gates.0.keep.1", "0.5,1,1.5,2,1e3"),
    "geometric": ("geo_rs", "gates.0.keep", "1.0001,1.001,1.01,1.5"),
    "token rejection": ("slime-mis", "gates.0.keep.0", "0.2:0.99:7"),
    "many token rejections": ("slime-mis", "gates.0.keep.1", "0.7:4:12"),
    "many below": ("slime-mis", "gates.0.keep.0", "0.2:0.9999:12"),
    "several": ("miles-moe-2-veto", "weight.clip.1", "1.1:4:5"),
    "geometric as k1": ("decoupled_geo_rs_token_tis", "gates.0.keep.1", "1e-4:1e-1:5:log"),
    "k3": ("decoupled_k3_rs_seq_tis", "gates.0.keep.1", "1e-5:1e-1:6:log"),
    "level": ("token_tis", "weight.level", "token,sequence,geometric"),
}


@pytest.mark.parametrize("run", ["dense", "moe"])
def test_framework_thresholds_match_single_analyses(run: str, tmp_path: Path) -> None:
    studies = []
    for kind, (name, path, values) in USED.items():
        correction = find_preset(name).model_copy(update={"name": kind})
        more = (ThresholdAxis.parse("gates.1.keep.0", "1e-6,1e-4,0.03"),) if kind in ("several", "geometric") else ()
        studies.append(Study(correction, (ThresholdAxis.parse(path, values), *more)))
    paths = [str(SAMPLE / run)]
    assert check(sweep(paths, studies), brute_force(paths, studies)) > 30_000


LADDERS = {
    "above": ("slime-mis", "gates.0.keep.1", "0.7:4:12"),
    "below": ("slime-mis", "gates.0.keep.0", "0.2:0.9999:12"),
    "both": ("geo_rs", "gates.0.keep", "1.0001:1.1:12:log"),
    "sequences": ("seq_mis", "gates.0.keep.1", "0.5:50:12:log"),
    "truncations": ("token_tis", "weight.truncate", "2:0.9:12"),
    "clipped": ("miles-moe-2", "weight.clip.1", "1:1.1:12"),
    "zeroed": ("decoupled_token_icepop", "weight.zero.1", "1:1.5:12"),
}


@pytest.mark.parametrize("kernel", [NUMPY_KERNEL, COMPILED_KERNEL])
def test_ladders_match_single_analyses(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The dumps have no current log-probs and therefore no losses."""
    monkeypatch.setattr("mismatchctl.api.sweep.sweep.choose_kernel", lambda tokens: kernel)
    for path in (SAMPLE / "moe").glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns(["current_log_probs"]), tmp_path / path.name, row_group_size=40)
    studies = [
        Study(find_preset(name).model_copy(update={"name": kind}), (ThresholdAxis.parse(path, values),))
        for kind, (name, path, values) in LADDERS.items()
    ]
    assert check(sweep([str(tmp_path)], studies), brute_force([str(tmp_path)], studies)) > 5_000


@pytest.mark.parametrize("effect", ["mask", "zero"])
def test_loss_denominators_with_few_current_log_probs(effect: str, tmp_path: Path) -> None:
    """Masked sequences leave the denominators of all losses, zeroed ones stay. A step without tokens has no scale."""
    bounds, lengths = np.array([1.5, 3.0, 100.0]), np.array([3, 5, 2, 4, 6, 1])
    steps, log_products = np.array([0, 0, 1, 1, 2, 2]), np.log([1.0, 2.0, 1.2, 2.0, 4.0, 200.0])
    for name, own in {"with": slice(0, 2), "without": slice(2, 6)}.items():
        rollout = [[-9.0] * n for n in lengths[own]]
        train = [[-9.0 + log / n] * n for log, n in zip(log_products[own], lengths[own], strict=True)]
        columns = {"rollout_log_probs": rollout, "train_log_probs": train, "step": steps[own]}
        columns |= {"advantages": np.ones(len(rollout))} | ({"current_log_probs": train} if name == "with" else {})
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    gate = {"level": "sequence", "keep": [None, 1.0], "effect": effect}
    study = Study(parse_correction({"name": "a", "gates": [gate]}), (ThresholdAxis("gates.0.keep.1", tuple(bounds)),))
    found = sweep([str(tmp_path)], [study], threads=1).groups.collect()
    passes = log_products[:, None] <= np.log(bounds)
    for step in range(3):
        own = steps == step
        kept = lengths[own] @ passes[own]
        counted = kept if effect == "mask" else np.full(len(bounds), lengths[own].sum())
        scales = [k / n if n else None for k, n in zip(kept.tolist(), counted.tolist(), strict=True)]
        rows = found.filter((pl.col("scope") == "group") & (pl.col("group") == step)).sort("point")
        assert rows["kept_tokens"].to_list() == kept.tolist()
        assert rows["loss_scale"].to_list() == scales


def test_inactive_bounds_have_zero_bias(tmp_path: Path) -> None:
    """Sums of raw and bounded weights differ in their last digits, which is not a bias."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 2500, 60)
    rows = {
        "rollout_log_probs": [np.full(size, -20.0) for size in sizes],
        "train_log_probs": [rng.uniform(-20.0, -1.0, size) for size in sizes],
    }
    pq.write_table(pa.table(rows), tmp_path / "run.parquet")
    study = Study(
        Correction(name="far", weight=Weight(truncate=2.0)), (ThresholdAxis("weight.truncate", (1e9, 1e10, 1e11)),)
    )
    found = sweep([str(tmp_path)], [study], threads=1).overall
    assert found["raw_weight_mean"].to_list() > [1e6] * 3
    assert found["weight_bias"].to_list() == [0.0] * 3
