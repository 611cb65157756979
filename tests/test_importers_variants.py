"""Dumps of any size, type and padding, written here as each framework lays them out, give back what was written."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from mismatchctl.cli.main import app
from mismatchctl.convert import convert
from mismatchctl.errors import DataError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
MASKS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclass
class Truth:
    """One sequence: what a dump is made of, and what must come back."""

    prompt: list[int]
    tokens: list[int]
    rollout: list[float]
    train: list[float]
    mask: list[int]

    @property
    def valid(self) -> list[int]:
        return [place for place, one in enumerate(self.mask) if one]


@dataclass
class Variant:
    """How it is written: number types, what stands on padding, lists or tensors, which optional fields."""

    truth: list[Truth]
    dtype: str
    mask: str
    pad: float
    pad_id: int
    lists: bool
    optional: bool
    step: int


def variant(seed: int) -> Variant:
    """Sequences of 0 to 60 tokens with tool tokens in between, in the precision that they are saved in."""
    rng = np.random.default_rng(seed)
    dtype = list(DTYPES)[seed % len(DTYPES)]
    truth = []
    for number in range(int(rng.integers(1, 14))):
        length = [1, 0, 2, int(rng.integers(3, 60))][min(number, 3)] if seed % 2 else int(rng.integers(1, 40))
        mask = np.ones(length, int)
        if length > 12:
            mask[4:7] = 0  # a tool wrote these
            mask[-2:] = int(rng.integers(2))
        if number == 5:
            mask[:] = 0
        rollout = -rng.exponential(size=length)
        train = np.minimum(rollout + rng.normal(0, 0.02, length), 0)
        both = [torch.tensor(values).to(DTYPES[dtype]).float().numpy() for values in (rollout, train)]
        if dtype == "float64":  # no more than float32 comes back
            both = [values.astype(np.float32) for values in (rollout, train)]
        both[0][mask == 0] = 0.0
        prompt = rng.integers(1, 99, int(rng.integers(1, 9))).tolist()
        tokens = rng.integers(1, 50_000, length).tolist()
        truth.append(Truth(prompt, tokens, *(one.tolist() for one in both), mask.tolist()))
    pad = [0.0, 1.0, -7.5, float("nan")][int(rng.integers(4))]
    pad_id = [0, 151_643, -100][int(rng.integers(3))]
    mask_kind = list(MASKS)[int(rng.integers(len(MASKS)))]
    return Variant(truth, dtype, mask_kind, pad, pad_id, bool(rng.integers(2)), bool(rng.integers(2)), seed + 3)


def padded(rows: list[list[Any]], pad: Any, left: bool = False) -> list[list[Any]]:
    width = max(map(len, rows)) + 2
    return [[pad] * (width - len(row)) + row if left else row + [pad] * (width - len(row)) for row in rows]


def save_columns(v: Variant, path: Path, floats: dict[str, Any], masks: dict[str, Any], ids: dict[str, Any]) -> None:
    """A dict of tensors, or of a list of each row's; and fields that nobody knows."""
    content: dict[str, Any] = {name: torch.tensor(rows).to(DTYPES[v.dtype]) for name, rows in floats.items()}
    content |= {name: torch.tensor(rows).to(MASKS[v.mask]) for name, rows in masks.items()}
    content |= {name: torch.tensor(rows) for name, rows in ids.items()}
    if v.lists:
        content = {name: rows.tolist() if name in ids else list(rows) for name, rows in content.items()}
    if v.optional:
        content["advantages"] = torch.ones(len(v.truth))
    content |= {"num_items_in_batch": torch.tensor(7), "pixel_values": torch.zeros(3, 5), "note": "x", "nothing": None}
    torch.save(content, path)


def trl(v: Variant, place: Path) -> None:
    floats = {
        "sampling_per_token_logps": padded([t.rollout for t in v.truth], v.pad),
        "old_per_token_logps": padded([t.train for t in v.truth], -3.0),
    }
    masks = {
        "completion_mask": padded([[1] * len(t.mask) for t in v.truth], 0),
        "tool_mask": padded([t.mask for t in v.truth], 1),
    }
    ids = {"completion_ids": padded([t.tokens for t in v.truth], v.pad_id)}
    save_columns(v, place / f"generation_batch_step{v.step}.pt", floats, masks, ids)


