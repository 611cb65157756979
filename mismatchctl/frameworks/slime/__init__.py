"""Adapter of slime: layouts of dumps, and joining of context-parallel slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import Adapter, File, Row, read_layout, to_array
from mismatchctl.frameworks.slime.arguments import find_version, list_months, recognize
from mismatchctl.frameworks.slime.framework import Slime

SLICED_COLUMNS = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "values", "entropy", "kl")
"""Columns that each rank's file contains only in part. Other columns are complete."""
MAX_NAMED_RANKS = 8
"""Maximum number of missing ranks in an error message. A damaged file may contain any rank count."""


@dataclass(frozen=True)
class RankFile:
    """The file of a rank: its context-parallel rank, the number of ranks, and its samples."""

    path: Path
    cp_rank: int
    cp_size: int
    samples: tuple[int, ...]
    log_probs: bool


def find_ranks(file: File) -> list[RankFile]:
    """Find the files of all ranks of a rollout in the same folder."""
    rollout = file.path.stem.partition("_")[0]
    others = sorted(file.path.parent.glob(f"{rollout}_*.pt"))
    return _read_ranks(tuple((file.open(other), other.stat().st_size, other.stat().st_mtime_ns) for other in others))


@lru_cache(maxsize=1)
def _read_ranks(stamps: tuple[tuple[File, int, int], ...]) -> list[RankFile]:
    found = []
    for file, *_ in stamps:
        content = file.torch()
        if isinstance(content, dict) and isinstance(data := content.get("rollout_data"), dict):
            rank, size = content.get("cp_rank", 0), content.get("cp_size", 1)
            found.append(RankFile(file.path, rank, size, _identify_samples(data), "log_probs" in data))
    return found


