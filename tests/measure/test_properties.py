"""Laws for any dump, such as independence of padding and order, and monotonicity."""

import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction
from mismatchctl.results.model import Result, result_schema
from mismatchctl.results.reader import read_result
from tests.factories.random_dumps import Files, Rows, Shape, corrections, make_rows, shapes, write

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("row_groups_apart")]
FEW = settings(
    derandomize=True,
    max_examples=4,
    phases=[Phase.explicit, Phase.generate],  # shrinking a seed is useless
    suppress_health_check=list(HealthCheck),
)
ORDER = 1e-12
"""Relative error of a sum in another order."""


@pytest.fixture(scope="module")
def anywhere() -> Iterator[Callable[[], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        counter = iter(range(10**6))
        yield lambda: Path(folder) / str(next(counter))


def correction(**fields: Any) -> Correction:
    return Correction.model_validate({"name": "c", **fields})


FULL = correction(
    weight={"level": "token", "clip": [0.5, 2.0], "normalize": "token", "normalize_over": "micro_batch"},
    gates=[
        {"statistic": "ratio", "level": "geometric", "keep": [0.9, 1.1]},
        {"statistic": "ratio", "level": "min", "keep": [1e-4, None]},
        {"statistic": "k3", "level": "token", "keep": [None, 0.5], "effect": "zero"},
    ],
)


def overall(result: Result, run: str = "a") -> dict[str, float | None]:
    found = result.runs[run].overall
    values = {key: value.value for key, value in found.metrics.items()}
    for name, metrics in found.corrections.items():
        values |= {f"{name} {key}": value.value for key, value in metrics.items()}
    return values


def agree(one: Result, other: Result, relative: float) -> None:
    """Compare runs with the same rows, except places of tokens and clusters without a name."""
    assert one.runs.keys() == other.runs.keys()
    for run in one.runs:
        left, right = (json.loads(r.runs[run].model_dump_json(exclude=ASIDE)) for r in (one, other))
        compare(left, right, run, relative)
        causes = ([(found.cause, found.confidence) for found in r.runs[run].findings] for r in (one, other))
        assert sorted(next(causes)) == sorted(next(causes))


ASIDE = {"worst_tokens", "worst_sequences", "clusters", "findings", "content"}


def compare(left: Any, right: Any, place: str, relative: float) -> None:
    """Check for equal structure and text, and numbers that agree to `relative` of themselves or of 1."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), place
        for key in left:
            compare(left[key], right[key], f"{place}.{key}", relative)
    elif isinstance(left, list):
        assert len(left) == len(right), place
        for index, pair in enumerate(zip(left, right, strict=True)):
            compare(*pair, f"{place}.{index}", relative)
    elif isinstance(left, float) and isinstance(right, float):
        assert math.isclose(left, right, rel_tol=relative, abs_tol=relative), f"{place}: {left} {right}"
    else:
        assert left == right or (isinstance(left, (int, float)) and left == pytest.approx(right, rel=relative)), place


# Log ratios on a grid have exact sums in any order. Other sums round, and sums that cancel round more.
@FEW
@given(shapes(flavours=("grid",), named=True), st.integers(0, 10**6))
def test_order_and_split_do_not_change_results(anywhere: Callable[[], Path], shape: Shape, seed: int) -> None:
    rows, rng = make_rows(shape), random.Random(seed)
    first, second = (Files(anywhere() / "a", size, shape.float32) for size in (shape.row_group, rng.randint(1, 5)))
    write(rows, first)
    shuffled = rng.sample(rows, len(rows))
    write(shuffled, second, [rng.randint(0, 3) for _ in range(3)])
    results = [analyze([str(files.folder)], [FULL], by=["worker"]) for files in (first, second)]
    agree(*results, ORDER)


@FEW
@given(shapes(flavours=("noise", "heavy"), named=True, current="all", float32=False))
def test_any_split_gives_equal_results(anywhere: Callable[[], Path], shape: Shape) -> None:
    rows = make_rows(shape)
    folders = [write(rows, Files(anywhere() / "a", size), split) for size, split in ((100, []), (1, [2, 3]), (2, [5]))]
    results = [overall(analyze([str(folder)], [FULL])) for folder in folders]
    for key, value in results[0].items():
        for other in results[1:]:
            if value is None:
                assert other[key] is None
            else:
                assert other[key] == pytest.approx(value, rel=ORDER, abs=ORDER), key


@settings(FEW, max_examples=3)
@given(shapes(current="all"), st.data())
def test_same_files_give_the_same_bytes(anywhere: Callable[[], Path], shape: Shape, data: st.DataObject) -> None:
    rows, other = make_rows(shape), make_rows(replace(shape, seed=shape.seed + 1))
    chosen, folder = data.draw(corrections(shape)), anywhere()
    for name, part in (("a", rows), ("b", other)):
        write(part, Files(folder / name, 2, shape.float32), [3])
    paths = [str(folder / "a"), str(folder / "b")]
    bytes_of = {analyze(paths, [chosen], threads=threads).to_json() for threads in (1, 2, 4)}
    bytes_of.add(analyze(paths[::-1], [chosen]).to_json())
    assert len(bytes_of) == 1
    files = sorted(str(path) for path in (folder / "a").iterdir())
    assert analyze(files, [chosen]).to_json() == analyze(files[::-1], [chosen]).to_json()


@FEW
@given(shapes(current="all"))
def test_padding_does_not_change_results(anywhere: Callable[[], Path], shape: Shape) -> None:
    rows, rng = make_rows(shape), random.Random(shape.seed)
    files, results = Files(anywhere() / "a", 3, shape.float32), []
    for width in (0, 5):
        padded = [pad(row, rng.randint(0, width), rng.randint(0, width)) for row in rows]
        results.append(analyze([str(write(padded, files))], [FULL]))
    left, right = (json.loads(result.to_json())["runs"] for result in results)
    found = (
        [(cause["cause"], cause["confidence"]) for cause in runs["a"].pop("findings", [])] for runs in (left, right)
    )
    assert next(found) == next(found)  # the positions of examples refer to the padded rows
    for runs in (left, right):
        del runs["a"]["content"]  # this field describes masked tokens
    assert left == right


def pad(row: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    length = len(row["mask"])
    lists = {key: value for key, value in row.items() if isinstance(value, list)}
    assert all(len(value) == length for value in lists.values())
    return row | {key: [0] * before + value + [0] * after for key, value in lists.items()}


@FEW
@given(shapes(flavours=("equal",), current="none"))
def test_equal_log_probs_give_no_mismatch(anywhere: Callable[[], Path], shape: Shape) -> None:
    folder = write(make_rows(shape), Files(anywhere() / "a", 3, shape.float32))
    found = overall(analyze([str(folder)], [FULL]))
    zero = ["k1", "k2", "k3", "abs_diff_mean", "abs_diff_p50", "abs_diff_p999", "abs_diff_max", "log_ppl_diff"]
    zero += ["log_ppl_abs_diff", "prob_diff_mean", "prob_diff_std", "chi2_token", "chi2_sequence", "c rejected_tokens"]
    one = ["bitwise_share", "bitwise_all", "ratio_mean", "ppl_ratio", "ess_token", "ess_sequence"]
    one += ["c ess_token", "c weight_mean", "c normalization_factor", "c loss_scale"]
    assert {key: found[key] for key in zero} == dict.fromkeys(zero, 0.0)
    assert {key: found[key] for key in one} == dict.fromkeys(one, 1.0)
    assert found["train_ppl"] == found["rollout_ppl"]


@FEW
@given(shapes())
def test_metrics_have_their_signs_and_ranges(anywhere: Callable[[], Path], shape: Shape) -> None:
    result = analyze([str(write(make_rows(shape), Files(anywhere() / "a", 3, shape.float32)))], [FULL])
    groups = result.runs["a"].groups.metrics
    shares = ("ess_token", "ess_sequence", "bitwise_share", "k3_worst_share")
    never_negative = ("k2", "k3", "abs_diff_mean", "prob_diff_mean", "prob_diff_std", "inflation", *shares)
    for key in never_negative:
        assert all(value is None or value >= 0 for value in groups[key].value), key
    for key in shares:
        assert all(value is None or value <= 1 + 1e-8 for value in groups[key].value), key
    quantiles = [overall(result)[f"abs_diff_{name}"] for name in ("p50", "p90", "p99", "p999", "max")]
    assert quantiles == sorted(quantiles, key=lambda value: value or 0.0)


BOUNDS = (0.25, 0.5, 1.0, 1.5, 2.0, 10.0)


@FEW
@given(shapes(current="none"), st.sampled_from(["token", "sequence", "geometric"]))
def test_larger_truncation_bounds_remove_less(anywhere: Callable[[], Path], shape: Shape, level: str) -> None:
    given = [correction(name=f"{b}", weight={"level": level, "truncate": b}) for b in BOUNDS]
    found = overall(analyze([str(write(make_rows(shape), Files(anywhere() / "a", 3)))], given))
    means = [found[f"{b} weight_mean"] for b in BOUNDS]
    assert means == sorted(means, key=lambda value: value or 0.0)
    bounded = [found[f"{b} weight_bounded_high"] for b in BOUNDS]
    assert bounded == sorted(bounded, key=lambda value: -(value or 0.0))


@FEW
@given(shapes(current="none"), st.sampled_from(["token", "mean", "max", "sum", "min"]))
def test_wider_gates_reject_less(anywhere: Callable[[], Path], shape: Shape, level: str) -> None:
    given = [correction(name=f"{b}", gates=[{"statistic": "k3", "level": level, "keep": [None, b]}]) for b in BOUNDS]
    found = overall(analyze([str(write(make_rows(shape), Files(anywhere() / "a", 3)))], given))
    for key in ("rejected_tokens", "rejected_sequences", "fully_rejected_sequences", "empty_prompts"):
        shares = [found[f"{b} {key}"] for b in BOUNDS]
        assert shares == sorted(shares, key=lambda value: -(value or 0.0)), key


@FEW
@given(shapes(current="all", advantages="token", reward="all"), st.data())
def test_runs_do_not_mix(anywhere: Callable[[], Path], shape: Shape, data: st.DataObject) -> None:
    """Sequence ids repeat between runs. Each run has the same result alone and with others."""
    folder, chosen = anywhere(), data.draw(corrections(shape))
    parts = {name: make_rows(replace(shape, seed=shape.seed + n)) for n, name in enumerate("ab")}
    for name, rows in parts.items():
        write(rows, Files(folder / name, 3, shape.float32), [4])
    both = analyze([str(folder / "a"), str(folder / "b")], [chosen], by=["worker"])
    for name in parts:
        alone = analyze([str(folder / name)], [chosen], by=["worker"])
        assert alone.runs[name] == both.runs[name]
    mixed: Rows = [row | {"run": name} for name, rows in parts.items() for row in rows]
    random.Random(shape.seed).shuffle(mixed)
    by_column = analyze([str(write(mixed, Files(folder / "mixed", 4, shape.float32), [7]))], [chosen], by=["worker"])
    assert by_column.runs.keys() == both.runs.keys()
    counted = ("tokens", "sequences", "empty_sequences", "prompts", "abs_diff_mean", "abs_diff_max", "k3")
    for name in parts:
        for key in counted:
            assert overall(by_column, name)[key] == pytest.approx(overall(both, name)[key], rel=ORDER)


@FEW
@given(shapes(), st.data())
def test_json_is_strict_and_is_read_back(anywhere: Callable[[], Path], shape: Shape, data: st.DataObject) -> None:
    folder = write(make_rows(shape), Files(anywhere() / "a", 3, shape.float32))
    result = analyze([str(folder)], [data.draw(corrections(shape))], by=["worker"])
    text = result.to_json()
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    jsonschema.validate(plain, result_schema(), cls=jsonschema.Draft202012Validator)
    path = anywhere()
    path.write_text(text)
    assert read_result(path) == result
    assert read_result(path).to_json() == text


def test_overflow_has_a_status(anywhere: Callable[[], Path]) -> None:
    row = {"mask": [1, 1], "rollout": [-800.0, -0.5], "train": [0.0, -0.5], "sequence_id": 0}
    metrics = analyze([str(write([row], Files(anywhere() / "a")))], [FULL]).runs["a"].overall.metrics
    assert metrics["k3"].value is None
    assert metrics["k3"].status == "overflow: not a finite number"
    assert metrics["k2"].value == pytest.approx(160000.0)
    assert metrics["ratio_mean"].value == pytest.approx((math.exp(20) + 1) / 2)


def test_long_and_wide_formats_agree(anywhere: Callable[[], Path]) -> None:
    rows = [row for row in make_rows(Shape(7, 12, 9, current="all", reward="all")) if any(row["mask"])]
    wide = write(rows, Files(anywhere() / "a", 4))
    long = anywhere() / "a"
    long.mkdir(parents=True)
    names = {"rollout": "rollout_log_probs", "train": "train_log_probs", "current": "current_log_probs"}
    tokens = [
        {
            **{column: row[name][place] for name, column in names.items()},
            **{name: row[name] for name in ("step", "sequence_id", "prompt_id", "micro_batch", "reward", "worker")},
            "advantages": row["advantages"][place],
            "position": place,
        }
        for row in rows
        for place, valid in enumerate(row["mask"])
        if valid
    ]
    pq.write_table(pa.Table.from_pylist(tokens), long / "part.parquet", row_group_size=11)
    results = [analyze([str(folder)], [FULL], by=["worker"]) for folder in (wide, long)]
    agree(*results, ORDER)


def test_folded_clusters_ignore_the_order(anywhere: Callable[[], Path]) -> None:
    """Above 1,024 clusters, a run folds all of them by hash."""
    rng = random.Random(3)
    rows: Rows = [
        {"mask": [1], "rollout": [-1.0], "train": [-1.0 + rng.gauss(0, 0.1)], "step": step, "sequence_id": i}
        for step, count in enumerate((700, 700, 5, 5))
        for i in range(count)
    ]
    found = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2]):
        ordered = sorted(rows, key=lambda row: order.index(row["step"]))
        folder = write(ordered, Files(anywhere() / "a", 400))
        found.append(analyze([str(folder)]).runs["a"].overall.metrics)
    for metrics in found:
        assert metrics["k2"].se == pytest.approx(found[0]["k2"].se, rel=ORDER)
        assert metrics["prompts"].status.startswith("more than") or metrics["prompts"].value == len(rows)
    # Folding changes the standard error only by chance, in 1,410 values.
    squares = [(row["train"][0] + 1.0) ** 2 / 2 for row in rows]
    centre = sum(squares) / len(rows)
    se = math.sqrt(sum((v - centre) ** 2 for v in squares)) / len(rows)
    assert found[0]["k2"].se == pytest.approx(se, rel=0.1)


def test_empty_gates_are_refused() -> None:
    with pytest.raises(ValueError, match="contains no value"):
        correction(gates=[{"statistic": "k2", "keep": [0.0, 0.0], "inclusive": [True, False]}])


def test_missing_values_differ_from_the_text_none(tmp_path: Path) -> None:
    table = pa.table(
        {
            "rollout_log_probs": [[-1.0], [-2.0], [-3.0]],
            "train_log_probs": [[-1.5], [-2.0], [-3.0]],
            "source": ["None", None, "other"],
        }
    )
    pq.write_table(table, tmp_path / "dump.parquet")
    by = analyze([str(tmp_path)], by=["source"]).runs[tmp_path.name].by["source"]
    assert by.metrics["tokens"].value == [1, 1, 1]
    assert set(by.labels) == {"None", "other", None}