def whole(v: Variant, values: Callable[[Truth], list[Any]], before: Any, pad: Any) -> list[list[Any]]:
    """Rows of prompt and response."""
    return padded([[before] * len(t.prompt) + values(t) for t in v.truth], pad)


def of_whole(v: Variant) -> dict[str, list[list[Any]]]:
    return {
        "ids": padded([t.prompt + t.tokens for t in v.truth], v.pad_id),
        "attention_mask": padded([[1] * len(t.prompt + t.tokens) for t in v.truth], 0),
        "mask": whole(v, lambda t: t.mask, 0, 0),
        "rollout": whole(v, lambda t: t.rollout, 0.0, v.pad),
        "train": whole(v, lambda t: t.train, -2.0, -3.0),
    }


def shifted(rows: list[list[Any]]) -> list[list[Any]]:
    """Entry t about token t + 1."""
    return [row[1:] for row in rows]


def openrlhf(v: Variant, place: Path) -> None:
    rows = of_whole(v)
    floats = {"rollout_log_probs": shifted(rows["rollout"]), "action_log_probs": shifted(rows["train"])}
    masks = {"action_mask": shifted(rows["mask"]), "attention_mask": rows["attention_mask"]}
    save_columns(v, place / f"experience_step{v.step}.pt", floats, masks, {"sequences": rows["ids"]})


def roll(v: Variant, place: Path) -> None:
    rows = of_whole(v)
    floats = {"infer_logprobs": shifted(rows["rollout"]), "old_log_probs": shifted(rows["train"])}
    masks = {"response_mask": rows["mask"]} | ({"attention_mask": rows["attention_mask"]} if v.optional else {})
    save_columns(v, place / f"batch_tensors_step{v.step}.pt", floats, masks, {"input_ids": rows["ids"]})


def areal(v: Variant, place: Path) -> None:
    rows = of_whole(v)
    floats = {"logprobs": rows["rollout"], "prox_logp": [[*row, -9.0] for row in shifted(rows["train"])]}
    masks = {"loss_mask": rows["mask"], "attention_mask": rows["attention_mask"]}
    save_columns(v, place / f"traj_batch_step{v.step}.pt", floats, masks, {"input_ids": rows["ids"]})


def skyrl_tensor(rows: list[list[Any]], kind: torch.dtype) -> dict[str, Any]:
    tensor = torch.tensor(rows).to(kind)
    if kind == torch.bfloat16:  # which numpy does not know
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    values = tensor.numpy()
    return {"format": "numpy", "data": values.tobytes(), "shape": values.shape, "dtype": str(values.dtype)}


def skyrl(v: Variant, place: Path) -> None:
    """The last rows are copies of the first, which fill the batch."""
    copies = v.step % 3
    truth = v.truth + v.truth[:1] * copies
    zero = 0.0 if np.isnan(v.pad) else v.pad
    columns = {
        "rollout_logprobs": skyrl_tensor(padded([t.rollout for t in truth], zero, left=True), DTYPES[v.dtype]),
        "action_log_probs": skyrl_tensor(padded([t.train for t in truth], 0.0, left=True), DTYPES[v.dtype]),
        "sequences": skyrl_tensor(padded([t.prompt + t.tokens for t in truth], v.pad_id, left=True), torch.int64),
        "values": None,
    }
    masks = [t.mask for t in v.truth] + [[0] * len(t.mask) for t in truth[len(v.truth) :]]
    columns["loss_mask"] = skyrl_tensor(padded(masks, 0, left=True), torch.float32)
    columns["response_mask"] = skyrl_tensor(padded([[1] * len(t.mask) for t in truth], 0, left=True), torch.int64)
    metadata = {"pad_size": np.int64(copies) if v.optional else copies, "uids": np.arange(len(truth))}
    state = pickle.dumps({"batch_dict": columns, "metadata": metadata}, protocol=3)[2:-1]
    module = "skyrl.backends.skyrl_train.training_batch"
    head = f"c{module}\n_rebuild_tensor_batch\n(c{module}\nTrainingInputBatch\n".encode()
    path = place / f"dumped_data/global_step_{v.step}_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(b"\x80\x03" + head + state + b"tR.")


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def nemo(v: Variant, place: Path) -> None:
    rows = of_whole(v)
    lines = []
    for number, t in enumerate(v.truth):
        line = {
            "input_lengths": len(t.prompt + t.tokens),
            "token_loss_mask": rows["mask"][number],
            "sample_loss_mask": 1.0,
            "generation_logprobs": whole(v, lambda t: t.rollout, 0.0, 0.0)[number],
            "prev_logprobs": rows["train"][number],
            "token_ids": rows["ids"][number],
        }
        if v.optional:
            line |= {"content": "x", "rewards": 0.5, "filtered_rewards": [1.0, 2.0], "agent_ref": None}
        lines.append({name: value if v.lists else [value] for name, value in line.items()})
    write_lines(place / f"logs/exp_001/train_data_step{v.step}.jsonl", lines)


