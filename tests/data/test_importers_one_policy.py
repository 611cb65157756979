"""Files with one policy, Miles' micro-batches, and files that only their framework can open."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from mismatchctl.data.conversion import convert_dump
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import DataError
from mismatchctl.frameworks.registry import column_aliases
from tests.cli.command import run
from tests.data.converted_rows import converted
from tests.factories.hostile_pickle import Hostile
from tests.paths import FIXTURES

DUMPS = FIXTURES / "framework_dumps"
PEERS, MILES, SLIME = DUMPS / "peers", DUMPS / "slime_miles/miles_head", DUMPS / "slime_miles/slime_head"
ROLLOUTS = PEERS / "open_instruct/run1_rollouts_000000.jsonl"
ALONE = {
    "open-instruct": PEERS / "open_instruct",
    "slime-rollout": SLIME / "rollout_data",
    "miles-dashboard": MILES / "dashboard_columns",
}


@pytest.mark.parametrize("framework", ALONE)
def test_rollout_files_name_the_missing_train_log_probs(framework: str, tmp_path: Path) -> None:
    done = run("convert", ALONE[framework], tmp_path / "out.parquet", code=4)
    words = " ".join(done.stderr.split())
    assert f"files of {framework} lack train log-probs, so no comparison is possible" in words
    assert "--join train.parquet" in words
    assert list(tmp_path.iterdir()) == []


def train_file(place: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows[::-1]), place)
    return place


def test_joined_files_of_open_instruct_match_the_truth(tmp_path: Path) -> None:
    truth = pq.read_table(PEERS / "canonical_input.parquet").to_pylist()
    tokens = [one["response_tokens"] for one in json.loads((PEERS / "canonical_tokens.json").read_text())]
    train = [
        {"step": true["step"], "sequence_id": str(number), "train_log_probs": true["train_log_probs"]}
        for number, true in enumerate(truth)
    ]
    join = train_file(tmp_path / "train.parquet", train)
    rows = converted(PEERS / "open_instruct", tmp_path, join=join)
    prompts = [json.loads(line)["prompt_idx"] for line in ROLLOUTS.read_text().splitlines()]
    for row, true, ids, prompt in zip(rows, truth, tokens, prompts, strict=True):
        assert row["token_ids"] == ids
        assert row["step"] == true["step"]
        assert row["prompt_id"] == str(prompt)
        assert row["rollout_log_probs"] == np.array(true["rollout_log_probs"], np.float32).tolist()
        assert row["train_log_probs"] == np.array(true["train_log_probs"], np.float32).tolist()
        assert row["response_mask"] == [True] * len(ids)


@pytest.mark.parametrize("source", [SLIME / "rollout_data", MILES / "rollout_data", MILES / "dashboard_columns"])
def test_joined_rollouts_of_slime_match_the_truth(source: Path, tmp_path: Path) -> None:
    samples = torch.load(source.parent / "rollout_data/0.pt", weights_only=True)["samples"]
    train = [
        {
            "step": 0,
            "sequence_id": str(one["index"]),
            "train_log_probs": [-1.0 - n for n in range(one["response_length"])],
        }
        for one in samples
    ]
    rows = converted(source, tmp_path, join=train_file(tmp_path / "train.parquet", train))
    dashboard = source.name == "dashboard_columns"
    for row, one, joined in zip(rows, samples, train, strict=True):
        length = one["response_length"]
        removed = one["remove_sample"] and not dashboard  # the dashboard does not have this value
        mask = [0] * length if removed else one["loss_mask"] or [1] * length
        assert row["sequence_id"] == str(one["index"])
        assert row["rollout_log_probs"] == np.array(one["rollout_log_probs"], np.float32).tolist()
        assert row["train_log_probs"] == joined["train_log_probs"]
        assert row["response_mask"] == [bool(value) for value in mask]
        assert row["token_ids"] == one["tokens"][-length:]
        if not dashboard:
            assert (row["prompt_id"], row["reward"]) == (str(one["group_index"]), one["reward"])
            assert row["rollout_version"] == 0


def test_train_dumps_get_prompts_and_versions_from_rollout_dumps(tmp_path: Path) -> None:
    rows = converted(SLIME / "train_data", tmp_path, join=SLIME / "rollout_data")
    samples = torch.load(SLIME / "rollout_data/0.pt", weights_only=True)["samples"]
    assert [row["prompt_id"] for row in rows] == [str(one["group_index"]) for one in samples]
    assert [row["rollout_version"] for row in rows] == [0] * len(samples)


def test_rollouts_next_to_train_dumps_are_accepted(tmp_path: Path) -> None:
    joined = converted(SLIME, tmp_path, join=SLIME / "rollout_data")
    assert joined == converted(SLIME / "train_data", tmp_path, join=SLIME / "rollout_data")
    both = converted(SLIME, tmp_path)
    assert both == converted(SLIME, tmp_path, framework="slime") == converted(SLIME / "train_data", tmp_path)


def test_completions_of_trl_are_skipped_with_a_note(tmp_path: Path) -> None:
    rows = converted(PEERS / "trl", tmp_path)
    assert rows == converted(PEERS / "trl/generation_batch_step1.pt", tmp_path) and len(rows) == 6
    done = run("analyze", PEERS / "trl", "--json", code=0)
    completions = PEERS / "trl/completions"
    for words in (["convert", str(completions), str(tmp_path / "o.parquet")], ["analyze", str(completions)]):
        done = run(*words, code=4)
        assert "lack log-probs, so no comparison is possible" in " ".join(done.stderr.split())


def test_other_files_next_to_a_dump_are_skipped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(PEERS / "canonical_input.parquet", source)
    torch.save({"weight": torch.zeros(2)}, source / "model.pt")
    for words in (["convert", str(source), str(tmp_path / "o.parquet")], ["analyze", str(source)]):
        run(*words, code=0)


def test_parquet_files_without_log_probs_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"loss": [1.0]}), tmp_path / "losses.parquet")
    done = run("analyze", tmp_path, code=4)
    assert (
        "if the file is not a dump, pass only the dumps; if the column has another name, choose the right column"
        in " ".join(done.stderr.split())
    )


def test_one_file_of_several_ranks_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not contain sequences; pass the whole folder"):
        convert_dump(MILES / "cp2/train_data/0_1.pt", tmp_path / "out.parquet")


def test_folders_with_both_dumps_of_miles_ask_for_one() -> None:
    """The Parquet file of its dashboard is not a dump and is ignored."""
    done = run("analyze", MILES, code=4)
    words = " ".join(done.stderr.split())
    assert "is a file of miles-policy-loss, but" in words
    assert "pass a folder with files of one framework" in words


def test_micro_batches_of_miles_contain_three_policies(tmp_path: Path) -> None:
    """In the file, train_log_probs is the current policy, and old_log_probs is the trainer's recomputation."""
    source = tmp_path / "policy_loss_debug"
    shutil.copytree(MILES / "policy_loss_debug", source)
    content = torch.load(source / "rank_0_call_0.pt", weights_only=True)
    torch.save(content | {"rank": 1}, source / "rank_1_call_0.pt")  # a tensor-parallel copy
    others = [dict(sample) for sample in content["samples"]]
    for sample in others:
        sample["old_log_probs"] = sample["old_log_probs"] - 0.5
        sample["train_log_probs"] = sample["train_log_probs"] - 0.25
    torch.save(content | {"rank": 2, "samples": others}, source / "rank_2_call_0.pt")  # another data-parallel rank
    rows = converted(source, tmp_path)
    assert len(rows) == 8
    assert len({row["sequence_id"] for row in rows}) == 8
    assert [row["micro_batch"] for row in rows] == ["0:0"] * 4 + ["2:0"] * 4
    for row, sample in zip(rows, [*content["samples"], *others], strict=True):
        assert row["rollout_log_probs"] == sample["rollout_log_probs"].tolist()
        assert row["train_log_probs"] == sample["old_log_probs"].tolist()
        assert row["current_log_probs"] == sample["train_log_probs"].tolist()
        assert row["advantages"] == sample["advantages"].tolist()
        assert row["response_mask"] == sample["local_loss_mask"].bool().tolist()


