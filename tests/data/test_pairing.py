"""Two files, the responses of an engine and the file of a trainer, are matched by an id."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import mismatchctl as mm
from mismatchctl.data.conversion import pair
from mismatchctl.data.importers.tables import is_response, read_responses
from mismatchctl.errors import ConfigError, DataError
from tests.cli.command import run
from tests.factories.format_files import ENGINES, FORMATS, make_rows, write_truth

TRAINER = ("train_log_probs", "prompt_id", "step")
COMPARED = ("sequence_id", "rollout_log_probs", "train_log_probs", "prompt_id", "step")


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_trainer(path: Path, rows: list[dict[str, Any]]) -> Path:
    return write_lines(path, [{"id": row["sequence_id"]} | {name: row[name] for name in TRAINER} for row in rows])


@pytest.mark.parametrize("engine", ENGINES)
def test_responses_and_trainer_file_give_the_dump(engine: str, tmp_path: Path) -> None:
    rows = make_rows()
    responses = write_lines(tmp_path / "responses.jsonl", [ENGINES[engine](row) for row in rows])
    trainer = write_trainer(tmp_path / "trainer.jsonl", rows[::-1])
    found, truth = pair(responses, trainer, ["id"]), pq.read_table(write_truth(tmp_path / "truth.parquet", rows))
    assert found.notes == ()
    for name in COMPARED:
        assert found.table[name].to_pylist() == truth[name].to_pylist()
    if engine not in ("vllm_scored", "sglang_scored"):
        assert found.table["token_ids"].to_pylist() == truth["token_ids"].to_pylist()


@pytest.mark.parametrize("name", ["padded.npz", "padded.pt", "padded.safetensors", "long.csv", "dump.feather"])
def test_trainer_files_can_have_any_format(name: str, tmp_path: Path) -> None:
    rows = make_rows()
    ids = {"sequence_id": np.array([row["sequence_id"] for row in rows])}
    place = tmp_path / name
    FORMATS[name](place, rows)
    if name == "padded.npz":
        np.savez(place, **dict(np.load(place)), **ids)
    elif name.startswith("padded"):
        return  # tensors cannot contain sequence names
    responses = write_lines(tmp_path / "responses.jsonl", [ENGINES["openai_chat"](row) for row in rows])
    found = pair(responses, place)
    assert found.table["train_log_probs"].to_pylist() == [row["train_log_probs"] for row in rows]
    assert found.table["rollout_log_probs"].to_pylist() == [row["rollout_log_probs"] for row in rows]


def test_unmatched_ids_are_counted_and_named(tmp_path: Path) -> None:
    rows = make_rows()
    responses = write_lines(tmp_path / "a.jsonl", [ENGINES["vllm"](row) for row in rows[:9]])
    trainer = write_trainer(tmp_path / "b.jsonl", rows[2:])
    found = pair(responses, trainer, ["id"])
    assert len(found.table) == 7
    assert found.notes == (
        "2 of 9 rows of a.jsonl are not in b.jsonl and are left out: s0, s1",
        "3 of 10 rows of b.jsonl are not in a.jsonl and are left out: s9, s10, s11",
    )
    out = tmp_path / "out.parquet"
    done = run("convert", "--rollout", responses, "--train", trainer, "--on", "id", out, code=0)
    assert "wrote" in done.stderr
    assert found.notes[0] in done.stderr
    assert len(pq.read_table(out)) == 7
    shown = run("analyze", "--rollout", responses, "--train", trainer, "--json", code=0)
    assert found.notes[1] in shown.stderr
    (name,) = json.loads(shown.stdout)["runs"]
    assert name == "a"
    same = run("analyze", out, "--json", code=0)
    both = (json.loads(text)["runs"].popitem()[1]["overall"]["metrics"]["k3"] for text in (shown.stdout, same.stdout))
    assert next(both) == next(both)


def test_choices_are_separate_sequences(tmp_path: Path) -> None:
    rows = make_rows(sequences=6)
    one = ENGINES["openai_completions"](rows[0])
    other = ENGINES["openai_completions"](rows[1])["choices"][0] | {"index": 1}
    found = read_responses([one | {"choices": [*one["choices"], other]}], Path("a.json"))
    assert [row["id"] for row in found] == ["s0:0", "s0:1"]
    assert [row["rollout_log_probs"] for row in found] == [row["rollout_log_probs"] for row in rows[:2]]


def test_null_log_probs_are_nan() -> None:
    record = ENGINES["vllm"](make_rows()[0])
    record["outputs"][0]["logprobs"][1] = None
    (row,) = read_responses([record], Path("a.json"))
    assert math.isnan(row["rollout_log_probs"][1])


def test_versions_and_finish_reasons_are_read() -> None:
    (row,) = read_responses([ENGINES["sglang"](make_rows()[0])], Path("a.json"))
    assert (row["rollout_version"], row["finish_reason"]) == (7, "stop")


def test_different_tokens_are_counted(tmp_path: Path) -> None:
    rows = make_rows()
    responses = write_lines(tmp_path / "a.jsonl", [ENGINES["vllm"](row) for row in rows])
    for row in rows[:2]:
        row["token_ids"] = [token + 1 for token in row["token_ids"]]
    trainer = write_lines(tmp_path / "b.jsonl", rows)
    assert pair(responses, trainer).notes == ("token ids differ between the files in 2 of 12 sequences: s0, s1",)


def test_different_lengths_are_reported_by_the_reader(tmp_path: Path) -> None:
    rows = make_rows()
    responses = write_lines(tmp_path / "a.jsonl", [ENGINES["vllm"](row) for row in rows])
    rows[3]["train_log_probs"].append(-1.0)
    found = pair(responses, write_trainer(tmp_path / "b.jsonl", rows))
    assert [len(values) for values in found.table["train_log_probs"].to_pylist()] == [
        len(row["train_log_probs"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"on": ["nope"]}, ConfigError, "missing column nope"),
        ({"trainer": [{"id": "s0", "train_log_probs": [-1.0]}] * 2}, DataError, "rows 0 and 1 have the same"),
        (
            {"trainer": [{"id": "x", "train_log_probs": [-1.0]}]},
            DataError,
            "the two files have no common id",
        ),
        ({"trainer": [{"id": "s0", "reward": 1.0}]}, DataError, "missing column train_log_probs"),
        ({"trainer": [{"id": None, "train_log_probs": [-1.0]}]}, DataError, "this row has no value for id"),
        ({"trainer": [{"name": "s0", "train_log_probs": [-1.0]}]}, ConfigError, "missing column id"),
        ({"rollout": [{"id": "s0", "choices": [{"index": 0, "text": "a"}]}]}, DataError, "contains no log-probs"),
        ({"rollout": [{"id": "s0", "choices": [7]}]}, DataError, "missing column rollout_log_probs"),
    ],
)
def test_unmatchable_files_give_one_sentence(
    change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path
) -> None:
    rows = make_rows()
    rollout = change.get("rollout", [ENGINES["openai_chat"](row) for row in rows])
    trainer = change.get(
        "trainer", [{"id": row["sequence_id"], "train_log_probs": row["train_log_probs"]} for row in rows]
    )
    files = write_lines(tmp_path / "a.jsonl", rollout), write_lines(tmp_path / "b.jsonl", trainer)
    with pytest.raises(error) as caught:
        pair(*files, change.get("on", []))
    assert words in str(caught.value)


def test_rollout_and_train_options_need_each_other(tmp_path: Path) -> None:
    assert "one file per side" in run("analyze", "--rollout", "a.jsonl", code=2).stderr
    assert "--on only works with" in run("analyze", "a.parquet", "--on", "id", code=2).stderr
    assert "missing argument" in run("analyze", code=2).stderr
    both = run("analyze", "x.parquet", "--rollout", tmp_path, "--train", tmp_path, code=2)
    assert "pass DUMPS, or" in both.stderr


def test_one_side_names_the_missing_side(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [ENGINES["sglang"](row) for row in make_rows()])
    failed = run("analyze", path, code=4)
    assert "this file contains responses of an engine, which only have the rollout's log-probs" in failed.stderr
    assert "--rollout a.jsonl --train TRAINER_FILE --on id" in failed.stderr


def test_other_json_is_not_a_response() -> None:
    assert not any(
        map(is_response, ({}, {"choices": 1}, {"choices": ["a"]}, {"outputs": [1]}, {"response": {"body": 1}}))
    )


def measured(verb: str, *words: object) -> Any:
    text = run(verb, *words, *VERBS[verb], code=0).stdout
    for path in [f"{words[1]} with {words[3]}"] if len(words) > 1 else words:
        text = text.replace(str(path), "PATH")
    done = json.loads(text)
    parts = ("runs", "checks", "outcome", "findings", "table", "advice", "front")
    return {name: value for name, value in done.items() if name in parts}


VERBS: dict[str, list[str]] = {
    "analyze": ["--json"],
    "diagnose": ["--json"],
    "sweep": ["-c", "token_tis", "--vary", "weight.truncate=1.5:3:3", "--json"],
    "gate": ["--rule", "k3:max=0.5", "--json"],
    "advise": ["--json"],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_command_reads_two_files(engine: str, verb: str, tmp_path: Path) -> None:
    rows = make_rows(sequences=36)
    responses = write_lines(tmp_path / "truth.jsonl", [ENGINES[engine](row) for row in rows])
    trainer = write_trainer(tmp_path / "trainer.jsonl", rows)
    pair_words = ("--rollout", responses, "--train", trainer, "--on", "id")
    run("convert", tmp_path / "truth.parquet", *pair_words, code=0)
    found, truth = measured(verb, *pair_words), measured(verb, tmp_path / "truth.parquet")
    assert found and found == truth


def test_the_next_command_names_both_files(tmp_path: Path) -> None:
    rows = make_rows(sequences=36)
    responses = write_lines(tmp_path / "a.jsonl", [ENGINES["sglang"](row) for row in rows])
    words = ["--rollout", str(responses), "--train", str(write_trainer(tmp_path / "b.jsonl", rows)), "--on", "id"]
    for verb in ("analyze", "diagnose", "gate"):
        shown = " ".join(run(verb, *words, code=0 if verb != "gate" else None).stdout.split())
        assert " ".join(words) in shown


def test_pairs_of_files_are_sources_in_python(tmp_path: Path) -> None:
    rows = make_rows(sequences=36)
    responses = write_lines(tmp_path / "a.jsonl", [ENGINES["sglang"](row) for row in rows])
    trainer = write_trainer(tmp_path / "b.jsonl", rows[1:])
    table = mm.pair(responses, trainer, on="id")
    truth = mm.analyze(str(write_truth(tmp_path / "truth.parquet", rows[1:])))
    assert mm.analyze(table).k3.value == truth.k3.value
    assert mm.diagnose(table).to_data() and mm.sweep(table).to_polars().height
    assert mm.gate(table, rules=["k3:max=0.5"]).outcome == "passed"
    assert b"1 of 36 rows of a.jsonl are not in b.jsonl" in table.schema.metadata[b"notes"]


@pytest.mark.parametrize("engine", ["openai_completions", "vllm"])
def test_sizes_of_sampling_masks_are_read(engine: str, tmp_path: Path) -> None:
    rows = make_rows()
    records = [ENGINES[engine](row) for row in rows]
    sizes = [[1 + place % 3 for place in range(len(row["token_ids"]))] for row in rows]
    for record, own in zip(records, sizes, strict=True):
        mask = [list(range(size)) for size in own]
        choice = record["choices" if engine == "openai_completions" else "outputs"][0]
        choice["sampling_mask"] = mask if engine == "openai_completions" else {"token_ids": mask}
    responses = write_lines(tmp_path / "a.jsonl", records)
    table = mm.pair(responses, write_trainer(tmp_path / "b.jsonl", rows))
    assert table["kept_tokens"].to_pylist() == sizes
    assert mm.analyze(table).k3.value is not None