def prime(v: Variant, place: Path) -> None:
    lines = []
    for number, t in enumerate(v.truth):
        before = len(t.prompt)
        line = {
            "inference_logprobs": [None if v.optional else 0.0] * before + t.rollout,
            "trainer_logprobs": [-11.0] * before + t.train,
            "loss_mask": [False] * before + [bool(one) for one in t.mask],
            "token_ids": t.prompt + t.tokens,
            "step": v.step,
        }
        if v.optional:
            line |= {"rank": 3, "export_sequence_idx": number, "micro_step": 0, "ref_kl_weights": [None] * before}
        lines.append(line)
    write_lines(place / f"token_exports/step_{v.step}/rank_3.jsonl", lines)
    (place / f"token_exports/step_{v.step}/STABLE").touch()


def tinker(v: Variant, place: Path) -> None:
    def tensor(values: list[Any]) -> Any:
        return values if v.lists else {"data": values, "dtype": "float32", "shape": [len(values)]}

    lines = []
    for t in v.truth:
        before = len(t.prompt) - 1
        inputs = {"target_tokens": t.prompt[1:] + t.tokens, "logprobs": [0.0] * before + t.rollout}
        inputs |= {"mask": [0.0] * before + [float(one) for one in t.mask]}
        outputs = {"logprobs": [-2.0] * before + t.train}
        sides = {"loss_fn_inputs": inputs, "loss_fn_outputs": outputs}
        lines.append({side: {name: tensor(one) for name, one in of.items()} for side, of in sides.items()})
    write_lines(place / f"datums_step{v.step}.jsonl", lines)


def slime_columns(v: Variant) -> dict[str, list[Any]]:
    kind = DTYPES[v.dtype]
    return {
        "tokens": [torch.tensor(t.prompt + t.tokens) for t in v.truth],
        "response_lengths": [len(t.tokens) for t in v.truth],
        "total_lengths": [len(t.prompt + t.tokens) for t in v.truth],
        "loss_masks": [torch.tensor(t.mask).to(MASKS[v.mask]) for t in v.truth],
        "rollout_log_probs": [t.rollout if v.lists else torch.tensor(t.rollout).to(kind) for t in v.truth],
        "log_probs": [torch.tensor(t.train).to(kind) for t in v.truth],
        "rewards": [np.float32(0.5)] * len(v.truth) if v.optional else [{"score": 1.0}] * len(v.truth),
    }


def slime_seed(v: Variant, place: Path) -> None:
    """Two tensor-parallel copies, with names of samples or without."""
    data = slime_columns(v) | {"raw_reward": [1.0] * (len(v.truth) + 5)}
    if v.optional:
        data["sample_indices"] = list(range(len(v.truth)))
    (place / "train_data").mkdir()
    for rank in range(2):
        content = {"rollout_id": v.step, "rank": rank, "rollout_data": data}
        torch.save(content, place / f"train_data/{v.step}_{rank}.pt")


def slime_head(v: Variant, place: Path) -> None:
    columns = slime_columns(v)
    samples = [{name: values[number] for name, values in columns.items()} for number in range(len(v.truth))]
    if v.optional:
        samples = [
            sample | {"sample_index": number, "advantages": torch.ones(len(sample["log_probs"]))}
            for number, sample in enumerate(samples)
        ]
    (place / "train_data").mkdir()
    content = {"format_version": 2, "rollout_id": v.step, "rank": 0, "samples": samples, "dp_shards": []}
    torch.save(content, place / f"train_data/{v.step}.pt")


