"""Write framework files with random sizes, dtypes and padding."""

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
import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
MASKS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


@dataclass
class Truth:
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
    """Number types, padding values, lists or tensors, and optional fields of a file."""

    truth: list[Truth]
    dtype: str
    mask: str
    pad: float
    pad_id: int
    lists: bool
    optional: bool
    step: int


def variant(seed: int) -> Variant:
    """Draw sequences of 0 to 60 tokens with tool tokens, in the precision in which they are saved."""
    rng = np.random.default_rng(seed)
    dtype = list(DTYPES)[seed % len(DTYPES)]
    truth = []
    for number in range(int(rng.integers(1, 14))):
        length = [1, 0, 2, int(rng.integers(3, 60))][min(number, 3)] if seed % 2 else int(rng.integers(1, 40))
        mask = np.ones(length, int)
        if length > 12:
            mask[4:7] = 0  # tokens of a tool
            mask[-2:] = int(rng.integers(2))
        if number == 5:
            mask[:] = 0
        rollout = -rng.exponential(size=length)
        train = np.minimum(rollout + rng.normal(0, 0.02, length), 0)
        both = [torch.tensor(values).to(DTYPES[dtype]).float().numpy() for values in (rollout, train)]
        if dtype == "float64":  # the file contains float32
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
    """Save a dict of tensors or of lists of rows, with unknown fields."""
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
    masks["prompt_mask"] = padded([[1] * len(t.prompt) for t in v.truth], 0, left=True)
    ids = {"completion_ids": padded([t.tokens for t in v.truth], v.pad_id)}
    ids["prompt_ids"] = padded([t.prompt for t in v.truth], v.pad_id, left=True)
    save_columns(v, place / f"generation_batch_step{v.step}.pt", floats, masks, ids)


def whole(v: Variant, values: Callable[[Truth], list[Any]], before: Any, pad: Any) -> list[list[Any]]:
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
    """Shift rows so that entry t is about token t + 1."""
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
    if kind == torch.bfloat16:  # numpy does not have this type
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    values = tensor.numpy()
    return {"format": "numpy", "data": values.tobytes(), "shape": values.shape, "dtype": str(values.dtype)}


def skyrl(v: Variant, place: Path) -> None:
    """Write a batch whose last rows are copies of the first rows."""
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
        line: dict[str, Any] = {side: {name: tensor(one) for name, one in of.items()} for side, of in sides.items()}
        chunks = [t.prompt, t.tokens[:-1]]
        lines.append({"model_input": {"chunks": [{"tokens": chunk} for chunk in chunks]}} | line)
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


def rollouts(v: Variant, place: Path, kind: str) -> Path:
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
