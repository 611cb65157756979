"""Framework files give the true log-probs, masks and ids of every token."""

import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatchctl.data.conversion import convert_dump
from mismatchctl.data.importers import sources
from mismatchctl.data.importers.rows import all_layouts
from mismatchctl.data.reader import check_files, open_dump
from mismatchctl.errors import ConfigError, DataError
from tests.cli.command import run
from tests.data.converted_rows import converted
from tests.paths import FIXTURES

DUMPS = FIXTURES / "framework_dumps"
PEERS, SLIME = DUMPS / "peers", DUMPS / "slime_miles"
OF_PEERS = {
    "nemo-rl": "nemo_rl/logs",
    "prime-rl": "prime_rl/token_exports",
    "trl": "trl",
    "openrlhf": "openrlhf",
    "roll": "roll",
    "areal": "areal",
    "skyrl": "skyrl",
    "tinker": "tinker",
}
OF_SLIME = [
    "slime_seed/train_data",
    "slime_seed/train_data_cuda",
    "slime_head/train_data",
    "miles_head/train_data",
    "miles_head/train_data_cuda",
]


def valid(row: dict[str, Any], name: str) -> list[Any]:
    mask = np.array(row["response_mask"], bool)
    kept: list[Any] = np.array(row[name])[mask].tolist()
    return kept


@pytest.mark.parametrize("framework", OF_PEERS)
def test_imported_tokens_match_the_truth(framework: str, tmp_path: Path) -> None:
    """The samples contain float32 values, or text that parses to equal float32 values."""
    rows = converted(PEERS / OF_PEERS[framework], tmp_path)
    truth = pq.read_table(PEERS / "canonical_input.parquet").to_pylist()
    tokens = json.loads((PEERS / "canonical_tokens.json").read_text())
    assert len(rows) == len(truth)
    for true, both in zip(truth, tokens, strict=True):
        true["token_ids"] = both["response_tokens"]
        ids = valid(true, "token_ids")
        row = next(row for row in rows if valid(row, "token_ids") == ids)
        assert valid(row, "rollout_log_probs") == valid(true, "rollout_log_probs")
        assert valid(row, "train_log_probs") == valid(true, "train_log_probs")
        assert row.get("step") == (None if framework == "areal" else true["step"])
        # Holes of the mask stay where they are.
        inside = np.flatnonzero(true["response_mask"])
        shape = np.array(true["response_mask"], bool)[inside[0] : inside[-1] + 1].tolist()
        given = np.flatnonzero(row["response_mask"])
        assert row["response_mask"][given[0] : given[-1] + 1] == shape


@pytest.mark.parametrize("source", OF_SLIME)
def test_imported_tokens_of_slime_match_the_truth(source: str, tmp_path: Path) -> None:
    """The truth is the rollout dump, and the train log-probs as torch reads them."""
    rows = converted(SLIME / source, tmp_path)
    rollout = torch.load(SLIME / source.split("/")[0] / "rollout_data/0.pt", weights_only=True)["samples"]
    truth = {str(sample["index"]): sample for sample in rollout}
    train = {}
    for path in (SLIME / source).iterdir():
        content = torch.load(path, weights_only=True, map_location="cpu")
        if "samples" in content:
            train |= {str(one["sample_index"]): one["log_probs"].tolist() for one in content["samples"]}
        else:
            data = content["rollout_data"]
            names = map(str, data["sample_indices"])
            train |= dict(zip(names, (one.tolist() for one in data["log_probs"]), strict=True))
    assert [row["sequence_id"] for row in rows] and len(rows) == len(train)
    for row in rows:
        true = truth[row["sequence_id"]]
        length = true["response_length"]
        mask = [0] * length if true["remove_sample"] else true["loss_mask"] or [1] * length
        assert row["response_mask"] == [bool(one) for one in mask]
        assert row["token_ids"] == true["tokens"][-length:]
        assert row["rollout_log_probs"] == np.array(true["rollout_log_probs"], np.float32).tolist()
        assert row["train_log_probs"] == train[row["sequence_id"]]