def policy_loss(v: Variant, place: Path) -> None:
    samples = [
        {
            "index": number,
            "response_length": len(t.tokens),
            "train_log_probs": torch.tensor(t.train) - 0.125,
            "old_log_probs": torch.tensor(t.train),
            "rollout_log_probs": torch.tensor(t.rollout),
            "local_loss_mask": torch.tensor(t.mask).to(MASKS[v.mask]),
        }
        for number, t in enumerate(v.truth)
    ]
    torch.save({"rank": 0, "call": v.step, "samples": samples, "finite": True}, place / f"rank_0_call_{v.step}.pt")


WRITERS: dict[str, Callable[[Variant, Path], None]] = {
    "trl": trl,
    "openrlhf": openrlhf,
    "roll": roll,
    "areal": areal,
    "skyrl": skyrl,
    "nemo-rl": nemo,
    "prime-rl": prime,
    "tinker": tinker,
    "slime": slime_seed,
    "slime (format version 2)": slime_head,
    "miles-policy-loss": policy_loss,
}
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
def test_variants_are_the_truth(framework: str, seed: int, tmp_path: Path) -> None:
    v = variant(seed)
    source, out = tmp_path / "nested/source", tmp_path / "out.parquet"
    source.mkdir(parents=True)
    WRITERS[framework](v, source)
    convert(source, out, framework.partition(" ")[0] if seed % 2 else "")
    rows = pq.read_table(out).to_pylist()
    check(rows, v, ids=framework != "miles-policy-loss")
    assert len({row["sequence_id"] for row in rows}) == len(rows)
    assert {row.get("step") for row in rows} == {None if framework == "miles-policy-loss" else v.step}


@pytest.mark.parametrize("framework", WRITERS)
def test_a_file_is_read_as_its_folder(framework: str, tmp_path: Path) -> None:
    v = variant(2)
    source = tmp_path / "source"
    source.mkdir()
    WRITERS[framework](v, source)
    (path, *_) = sorted(one for one in source.rglob("*.*") if one.is_file())
    convert(path, tmp_path / "out.parquet")
    check(pq.read_table(tmp_path / "out.parquet").to_pylist(), v, ids=framework != "miles-policy-loss")


