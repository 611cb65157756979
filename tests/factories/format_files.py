"""Write one dump in each supported format, with the column names of the format."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

Rows = list[dict[str, Any]]


def make_rows(seed: int = 0, sequences: int = 12) -> Rows:
    """Make sequences of two steps, and of prompts with three responses each."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(sequences):
        length = int(rng.integers(3, 20))
        rollout = -rng.exponential(size=length).astype(np.float32)
        train = np.minimum(rollout + 0.05 * rng.normal(size=length), 0).astype(np.float32)
        rows.append(
            {
                "step": 1 + number // (sequences // 2),
                "prompt_id": f"p{number // 3}",
                "sequence_id": f"s{number}",
                "rollout_log_probs": rollout.tolist(),
                "train_log_probs": train.tolist(),
                "response_mask": [1] * length,
                "token_ids": rng.integers(0, 1000, length).tolist(),
            }
        )
    return rows


def write_truth(path: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    for name in ("rollout_log_probs", "train_log_probs"):
        table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pa.list_(pa.float32())))
    pq.write_table(table, path)
    return path


def _padded(rows: Rows, **names: str) -> dict[str, np.ndarray]:
    width = max(len(row["token_ids"]) for row in rows)
    kinds = {"response_mask": np.int64, "token_ids": np.int64}
    found: dict[str, np.ndarray] = {}
    for name in ("rollout_log_probs", "train_log_probs", "response_mask", "token_ids"):
        values = np.zeros((len(rows), width), kinds.get(name, np.float32))
        for number, row in enumerate(rows):
            values[number, : len(row[name])] = row[name]
        found[names.get(name, name)] = values
    return {**found, "step": np.array([row["step"] for row in rows])}


def _tensors(columns: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def _jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _wide_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
            for row in rows
        )


def _long_rows(rows: Rows) -> Rows:
    scalars = ("step", "prompt_id", "sequence_id")
    lists = ("rollout_log_probs", "train_log_probs", "token_ids")
    return [
        {name: row[name] for name in scalars} | {"position": place} | {name: row[name][place] for name in lists}
        for row in rows
        for place in range(len(row["token_ids"]))
    ]


def _hf_folder(path: Path, rows: Rows) -> None:
    path.mkdir()
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        (path / "cache-1234.arrow").write_bytes(b"cache of datasets.map")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


VERL = {"train_log_probs": "old_log_probs", "token_ids": "responses"}

FORMATS: dict[str, Callable[[Path, Rows], Any]] = {
    "wide.jsonl": _jsonl,
    "lines.ndjson": _jsonl,
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "columns.json": lambda path, rows: path.write_text(
        json.dumps({name: [row[name] for row in rows] for name in rows[0]})
    ),
    "nested.json": lambda path, rows: path.write_text(json.dumps({"meta": {"seed": 1}, "data": rows})),
    "wide.csv": _wide_csv,
    "long.csv": lambda path, rows: pl.DataFrame(_long_rows(rows)).write_csv(path),
    "long.tsv": lambda path, rows: pl.DataFrame(_long_rows(rows)).write_csv(path, separator="\t"),
    "long.jsonl": lambda path, rows: _jsonl(path, _long_rows(rows)),
    "padded.npz": lambda path, rows: np.savez(path, **_padded(rows)),
    "packed.npz": lambda path, rows: np.savez_compressed(path, **_padded(rows)),
    "padded.safetensors": lambda path, rows: save_file(_tensors(_padded(rows)), path),
    "padded.pt": lambda path, rows: torch.save(_tensors(_padded(rows)), path),
    "verl.pt": lambda path, rows: torch.save(_tensors(_padded(rows, **VERL)), path),
    "inner.pt": lambda path, rows: torch.save({"step": 3, "batch": _tensors(_padded(rows))}, path),
    "ragged.pt": lambda path, rows: torch.save(
        {
            name: [torch.tensor(row[name]) if isinstance(row[name], list) else row[name] for row in rows]
            for name in rows[0]
        },
        path,
    ),
    "list.pt": lambda path, rows: torch.save(rows, path),
    "dump.feather": lambda path, rows: feather.write_feather(pa.Table.from_pylist(rows), path),
    "hf_dataset": _hf_folder,
}
"""Writers by file name."""


def completions(row: dict[str, Any]) -> dict[str, Any]:
    found = {"tokens": [f"token_id:{token}" for token in row["token_ids"]], "token_logprobs": row["rollout_log_probs"]}
    return {"id": row["sequence_id"], "choices": [{"index": 0, "finish_reason": "length", "logprobs": found}]}


def chat(row: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(row["token_ids"], row["rollout_log_probs"], strict=True)
    content = [{"token": f"token_id:{token}", "logprob": value, "top_logprobs": []} for token, value in pairs]
    return {"id": row["sequence_id"], "choices": [{"index": 0, "message": {}, "logprobs": {"content": content}}]}


def vllm(row: dict[str, Any]) -> dict[str, Any]:
    """Return a RequestOutput of vLLM whose first entry per position is a likelier token than the sampled token."""
    pairs = zip(row["token_ids"], row["rollout_log_probs"], strict=True)
    found = [
        {"100000": {"logprob": -0.01, "rank": 1}, str(token): {"logprob": value, "rank": 2}} for token, value in pairs
    ]
    output = {"index": 0, "token_ids": row["token_ids"], "logprobs": found}
    return {"request_id": row["sequence_id"], "prompt_token_ids": [5, 7], "outputs": [output]}


def sglang(row: dict[str, Any]) -> dict[str, Any]:
    found = [[value, token, None] for token, value in zip(row["token_ids"], row["rollout_log_probs"], strict=True)]
    info = {
        "id": row["sequence_id"],
        "output_token_logprobs": found,
        "weight_version": "7",
        "finish_reason": {"type": "stop"},
    }
    return {"text": "", "meta_info": info}


def vllm_scored(row: dict[str, Any]) -> dict[str, Any]:
    """Return a RequestOutput of vLLM that scored the prompt and the response."""
    tokens = [5, 7, *row["token_ids"]]
    values = [None, -1.0, *row["rollout_log_probs"]]
    found = [
        None if value is None else {str(token): {"logprob": value}} for token, value in zip(tokens, values, strict=True)
    ]
    return {"request_id": row["sequence_id"], "prompt_token_ids": tokens, "prompt_logprobs": found, "outputs": []}


def sglang_scored(row: dict[str, Any]) -> dict[str, Any]:
    tokens, values = [5, 7, *row["token_ids"]], [None, -1.0, *row["rollout_log_probs"]]
    found = [[value, token, None] for token, value in zip(tokens, values, strict=True)]
    return {
        "text": "",
        "meta_info": {"id": row["sequence_id"], "input_token_logprobs": found, "output_token_logprobs": []},
    }


def batch_job(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of OpenAI's batch output. `custom_id` is the id of the request."""
    body = completions(row) | {"id": "cmpl-1"}
    return {"id": "batch_req_1", "custom_id": row["sequence_id"], "response": {"status_code": 200, "body": body}}


ENGINES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "openai_completions": completions,
    "openai_chat": chat,
    "vllm": vllm,
    "sglang": sglang,
    "vllm_scored": vllm_scored,
    "sglang_scored": sglang_scored,
    "batch_job": batch_job,
}
"""Functions that return the engine's response for a row."""
