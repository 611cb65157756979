"""Generated framework files of any size, type and padding give back the generated values."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatchctl.data.conversion import convert_dump
from mismatchctl.errors import DataError
from tests.cli.command import run
from tests.factories.framework_dumps import WRITERS, Variant, rollouts, variant

CASES = [(name, seed) for name in WRITERS for seed in range(8)]


def check(rows: list[dict[str, Any]], v: Variant, ids: bool = True) -> None:
    assert len(rows) == len(v.truth)
    for row, t in zip(rows, v.truth, strict=True):
        given = [place for place, one in enumerate(row["response_mask"]) if one]
        assert [place - given[0] for place in given] == [place - t.valid[0] for place in t.valid]
        assert [row["rollout_log_probs"][place] for place in given] == [t.rollout[place] for place in t.valid]
        assert [row["train_log_probs"][place] for place in given] == [t.train[place] for place in t.valid]
        if ids:
            assert [row["token_ids"][place] for place in given] == [t.tokens[place] for place in t.valid]


@pytest.mark.parametrize(("framework", "seed"), CASES)
def test_generated_files_match_the_truth(framework: str, seed: int, tmp_path: Path) -> None:
    v = variant(seed)
    source, out = tmp_path / "nested/source", tmp_path / "out.parquet"
    source.mkdir(parents=True)
    WRITERS[framework](v, source)
    convert_dump(source, out, framework.partition(" ")[0] if seed % 2 else "")
    rows = pq.read_table(out).to_pylist()
    check(rows, v, ids=framework != "miles-policy-loss")
    assert len({row["sequence_id"] for row in rows}) == len(rows)
    assert {row.get("step") for row in rows} == {None if framework == "miles-policy-loss" else v.step}


WITHOUT_PROMPTS = ("skyrl", "miles-policy-loss")


@pytest.mark.parametrize(("framework", "seed"), [case for case in CASES if case[0] not in WITHOUT_PROMPTS])
def test_prompts_are_imported(framework: str, seed: int, tmp_path: Path) -> None:
    v = variant(seed)
    v.truth[-1].prompt = list(v.truth[0].prompt)  # two responses to one prompt
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    source.mkdir()
    WRITERS[framework](v, source)
    convert_dump(source, out)
    rows = pq.read_table(out).to_pylist()
    sampled = [(row, t) for row, t in zip(rows, v.truth, strict=True) if t.valid or framework in ("trl", "slime")]
    assert all(row["prompt_token_ids"] == t.prompt for row, t in sampled if t.valid)
    ids = {tuple(t.prompt): row["prompt_id"] for row, t in sampled if t.valid}
    assert len(set(ids.values())) == len(ids)
    assert all(row["prompt_id"] == ids[tuple(t.prompt)] for row, t in sampled if t.valid)


@pytest.mark.parametrize("framework", WRITERS)
def test_files_and_folders_are_read_equally(framework: str, tmp_path: Path) -> None:
    v = variant(2)
    source = tmp_path / "source"
    source.mkdir()
    WRITERS[framework](v, source)
    (path, *_) = sorted(one for one in source.rglob("*.*") if one.is_file())
    convert_dump(path, tmp_path / "out.parquet")
    check(pq.read_table(tmp_path / "out.parquet").to_pylist(), v, ids=framework != "miles-policy-loss")


@pytest.mark.parametrize("framework", WRITERS)
def test_steps_are_read_in_natural_order(framework: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    variants = [variant(seed) for seed in (0, 8)]  # all columns have the same precision
    for number, v in enumerate(variants):
        folder = source / str(number)
        folder.mkdir(parents=True)
        v.optional = v.lists = False
        WRITERS[framework](v, folder)
    convert_dump(source, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    cut = len(variants[0].truth)
    for part, v in zip((rows[:cut], rows[cut:]), variants, strict=True):
        check(part, v, ids=framework != "miles-policy-loss")


@pytest.mark.slow
@pytest.mark.parametrize("framework", WRITERS)
def test_generated_sources_and_conversions_agree(framework: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    source.mkdir()
    WRITERS[framework](variant(6), source)
    convert_dump(source, out)
    results = []
    for place in (source, out):
        done = run("analyze", place, "--json", code=0)
        (one,) = json.loads(done.stdout)["runs"].values()
        results.append(one["overall"]["metrics"])
    assert results[0] == results[1] and results[0]


@pytest.mark.parametrize("kind", ["open-instruct", "slime-rollout", "miles-dashboard"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_step", [True, False])
def test_rollouts_are_joined_by_name(kind: str, seed: int, with_step: bool, tmp_path: Path) -> None:
    v = variant(seed)
    source = tmp_path / "source"
    source.mkdir()
    if kind == "open-instruct":  # which has no mask
        for t in v.truth:
            t.mask = [1] * len(t.mask)
    train = [{"sequence_id": number, "train_log_probs": t.train} for number, t in enumerate(v.truth)]
    train = [row | ({"step": v.step} if with_step else {}) for row in train[::-1]]
    pq.write_table(pa.Table.from_pylist(train), tmp_path / "train.parquet")
    convert_dump(rollouts(v, source, kind), tmp_path / "out.parquet", join=tmp_path / "train.parquet")
    check(pq.read_table(tmp_path / "out.parquet").to_pylist(), v)


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "text": (["a", "b", "c"], "contains a value that is not a number"),
    "numbers as text": (["-1.0", "-2.0", "-3.0"], "contains a value that is not a number: found text"),
    "one number as text": ([1, "1", 1], "contains a value that is not a number: found text"),
    "nested": ([[-1.0], [-2.0], [-3.0]], "contains a value that is not a number"),
    "ragged": ([[-1.0], [-2.0, 1.0], []], "contains a value that is not a number"),
    "one number": (-1.0, "expected a list with one number per token"),
    "short": ([-1.0, -2.0], "lists differ in length"),
    "long": ([-1.0, -2.0, -3.0, -4.0], "lists differ in length"),
    "nothing": (None, "the file does not contain this column"),
    "an object": ({"data": 1}, "contains a value that is not a number"),
}


@pytest.mark.parametrize("column", ["rollout_log_probs", "log_probs", "loss_masks"])
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_bad_values_are_named(column: str, bad: str, tmp_path: Path) -> None:
    value, says = BAD_VALUES[bad]
    good = {"rollout_log_probs": [-1.0, -2.0, -3.0], "log_probs": [-1.0, -2.0, -3.0], "loss_masks": [1, 1, 1]}
    good |= {"tokens": [1, 2, 3, 4], "response_lengths": 3}
    content = {"format_version": 2, "rollout_id": 0, "samples": [good, good | {column: value}]}
    path = tmp_path / "0.pt"
    torch.save(content, path)
    run("convert", path, tmp_path / "out.parquet", code=4, COLUMNS="400")
    with pytest.raises(DataError, match=says) as error:
        convert_dump(path, tmp_path / "out.parquet")
    assert (error.value.file, error.value.row) == (str(path), 1)
    assert error.value.column in good
    assert [one.name for one in tmp_path.iterdir()] == ["0.pt"]


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("loss_masks", [1, float("nan"), 1], "the mask contains NaN or null"),
        ("loss_masks", [1, None, 1], "the mask contains NaN or null"),
        ("loss_masks", [1, 0.5, 1], "a mask must contain only 0 and 1, found 0.5"),
        ("loss_masks", torch.tensor([1, 2, 1]), "a mask must contain only 0 and 1, found 2"),
        ("loss_masks", [1, -1, 1], "a mask must contain only 0 and 1, found -1"),
        ("log_probs", torch.tensor([-1, -2, -3]), r"contains int64 values instead of floats"),
        (
            "rollout_log_probs",
            torch.tensor([-1.0, -2.0, -3.0]).bfloat16().view(torch.uint16),
            r"contains uint16 values",
        ),
        ("tokens", [1, 2, "3", 4], "contains a value that is not a number: found text"),
        ("tokens", [1, 2, 10**30, 4], "contains a value that is not a number"),
        ("rewards", "good", "contains a value that is not a number"),
        ("response_lengths", "x", "does not have the layout of slime's files"),
    ],
)
def test_bad_masks_and_numbers_are_named(column: str, value: Any, says: str, tmp_path: Path) -> None:
    good = {"rollout_log_probs": [-1.0, -2.0, -3.0], "log_probs": [-1.0, -2.0, -3.0], "loss_masks": [1, 1, 1]}
    good |= {"tokens": [1, 2, 3, 4], "response_lengths": 3}
    torch.save({"format_version": 2, "rollout_id": 0, "samples": [good | {column: value}]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match=says):
        convert_dump(tmp_path / "0.pt", tmp_path / "out.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5, 1e300])
@pytest.mark.parametrize(("column", "means"), [("rollout_log_probs", "rollout_log_probs"), ("log_probs", "train")])
def test_invalid_log_probs_are_converted_but_refused_by_commands(
    value: float, column: str, means: str, tmp_path: Path
) -> None:
    """Conversion keeps all rows. Commands name the first bad row of source and conversion."""
    good = {"rollout_log_probs": [-1.0, -2.0, -3.0], "log_probs": [-1.0, -2.0, -3.0], "loss_masks": [1, 1, 1]}
    good |= {"tokens": [1, 2, 3, 4], "response_lengths": 3}
    samples = [good, good | {column: torch.tensor([-1.0, value, -3.0], dtype=torch.float64)}]
    path, out = tmp_path / "0.pt", tmp_path / "out.parquet"
    torch.save({"format_version": 2, "rollout_id": 0, "samples": samples}, path)
    convert_dump(path, out)
    for place in (path, out):
        if (means, value) == ("train", float("-inf")):  # the trainer's probability is 0, which is possible
            reported = json.loads(run("analyze", place, "--json", code=0).stdout)["provenance"]["left_out"]
            assert [(item["count"], item["example"].endswith("of -inf")) for item in reported] == [(1, True)]
            assert "1 token with train probability 0" in run("analyze", place, code=0).stdout
            continue
        done = run("analyze", place, code=4, COLUMNS="1000")
        assert done.stderr.startswith(f"error: {place}, row 1, column {means}")
        remedy = "leave these tokens out with --on-bad mask" if math.isnan(value) else "leave such rows out with"
        assert remedy in done.stderr
    run("analyze", path, "--on-bad", "skip", code=0)