@pytest.mark.parametrize("framework", WRITERS)
def test_several_steps_are_read_in_order(framework: str, tmp_path: Path) -> None:
    """Natural order: step 3 before step 11."""
    source = tmp_path / "source"
    variants = [variant(seed) for seed in (0, 8)]  # of one precision
    for number, v in enumerate(variants):
        folder = source / str(number)
        folder.mkdir(parents=True)
        v.optional = v.lists = False
        WRITERS[framework](v, folder)
    convert(source, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    cut = len(variants[0].truth)
    for part, v in zip((rows[:cut], rows[cut:]), variants, strict=True):
        check(part, v, ids=framework != "miles-policy-loss")


@pytest.mark.parametrize("framework", WRITERS)
def test_a_source_is_analyzed_as_its_conversion(framework: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.parquet"
    source.mkdir()
    WRITERS[framework](variant(6), source)
    convert(source, out)
    results = []
    for place in (source, out):
        done = CliRunner().invoke(app, ["analyze", str(place), "--json"])
        assert done.exit_code == 0, done.stderr
        (one,) = json.loads(done.stdout)["runs"].values()
        results.append(one["overall"]["metrics"])
    assert results[0] == results[1] and results[0]


def rollouts(v: Variant, place: Path, kind: str) -> Path:
    """Files of the rollout alone."""
    if kind == "open-instruct":
        lines = [
            {"step": v.step, "sample_idx": number, "prompt_idx": 0, "response_tokens": t.tokens, "logprobs": t.rollout}
            for number, t in enumerate(v.truth)
        ]
        write_lines(place / "run1_rollouts_000000.jsonl", lines)
        return place
    samples = [
        {
            "index": number,
            "tokens": t.prompt + t.tokens,
            "response_length": len(t.tokens),
            "loss_mask": t.mask if not all(t.mask) or v.optional else None,
            "rollout_log_probs": t.rollout if t.rollout or v.optional else None,
            "reward": {"a": 1.0} if v.optional else 1.0,
            "remove_sample": False,
        }
        for number, t in enumerate(v.truth)
    ]
    if kind == "slime-rollout":
        torch.save({"rollout_id": v.step, "samples": samples}, place / f"{v.step}.pt")
        return place
    for sample in samples:
        sample |= {"sample_index": sample["index"], "rollout_log_probs": sample["rollout_log_probs"] or []}
    (place / "dashboard_columns").mkdir()
    names = ("sample_index", "response_length", "tokens", "loss_mask", "rollout_log_probs")
    kinds = [pa.int32(), pa.int32(), pa.list_(pa.int32()), pa.list_(pa.int8()), pa.list_(pa.float32())]
    table = pa.table({name: pa.array([s[name] for s in samples], k) for name, k in zip(names, kinds, strict=True)})
    pq.write_table(table, place / f"dashboard_columns/rollout_{v.step}.parquet")
    return place


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
    convert(rollouts(v, source, kind), tmp_path / "out.parquet", join=tmp_path / "train.parquet")
    check(pq.read_table(tmp_path / "out.parquet").to_pylist(), v)


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "text": (["a", "b", "c"], "holds what is no number"),
    "nested": ([[-1.0], [-2.0], [-3.0]], "holds what is no number"),
    "ragged": ([[-1.0], [-2.0, 1.0], []], "holds what is no number"),
    "one number": (-1.0, "holds one number where a list"),
    "short": ([-1.0, -2.0], "lists differ in length"),
    "long": ([-1.0, -2.0, -3.0, -4.0], "lists differ in length"),
    "nothing": (None, "there is no such value"),
    "an object": ({"data": 1}, "holds what is no number"),
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
    done = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out.parquet")], env={"COLUMNS": "400"})
    assert done.exit_code == 4
    with pytest.raises(DataError, match=says) as error:
        convert(path, tmp_path / "out.parquet")
    assert (error.value.file, error.value.row) == (str(path), 1)
    assert error.value.column in good
    assert [one.name for one in tmp_path.iterdir()] == ["0.pt"]


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("loss_masks", [1, float("nan"), 1], "the mask holds NaN or null"),
        ("loss_masks", [1, None, 1], "the mask holds NaN or null"),
        ("tokens", [1, 2, 10**30, 4], "holds what is no number"),
        ("rewards", "good", "holds what is no number"),
        ("response_lengths", "x", "is not laid out as files of slime are"),
    ],
)
def test_bad_masks_and_numbers_are_named(column: str, value: Any, says: str, tmp_path: Path) -> None:
    good = {"rollout_log_probs": [-1.0, -2.0, -3.0], "log_probs": [-1.0, -2.0, -3.0], "loss_masks": [1, 1, 1]}
    good |= {"tokens": [1, 2, 3, 4], "response_lengths": 3}
    torch.save({"format_version": 2, "rollout_id": 0, "samples": [good | {column: value}]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match=says):
        convert(tmp_path / "0.pt", tmp_path / "out.parquet")


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5, 1e300])
@pytest.mark.parametrize(("column", "means"), [("rollout_log_probs", "rollout_log_probs"), ("log_probs", "train")])
def test_values_that_are_no_log_probs_are_converted_and_refused_by_verbs(
    value: float, column: str, means: str, tmp_path: Path
) -> None:
    """Converting loses no row; a verb names the first bad one, of the source as of what was made of it."""
    good = {"rollout_log_probs": [-1.0, -2.0, -3.0], "log_probs": [-1.0, -2.0, -3.0], "loss_masks": [1, 1, 1]}
    good |= {"tokens": [1, 2, 3, 4], "response_lengths": 3}
    samples = [good, good | {column: torch.tensor([-1.0, value, -3.0], dtype=torch.float64)}]
    path, out = tmp_path / "0.pt", tmp_path / "out.parquet"
    torch.save({"format_version": 2, "rollout_id": 0, "samples": samples}, path)
    convert(path, out)
    for place in (path, out):
        done = CliRunner().invoke(app, ["analyze", str(place)], env={"COLUMNS": "1000"})
        assert done.exit_code == 4
        assert done.stderr.startswith(f"error: {place}, row 1, column {means}")
        assert "correct the dump, or leave such rows out with --on-bad skip" in done.stderr
    assert CliRunner().invoke(app, ["analyze", str(path), "--on-bad", "skip"]).exit_code == 0