def test_missing_recomputation_is_refused(tmp_path: Path) -> None:
    line = {"input_lengths": [3], "token_loss_mask": [[0, 1, 1]], "sample_loss_mask": [1.0], "rewards": [1.0]}
    line |= {"generation_logprobs": [[0.0, -1.0, -2.0]], "prev_logprobs": [[0.0, 0.0, 0.0]]}
    source = tmp_path / "train_data_step3.jsonl"
    source.write_text(json.dumps(line))
    with pytest.raises(DataError, match="row 0, column prev_logprobs: all values are zero"):
        convert_dump(source, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == [source]


def test_lines_with_two_samples_are_refused(tmp_path: Path) -> None:
    line = {"input_lengths": [2, 2], "token_loss_mask": [[0, 1]] * 2, "sample_loss_mask": [1.0, 1.0]}
    line |= {"generation_logprobs": [[0.0, -1.0]] * 2, "prev_logprobs": [[0.0, -1.5]] * 2}
    (tmp_path / "train_data_step3.jsonl").write_text(json.dumps(line))
    with pytest.raises(
        DataError,
        match="row 0, column token_loss_mask: contains 2 samples in one line, but each line must contain one sample",
    ):
        convert_dump(tmp_path / "train_data_step3.jsonl", tmp_path / "out.parquet")


def test_empty_responses_are_not_missing_recomputations(tmp_path: Path) -> None:
    line = {"input_lengths": [1], "token_loss_mask": [[0, 0]], "sample_loss_mask": [1.0], "rewards": [1.0]}
    line |= {"generation_logprobs": [[0.0, 0.0]], "prev_logprobs": [[0.0, 0.0]]}
    (tmp_path / "train_data_step3.jsonl").write_text(json.dumps(line))
    rows = converted(tmp_path / "train_data_step3.jsonl", tmp_path)
    assert [(row["response_mask"], row["reward"]) for row in rows] == [([], 1.0)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "train_data"
    folder.mkdir()
    return folder


def test_tensor_parallel_duplicates_are_read_once(source: Path, tmp_path: Path) -> None:
    content = (SLIME / "miles_head/train_data/0_0.pt").read_bytes()
    for rank in range(2):
        (source / f"0_{rank}.pt").write_bytes(content)
    done = convert_dump(source, tmp_path / "out.parquet")
    assert (done.rows, done.copies) == (4, 4)


def test_samples_with_equal_names_and_other_values_are_both_read(source: Path, tmp_path: Path) -> None:
    content = torch.load(SLIME / "miles_head/train_data/0_0.pt", weights_only=True)
    torch.save(content, source / "0_0.pt")
    content["rollout_data"]["log_probs"][0] -= 0.5
    torch.save(content, source / "0_1.pt")
    done = convert_dump(source, tmp_path / "out.parquet")
    assert (done.rows, done.copies) == (5, 3)


def test_pipeline_stages_without_log_probs_are_skipped(source: Path, tmp_path: Path) -> None:
    content = torch.load(SLIME / "miles_head/train_data/0_0.pt", weights_only=True)
    torch.save(content, source / "0_1.pt")
    del content["rollout_data"]["log_probs"]
    torch.save(content, source / "0_0.pt")
    assert len(converted(source, tmp_path)) == 4
    (source / "0_1.pt").unlink()
    with pytest.raises(DataError, match="no rank saved log_probs"):
        convert_dump(source, tmp_path / "out2.parquet")


def plain(value: Any) -> Any:
    return {name: plain(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def test_skyrl_tokens_without_log_prob_are_masked(tmp_path: Path) -> None:
    from mismatchctl.data.importers.pickles import load_pickle
    from mismatchctl.frameworks.skyrl import PICKLE_CLASSES

    state = plain(load_pickle(next((PEERS / "skyrl").rglob("*.pkl")), PICKLE_CLASSES))
    tensor = state["batch_dict"]["rollout_logprobs"]
    values = np.frombuffer(tensor["data"], tensor["dtype"]).reshape(tensor["shape"]).copy()
    values[0, -1] = values[1, -3] = -9999.0
    tensor["data"] = values.tobytes()
    source = tmp_path / "global_step_4_training_input.pkl"
    source.write_bytes(pickle.dumps(state))
    done = convert_dump(source, tmp_path / "out.parquet")
    assert (done.rows, done.tokens, done.missing) == (6, 52, 2)
    row = pq.read_table(tmp_path / "out.parquet").to_pylist()[0]
    assert row["step"] == 4
    assert row["response_mask"] == [True, True, True, False]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_mask": lambda one: one.flip(1)}, "not padded on the right"),
        ({"attention_mask": lambda one: one * 0}, "the mask is 1 on padding"),
        ({"response_mask": lambda one: one * 0 + 1, "attention_mask": lambda one: one * 0 + 1}, "first token"),
        ({"infer_logprobs": lambda one: one[:, :-1]}, "lists differ in length"),
    ],
)
def test_rows_that_contradict_their_header_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    content = torch.load(PEERS / "roll/batch_tensors_step1.pt", weights_only=True)
    for name, how in change.items():
        content[name] = how(content[name])
    source = tmp_path / "batch_tensors_step1.pt"
    torch.save(content, source)
    with pytest.raises(DataError, match=says) as error:
        convert_dump(source, tmp_path / "out.parquet")
    assert (error.value.file, error.value.row) == (str(source), 0)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "no path was given"),
        ("/dev/null", "neither a file nor a folder"),
        ("s3://", "error: s3://: missing bucket in the path; write s3://BUCKET/FOLDER\n"),
        ("file:///x", "file:///x"),
    ],
)
def test_empty_paths_are_refused(source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unset shell variable must not select the working folder."""
    shutil.copytree(PEERS / OF_PEERS["nemo-rl"], tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    done = run("convert", source, tmp_path / "out.parquet", code=4)
    assert says in done.stderr and not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("layout", all_layouts().values(), ids=lambda layout: layout.framework)
def test_layouts_declare_their_columns(layout: Any) -> None:
    assert {"rollout_log_probs", "response_mask"} <= set(layout.columns) or not layout.columns
    assert set(layout.next_token) <= set(layout.columns)
    assert layout.mask and layout.patterns


@pytest.mark.parametrize("framework", OF_PEERS)
def test_framework_files_can_be_checked(framework: str) -> None:
    checks = check_files([str(PEERS / OF_PEERS[framework])])
    assert all(one.sound for one in checks)
    (read,) = [one for one in checks if one.layout]
    truth = pq.read_table(PEERS / "canonical_input.parquet", columns=["response_mask"]).column(0).to_pylist()
    assert (read.sequences, read.tokens) == (len(truth), sum(map(sum, truth)))
    assert str(PEERS) in read.path


def test_redundant_files_of_a_run_are_not_errors() -> None:
    checks = {Path(one.path).parent.name: one for one in check_files([str(SLIME / "slime_head")])}
    assert checks["rollout_data"].sound and checks["rollout_data"].layout is None
    assert [bad.reason for bad in checks["train_data"].bad] == ["train_log_probs: log-prob above 0"]


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sources, "_MOST_IN_MEMORY", 0)
    monkeypatch.setattr(pa.ipc, "new_file", full)
    (tmp_path / "run").mkdir()
    for file in (PEERS / OF_PEERS["roll"]).glob("*.pt"):  # a file in another place does not remove the earlier output
        (tmp_path / "run" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"\.arrow: cannot be written: No space left on device"):
        open_dump([str(tmp_path / "run")])


def test_large_runs_are_memory_mapped_with_equal_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(PEERS / OF_PEERS["roll"], tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "again" / "run")
    in_memory = run("analyze", tmp_path / "run", "--json", code=0).stdout
    monkeypatch.setattr(sources, "_MOST_IN_MEMORY", 0)
    mapped = run("analyze", tmp_path / "again" / "run", "--json", code=0).stdout
    assert mapped.replace("/again/run", "/run") == in_memory