def test_context_parallel_micro_batches_are_refused(tmp_path: Path) -> None:
    content = torch.load(MILES / "policy_loss_debug/rank_0_call_0.pt", weights_only=True)
    content["samples"][1]["old_log_probs"] = content["samples"][1]["old_log_probs"][:5]
    torch.save(content, tmp_path / "rank_0_call_0.pt")
    with pytest.raises(DataError, match="saved 5 of a response's 22 tokens") as error:
        convert_dump(tmp_path / "rank_0_call_0.pt", tmp_path / "out.parquet")
    assert error.value.row == 1


def _pickled(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


HOSTILE: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], str]] = {
    "rank_0_call_0.pt": (torch.save, lambda one: {"call": 0, "rank": 0, "samples": [{"index": one}]}, "posix.system"),
    "0.pt": (torch.save, lambda one: {"rollout_id": 0, "samples": [{"metadata": one}]}, "posix.system"),
    "0_0.pt": (
        torch.save,
        lambda one: {"rollout_id": 0, "cp_size": 2, "cp_rank": 0, "rollout_data": {"tokens": [one]}},
        "posix.system",
    ),
    "gen_batch.dp": (_pickled, lambda one: one, "verl_to_parquet"),
    "tq_batch.pt": (torch.save, lambda one: {"tensordict": one}, "verl_to_parquet"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("verb", ["convert", "analyze"])
def test_hostile_files_execute_no_code(name: str, verb: str, tmp_path: Path) -> None:
    save, wrap, says = HOSTILE[name]
    source, marker = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    save(wrap(Hostile(marker)), source / name)
    more = [str(tmp_path / "out.parquet")] if verb == "convert" else []
    done = run(verb, source, *more)
    assert not marker.exists()
    assert done.exit_code == 4
    assert says in done.stderr.replace("\n", "")
    assert not (tmp_path / "out.parquet").exists()


def test_hostile_files_of_other_ranks_execute_no_code(tmp_path: Path) -> None:
    """The reader looks for slices in the files of other ranks."""
    source, marker = tmp_path / "train_data", tmp_path / "ran"
    shutil.copytree(MILES / "cp2/train_data", source)
    torch.save({"rollout_id": 0, "rollout_data": Hostile(marker)}, source / "0_1.pt")
    with pytest.raises(DataError, match=r"0_1\.pt.*posix\.system"):
        convert_dump(source / "0_0.pt", tmp_path / "out.parquet")
    assert not marker.exists()


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "datums_step1.jsonl": lambda path: path.write_text('{"loss_fn_inputs": [], "loss_fn_outputs": {}}'),
    "run_rollouts_000.jsonl": lambda path: path.write_text('{"sample_idx": 1, "response_tokens": 3}'),
    "0.pt": lambda path: torch.save({"rollout_id": 0, "samples": [3]}, path),
    "0_0.pt": lambda path: torch.save({"rollout_id": 0, "cp_size": 2, "rollout_data": {"log_probs": 1}}, path),
    "rank_0_call_0.pt": lambda path: torch.save({"call": 0, "samples": [{}]}, path),
    "dashboard_columns/rollout_0.parquet": lambda path: path.write_bytes(b"PAR1 nothing PAR1"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_with_another_structure_are_named(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    DAMAGED[name](source)
    train = train_file(tmp_path / "train.parquet", [{"sequence_id": "0", "train_log_probs": [0.0]}])
    with pytest.raises(DataError) as error:
        convert_dump(source, tmp_path / "out.parquet", join=train)
    assert error.value.file == str(source)


def test_sequences_of_several_versions_have_the_oldest(tmp_path: Path) -> None:
    source = tmp_path / "rollout_data"
    source.mkdir()
    content = torch.load(SLIME / "rollout_data/0.pt", weights_only=True)
    for place, sample in enumerate(content["samples"]):
        sample["weight_versions"] = [str(place + 9), str(place + 12), str(place + 10)]
    torch.save(content, source / "0.pt")
    rows = converted(SLIME / "train_data", tmp_path, join=source)
    assert [row["rollout_version"] for row in rows] == [place + 9 for place in range(len(rows))]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_skipped_pickle_files_are_reported(ending: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    source.mkdir()
    lines = (PEERS / "nemo_rl/logs/exp_001/train_data_step1.jsonl").read_bytes()
    packed = source / f"train_data_step1.jsonl{ending}"
    packed.write_bytes(pa.compress(lines, "gzip" if ending == ".gz" else "zstd", asbytes=True))
    for words in (["analyze", source], ["convert", source, out], ["convert", packed, out, "--from", "nemo-rl"]):
        done = run(*words, code=4, COLUMNS="1000")
        assert done.stderr == f"error: {packed}: is an archive; unpack it\n"
    (source / "train_data_step2.jsonl").write_bytes(lines)
    for words in (["analyze", source, "-v"], ["convert", source, out]):
        done = run(*words, code=0, COLUMNS="1000")
        assert f"{packed}: archives are not read; unpack" in done.stdout + done.stderr
    assert (
        f"{ending}: archives are not read; unpack archives that belong to the "
        f"run" in run("analyze", source, code=0).stdout
    )
    (source / "train_data_step1.jsonl").write_bytes(lines)
    assert "archives are not read" not in run("analyze", source, code=0).stdout


@pytest.mark.parametrize(
    ("framework", "lacks"),
    [
        ("areal", "prox_logp"),
        ("roll", "old_log_probs"),
        ("openrlhf", "action_mask"),
        ("trl", "sampling_per_token_logps"),
    ],
)
def test_unrecognized_batches_name_the_most_similar_framework(framework: str, lacks: str, tmp_path: Path) -> None:
    (whole,) = (PEERS / framework).glob("*.pt")
    content = torch.load(whole, weights_only=True)
    path = tmp_path / "batch_step2.pt"
    torch.save({name: value for name, value in content.items() if name != lacks}, path)
    shutil.copy(whole, tmp_path / "batch_step1.pt")  # the file also counts next to a complete file
    for place in (path, tmp_path):
        with pytest.raises(DataError, match=f"looks like a file of {framework}, but lacks {lacks}") as error:
            convert_dump(place, tmp_path / "out.parquet")
        assert error.value.file == str(path) and "convert --from" in str(error.value.remedy)


def test_plain_dicts_with_verl_names_are_dumps(tmp_path: Path) -> None:
    names = ("old_log_probs", "rollout_log_probs", "responses", "input_ids", "response_mask", "advantages")
    torch.save({name: torch.zeros(2, 3) for name in names}, tmp_path / "1.pt")
    (file,) = open_dump([str(tmp_path / "1.pt")], aliases=column_aliases()).files
    assert file.rows == 2
    assert file.columns["train_log_probs"] == "old_log_probs"


def test_pickle_files_next_to_a_dump_are_ignored_with_a_warning(tmp_path: Path) -> None:
    """A glob such as `logs/*` can include a checkpoint."""
    dump, packed = tmp_path / "a.parquet", tmp_path / "model.pt.gz"
    lists = pa.array([[-1.0, -2.0]] * 4)
    pq.write_table(pa.table({"rollout_log_probs": lists, "train_log_probs": lists, "step": [0] * 4}), dump)
    packed.write_bytes(b"x")
    done = run("analyze", dump, packed, code=0, COLUMNS="1000")
    assert f"ignored, since they are not dumps: {packed}" in done.stdout + done.stderr
    packed.with_suffix("").write_bytes(b"x")  # the packed file is refused although it is next to an unpacked file
    for words in (["analyze", packed], ["convert", packed, tmp_path / "out.parquet"]):
        done = run(*words, code=4, COLUMNS="1000")
        assert done.stderr == f"error: {packed}: is an archive; unpack it\n"


def test_turns_of_areal_are_imported(tmp_path: Path) -> None:
    (whole,) = (PEERS / "areal").glob("*.pt")
    content = torch.load(whole, weights_only=True)
    mask = content["loss_mask"]
    starts = torch.diff(mask.long(), prepend=torch.zeros_like(mask[:, :1]).long(), dim=1) > 0
    content["turn_ids"] = torch.cumsum(starts.long(), dim=1) - 1
    torch.save(content, tmp_path / "batch_step1.pt")
    convert_dump(tmp_path / "batch_step1.pt", tmp_path / "out.parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    for row, turns in enumerate(table["turn"].to_pylist()):
        inside = torch.nonzero(mask[row])[:, 0]
        expected = content["turn_ids"][row, int(inside[0]) : int(inside[-1]) + 1].tolist()
        assert turns == expected
    convert_dump(whole, tmp_path / "plain.parquet")
    assert "turn" not in pq.read_schema(tmp_path / "plain.parquet").names
    assert run("analyze", tmp_path / "plain.parquet", code=0).stdout
