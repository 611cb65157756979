"""The side that is wrong, in real dumps with a reference column and a known culprit."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.diagnose import diagnose
from mismatchctl.diagnosis.diagnosis import diagnosis_schema
from mismatchctl.results.model import Sides
from tests.cli.command import run
from tests.paths import FIXTURES

DUMPS = FIXTURES / "reference_dumps"
NOISY = DUMPS / "moe_noise_both_bf16"
LABELS = json.loads((DUMPS / "labels.json").read_text())


def sides_of(path: Path) -> Sides:
    [found] = diagnose([str(path)]).sides.values()
    return found


def columns(path: Path) -> tuple[Any, Any, Any]:
    table = pq.read_table(path)
    names = ("rollout_log_probs", "train_log_probs", "reference_log_probs")
    rollout, train, reference = (np.asarray(table[name].combine_chunks().flatten(), np.float64) for name in names)
    return rollout, train, reference


@pytest.mark.parametrize("name", LABELS)
def test_the_faulty_side_is_found(name: str) -> None:
    label, found = LABELS[name], sides_of(DUMPS / name)
    assert (found.side, found.confidence) == (label["side"], "high")
    assert found.rollout_rms == pytest.approx(label["err_rollout_rms"], rel=1e-6)
    assert found.train_rms == pytest.approx(label["err_train_rms"], rel=1e-6)
    assert found.gap_rms == pytest.approx(label["gap_rms"], rel=1e-6)
    assert found.correlation == pytest.approx(label["correlation"], abs=1e-6)
    assert found.reference_over_rollout.value == pytest.approx(label["mean_exp_reference_minus_rollout"], abs=1e-6)
    if label["worker"] is not None:
        worst = max(found.groups["worker"], key=lambda group: group.rollout_rms)
        assert worst.label == str(label["worker"])


@pytest.mark.parametrize("name", ["moe_noise_both_bf16", "dense_rollout_int8"])
def test_errors_split_by_their_definition(name: str) -> None:
    """For each token, gap^2 = e_r^2 + e_t^2 - 2 cov. The shares of the sides sum to 1."""
    found = sides_of(DUMPS / name)
    rollout, train, reference = columns(DUMPS / name)
    ours, theirs = rollout - reference, train - reference
    part, whole = (ours**2 - ours * theirs).sum(), ((theirs - ours) ** 2).sum()
    assert found.rollout_share.value == pytest.approx(part / whole, rel=1e-9)
    assert found.rollout_share.interval is not None
    assert found.rollout_share.interval[0] <= part / whole <= found.rollout_share.interval[1]
    gap = theirs - ours
    k3 = np.expm1(gap) - gap
    assert found.rollout_share_k3.value == pytest.approx(
        (k3 * ours * (ours - theirs) / np.where(gap, gap**2, 1)).sum() / k3.sum(), rel=1e-4
    )


def test_swapped_sides_swap_their_errors(tmp_path: Path) -> None:
    table = pq.read_table(DUMPS / "dense_rollout_int8")
    names = {"rollout_log_probs": "train_log_probs", "train_log_probs": "rollout_log_probs"}
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), tmp_path / "d.parquet")
    before, after = sides_of(DUMPS / "dense_rollout_int8"), sides_of(tmp_path)
    assert (before.side, after.side) == ("rollout", "trainer")
    assert (before.rollout_rms, before.train_rms) == pytest.approx((after.train_rms, after.rollout_rms), rel=1e-12)
    assert before.rollout_share.value is not None
    assert after.rollout_share.value == pytest.approx(1 - before.rollout_share.value, abs=1e-9)


def test_findings_have_their_side_in_json() -> None:
    result = run("diagnose", DUMPS / "moe_trainer_temperature", "--json")
    data = json.loads(result.stdout)
    assert data["findings"][0]["cause"] == "temperature"
    assert [finding["side"] for finding in data["findings"]] == ["trainer"] * len(data["findings"])
    assert data["sides"]["moe_trainer_temperature"]["side"] == "trainer"


def test_equally_wrong_sides_are_reported() -> None:
    assert sides_of(DUMPS / "dense_identical_sides_both_wrong").summary.startswith("The two sides are identical, ")


def test_dumps_without_a_reference_have_no_sides(tmp_path: Path) -> None:
    table = pq.read_table(DUMPS / "dense_rollout_int8").drop_columns(["reference_log_probs"])
    pq.write_table(table, tmp_path / "d.parquet")
    found = diagnose([str(tmp_path)])
    assert found.sides == {}
    assert all(finding.side is None for findings in found.runs.values() for finding in findings)


def test_references_of_other_weights_are_reported(tmp_path: Path) -> None:
    table = pq.read_table(DUMPS / "dense_rollout_int8")
    place = table.schema.get_field_index("reference_version")
    older = pa.array([version - 1 for version in table["reference_version"].to_pylist()])
    pq.write_table(table.set_column(place, "reference_version", older), tmp_path / "d.parquet")
    assert any("other weights" in note for note in sides_of(tmp_path).notes)


@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_give_low_confidence(rows: int, tmp_path: Path) -> None:
    pq.write_table(pq.read_table(DUMPS / "moe_noise_both_bf16").slice(0, rows), tmp_path / "d.parquet")
    found = sides_of(tmp_path)
    assert found.confidence == "low"
    assert found.rollout_share.interval is None


def test_the_terminal_names_the_side_and_the_layer() -> None:
    report = FIXTURES / "framework_dumps" / "comparators" / "sglang" / "error_from_layer" / "report.jsonl"
    result = run("diagnose", DUMPS / "dense_rollout_int8", "--layers", report, code=0)
    assert "Wrong side  rollout, high confidence" in result.stdout
    assert "layer 3, mlp_output" in result.stdout
    assert "the last good layer is 2" in " ".join(result.stdout.split())


def test_broken_layer_reports_are_refused_before_reading_the_dump(tmp_path: Path) -> None:
    (tmp_path / "report.jsonl").write_text("nothing")
    result = run("diagnose", "no/such/dump", "--layers", tmp_path / "report.jsonl", code=4)
    assert "report.jsonl" in result.stderr


def test_errors_are_split_by_position_and_probability(tmp_path: Path) -> None:
    path = DUMPS / "moe_noise_both_bf16"
    found = sides_of(path)
    rollout, train, reference = columns(path)
    lengths = [len(row) for file in sorted(path.glob("*.parquet")) for row in pq.read_table(file)["token_ids"]]
    places = np.concatenate([np.arange(length) for length in lengths])
    for name, values, label, inside in (
        ("position", places, "16 to 64", (places >= 16) & (places < 64)),
        ("probability", reference, "below 0.01", np.exp(reference) < 0.01),
        ("probability", reference, "0.5 to 0.9", (np.exp(reference) >= 0.5) & (np.exp(reference) < 0.9)),
    ):
        assert sum(group.tokens for group in found.groups[name]) == len(values)
        band = next(group for group in found.groups[name] if group.label == label)
        assert band.tokens == inside.sum()
        for side, error in ((band.rollout_rms, rollout - reference), (band.train_rms, train - reference)):
            assert side == pytest.approx(np.sqrt(np.mean(error[inside] ** 2)), rel=1e-9)
    page = tmp_path / "page.html"
    done = run("diagnose", path, "--html", page, "-q")
    text, unlikely = page.read_text(), np.exp(reference) < 0.01
    rms = [np.sqrt(np.mean((side - reference)[unlikely] ** 2)) for side in (rollout, train)]
    assert done.exit_code == 0 and f"below 0.01: rollout {rms[0]:.2g}, trainer {rms[1]:.2g}" in text
    assert "sides-0-probability" in text and "The point further to the right is the side with the larger error." in text


def with_reference(path: Path, place: Path, values: Any) -> Path:
    table = pq.read_table(path)
    lists = table["reference_log_probs"].combine_chunks()
    found = pa.ListArray.from_arrays(lists.offsets, pa.array(values(lists.values.to_numpy().astype(np.float64))))
    where = table.schema.get_field_index("reference_log_probs")
    pq.write_table(table.set_column(where, "reference_log_probs", found), place / "d.parquet")
    return place


@pytest.mark.parametrize("labels", [["-10", "-2", "3", "20"], ["0.25", "0.5", "1.5", "2"], ["2", "10", "w2", "w10"]])
def test_groups_are_in_the_order_of_their_numbers(labels: list[str], tmp_path: Path) -> None:
    table = pq.read_table(NOISY)
    steps = pa.array([labels[-1 - row % 4] for row in range(len(table))])
    pq.write_table(table.set_column(table.schema.get_field_index("step"), "step", steps), tmp_path / "d.parquet")
    assert [group.label for group in sides_of(tmp_path).groups["step"]] == labels


def test_faulty_references_are_a_finding(tmp_path: Path) -> None:
    """The sides still agree, and the reference is shifted by one token."""
    shifted = with_reference(DUMPS / "moe_noise_both_bf16", tmp_path, lambda values: np.roll(values, 1))
    found = diagnose([str(shifted)])
    (sides,), (findings,) = found.sides.values(), found.runs.values()
    assert (sides.side, sides.confidence) == ("both", "medium")
    last = findings[-1]
    assert (last.cause, last.confidence, last.side) == ("faulty_reference", "medium", "none")
    assert "shifted against each other" in last.summary
    assert "closer to each other" in sides.notes[0]
    assert sides.rollout_share.status.startswith("not measurable")


@pytest.mark.parametrize("name", [name for name in LABELS if name.startswith("moe")])
def test_correct_references_are_not_a_finding(name: str) -> None:
    (findings,) = diagnose([str(DUMPS / name)]).runs.values()
    assert "faulty_reference" not in {finding.cause for finding in findings}


def sides_with(rollout: np.ndarray, folder: Path) -> Any:
    """Return the wrong side if the rollout column of a dump with noise on both sides is replaced."""
    table = pq.read_table(NOISY)
    lists, where = table["rollout_log_probs"].combine_chunks(), table.schema.get_field_index("rollout_log_probs")
    changed = pa.ListArray.from_arrays(lists.offsets, pa.array(np.minimum(rollout, 0.0)))
    pq.write_table(table.set_column(where, "rollout_log_probs", changed), folder / "d.parquet")
    return sides_of(folder)


def test_unequal_errors_of_both_sides_give_low_confidence(tmp_path: Path) -> None:
    """The error of one side is 1.7 times the other's, close to the factor of two."""
    rollout, _, reference = columns(NOISY)
    found = sides_with(reference + 1.7 * (rollout - reference), tmp_path)
    assert (found.side, found.confidence) == ("both", "medium")