def _identify_samples(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Identify the samples of a rank by their indices or tokens."""
    if data.get("sample_indices") is not None:
        return tuple(int(index) for index in data["sample_indices"])
    return tuple(crc32(np.asarray(to_array(tokens), np.int64).tobytes()) for tokens in data.get("tokens", ()))


def join_responses(file: File, content: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """Join the sliced columns of all ranks. Only the file of rank 0 returns samples."""
    size, own = content["cp_size"], content["cp_rank"]
    samples = _identify_samples(content["rollout_data"])
    alike = [rank for rank in find_ranks(file) if (rank.cp_size, rank.samples, rank.log_probs) == (size, samples, True)]
    by_rank = {rank.cp_rank: rank.path for rank in reversed(alike)} | {own: file.path}
    if not 0 <= own < size:
        raise DataError(f"this file belongs to context-parallel rank {own} of {size}", file=str(file.path))
    if missing := list(islice((str(rank) for rank in range(size) if rank not in by_rank), MAX_NAMED_RANKS)):
        raise DataError(
            f"this file belongs to context-parallel rank {own} of {size}, and the files of rank "
            f"{', '.join(missing)} are missing",
            file=str(file.path),
            remedy=f"copy the files of all ranks of this rollout: {file.path.stem.partition('_')[0]}_*.pt",
        )
    if own != 0:
        return {}
    data = [file.open(by_rank[rank]).torch()["rollout_data"] for rank in range(size)]
    lengths = [int(length) for length in data[0]["response_lengths"]]
    totals = [int(length) for length in data[0]["total_lengths"]]
    padded = data[0].get("max_seq_lens") if content.get("qkv_format") == "bshd" else None
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in SLICED_COLUMNS if name in data[0]}
    for number, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        axis = total if padded is None else int(padded[number])
        places = [find_positions(total, length, axis, rank, size) for rank in range(size)]
        for name, column in columns.items():
            slices = [np.asarray(to_array(rank[name][number])) for rank in data]
            column.append(_join_slices(slices, places, length, name, number, [by_rank[rank] for rank in range(size)]))
    return columns


def check_complete(file: File, row: int, have: int, length: int, remedy: str) -> None:
    """Raise an error for an incomplete response."""
    if have < length:
        problem = f"contains {have} of the {length} tokens of a response, and not which: a context-parallel slice"
        raise DataError(
            problem, file=str(file.path), row=row, remedy=f"{remedy}, or record the run with one context-parallel rank"
        )


def find_positions(total: int, response: int, axis: int, rank: int, size: int) -> NDArray[np.int64]:
    """Return the positions of the response tokens that a rank has."""
    chunk = -(-axis // (2 * size))
    first = total - response - 1  # whose logits are about the response's first token
    owned = [range(max(n * chunk, first), min((n + 1) * chunk, total - 1)) for n in (rank, 2 * size - 1 - rank)]
    return np.concatenate([np.arange(part.start, max(part.stop, part.start)) for part in owned]) - first


def _join_slices(
    slices: list[NDArray[Any]], places: list[NDArray[np.int64]], length: int, name: str, row: int, paths: list[Path]
) -> NDArray[Any]:
    for rank, (part, place) in enumerate(zip(slices, places, strict=True)):
        if len(part) != len(place):
            problem = f"has {len(part)} values where zigzag rank {rank} of {len(places)} has {len(place)}"
            remedy = "only zigzag slices are known: save with one context-parallel rank"
            raise DataError(problem, file=str(paths[rank]), row=row, column=name, remedy=remedy)
    if sum(map(len, places)) != length:
        problem = f"the slices of all ranks contain {sum(map(len, places))} of the response's {length} tokens"
        raise DataError(problem, file=str(paths[0]), row=row, column=name)
    whole = np.empty(length, slices[0].dtype)
    whole[np.concatenate(places)] = np.concatenate(slices)
    return whole


def _read_rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"] if content.get("format_version") == 2 else _read_rank(file, content):
        row = {name: to_array(value) for name, value in sample.items()}
        length = int(row["response_lengths"])
        row["prompt"], row["response_ids"] = np.split(np.asarray(row["tokens"]), [len(row["tokens"]) - length])
        index = row.get("sample_index", row.get("sample_indices"))
        yield {**row, "step": content["rollout_id"], "sequence_id": index}


def _read_rank(file: File, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the samples of one rank. The list is empty if another rank's file contains them.

    The list is also empty for a pipeline stage without log-probs. The first context-parallel rank has all samples.
    """
    data = content["rollout_data"]
    if "log_probs" not in data:
        if any(rank.log_probs for rank in find_ranks(file)):
            return []
        remedy = "let the trainer recompute them"
        problem = "no rank has log_probs of this rollout (--use-rollout-logprobs?)"
        raise DataError(problem, file=str(file.path), column="log_probs", remedy=remedy)
    count = len(data["tokens"])
    columns = {name: value for name, value in data.items() if hasattr(value, "__len__") and len(value) == count}
    columns.pop("raw_reward", None)  # of the whole batch, not of this rank
    if content.get("cp_size", 1) > 1:
        whole = join_responses(file, content)
        if not whole:
            return []
        columns |= whole
    elif "cp_size" not in content:
        for number, (values, length) in enumerate(zip(columns["log_probs"], columns["response_lengths"], strict=True)):
            check_complete(file, number, len(values), int(length), "save with a version that saves cp_rank and cp_size")
    return [{name: value[number] for name, value in columns.items()} for number in range(count)]


LAYOUT = read_layout(
    __file__,
    "slime",
    _read_rows,
    lambda file: file.has_keys("rollout_data", "rollout_id") or file.has_keys("format_version", "samples"),
)


def _read_rollout_rows(file: File) -> Iterator[Row]:
    content = file.torch()
    for sample in content["samples"]:
        mask = [0] * sample["response_length"] if sample.get("remove_sample") else sample.get("loss_mask")
        versions = [str(one) for one in sample.get("weight_versions") or ()]
        yield {
            **take_response(sample["tokens"], sample["response_length"], mask),
            "prompt": sample["tokens"][: len(sample["tokens"]) - sample["response_length"]],
            "truncated": None if "status" not in sample else str(sample["status"]).endswith("truncated"),
            "step": content["rollout_id"],
            "sequence_id": sample["index"],
            "rollout_log_probs": [] if sample["response_length"] == 0 else sample.get("rollout_log_probs"),
            "prompt_id": sample.get("group_index"),
            "rollout_ids": sample.get("rollout_id"),
            "reward": sample.get("reward"),
            "rollout_version": min(map(int, versions)) if versions and all(map(str.isdecimal, versions)) else None,
        }


def take_response(tokens: list[int], length: int, mask: Any) -> Row:
    """Return the columns of the response, without the prompt. Without a mask, all tokens are valid."""
    return {"response_ids": tokens[len(tokens) - length :], "mask": [1] * length if mask is None else mask}


ROLLOUT_LAYOUT = read_layout(
    __file__,
    "slime-rollout",
    _read_rollout_rows,
    lambda file: file.has_keys("rollout_id", "samples") and not file.has_keys("format_version"),
)

VIME_LAYOUTS = replace(LAYOUT, framework="vime"), replace(ROLLOUT_LAYOUT, framework="vime-rollout")
"""Layouts of vime, whose files are equal to slime's."""

ADAPTER = Adapter(
    name="slime",
    versions=list_months("slime"),
    load=lambda version: Slime(find_version("slime", version)),
    recognize=recognize,
    columns=Slime.columns,
    layouts=(LAYOUT, ROLLOUT_LAYOUT, *VIME_LAYOUTS),
)