def test_a_fault_below_common_noise_belongs_to_one_side(tmp_path: Path) -> None:
    """Both sides have the same error, and the rollout has a smaller additional error."""
    _, train, reference = columns(NOISY)
    found = sides_with(train + 0.3 * np.roll(train - reference, 1), tmp_path)
    assert (found.side, found.confidence) == ("both", "medium")
    assert "difference between the two sides comes from the rollout" in found.summary


def test_json_and_page_name_the_next_comparison() -> None:
    """If there is a layer report, it determines the next comparison."""
    paths = [str(DUMPS / name) for name in ("dense_rollout_int8", "dense_clean_fp32")]
    reported = json.loads(run("diagnose", *paths, "--json").stdout)
    jsonschema.validate(reported, diagnosis_schema(), cls=jsonschema.Draft202012Validator)
    assert list(reported["next"]) == ["dense_rollout_int8"]
    page = " ".join(run("diagnose", *paths, "-v", COLUMNS="400").stdout.split())
    for step in reported["next"]["dense_rollout_int8"]:
        assert f"{step['name']} {step['text']}" in page
    report = str(FIXTURES / "framework_dumps/comparators/sglang/clean/report.jsonl")
    reported = json.loads(run("diagnose", *paths, "--layers", report, "--json").stdout)
    jsonschema.validate(reported, diagnosis_schema(), cls=jsonschema.Draft202012Validator)
    assert "next" not in reported and reported["layers"] and reported["logit_noise"]


def test_placeholders_in_a_reference_are_reported(tmp_path: Path) -> None:
    """The ranges of the other columns do not describe the reference."""
    padded = with_reference(
        DUMPS / "moe_noise_both_bf16", tmp_path, lambda values: np.where(np.arange(len(values)) % 10, values, -9999.0)
    )
    (findings,) = diagnose([str(padded)]).runs.values()
    assert findings[-1].cause == "faulty_reference"
    assert "placeholder values counted as tokens" in findings[-1].summary
