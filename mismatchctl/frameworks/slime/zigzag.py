"""Context-parallel slices of slime and Miles put together again.

The axis of prompt and response is cut into 2 * cp_size chunks; rank r has chunk r and chunk 2 * cp_size - 1 - r.
Logits are about the token after their position, so a rank has the log-probs of the tokens that follow its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import File, array

SLICED = ("rollout_log_probs", "log_probs", "ref_log_probs", "advantages", "returns", "values", "entropy", "kl")
"""Columns of which every rank has its slices only; the others are whole."""
NAMED = 8
"""Missing ranks that an error names: a damaged file may say that there are any number."""


@dataclass(frozen=True)
class Rank:
    """What one rank's file holds: its context-parallel rank, of how many, of which samples (by index or tokens)."""

    path: Path
    cp_rank: int
    cp_size: int
    samples: tuple[int, ...]
    log_probs: bool


def ranks(file: File) -> list[Rank]:
    """The files of all ranks that lie beside a file, of its rollout."""
    rollout = file.path.stem.partition("_")[0]
    others = sorted(file.path.parent.glob(f"{rollout}_*.pt"))
    return _ranks(tuple((file.at(other), other.stat().st_size, other.stat().st_mtime_ns) for other in others))


@lru_cache(maxsize=1)
def _ranks(stamps: tuple[tuple[File, int, int], ...]) -> list[Rank]:
    found = []
    for file, *_ in stamps:
        content = file.torch()
        if isinstance(content, dict) and isinstance(data := content.get("rollout_data"), dict):
            rank, size = content.get("cp_rank", 0), content.get("cp_size", 1)
            found.append(Rank(file.path, rank, size, _samples(data), "log_probs" in data))
    return found


def _samples(data: Mapping[str, Any]) -> tuple[int, ...]:
    """What tells the samples of a rank from those of others: their indices, else their tokens."""
    if data.get("sample_indices") is not None:
        return tuple(int(index) for index in data["sample_indices"])
    return tuple(crc32(np.asarray(array(tokens), np.int64).tobytes()) for tokens in data.get("tokens", ()))


def responses(file: File, content: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """The sliced columns of a file's samples, whole; none where another rank's file gives them: that of rank 0.

    Raises:
        DataError: the file of a rank is missing, or its slices are not what the rule says.
    """
    size, own = content["cp_size"], content["cp_rank"]
    samples = _samples(content["rollout_data"])
    alike = [rank for rank in ranks(file) if (rank.cp_size, rank.samples, rank.log_probs) == (size, samples, True)]
    by_rank = {rank.cp_rank: rank.path for rank in reversed(alike)} | {own: file.path}
    if not 0 <= own < size:
        raise DataError(f"says that it is context-parallel rank {own} of {size}", file=str(file.path))
    if missing := list(islice((str(rank) for rank in range(size) if rank not in by_rank), NAMED)):
        raise DataError(
            f"is context-parallel rank {own} of {size}, and rank {', '.join(missing)} of the same samples is missing",
            file=str(file.path),
            remedy=f"copy the files of all ranks of this rollout: {file.path.stem.partition('_')[0]}_*.pt",
        )
    if own != 0:
        return {}
    data = [file.at(by_rank[rank]).torch()["rollout_data"] for rank in range(size)]
    lengths = [int(length) for length in data[0]["response_lengths"]]
    totals = [int(length) for length in data[0]["total_lengths"]]
    padded = data[0].get("max_seq_lens") if content.get("qkv_format") == "bshd" else None
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in SLICED if name in data[0]}
    for number, (total, length) in enumerate(zip(totals, lengths, strict=True)):
        axis = total if padded is None else int(padded[number])
        places = [positions(total, length, axis, rank, size) for rank in range(size)]
        for name, column in columns.items():
            slices = [np.asarray(array(rank[name][number])) for rank in data]
            column.append(_joined(slices, places, length, name, number, [by_rank[rank] for rank in range(size)]))
    return columns


def check_whole(file: File, row: int, have: int, length: int, remedy: str) -> None:
    """Refuse a slice of a response in a file that does not say which one it is.

    Raises:
        DataError: there are fewer values than tokens.
    """
    if have < length:
        problem = f"holds {have} of the {length} tokens of a response, and not which: a context-parallel slice"
        raise DataError(problem, file=str(file.path), row=row, remedy=f"{remedy}, or with one context-parallel rank")


def positions(total: int, response: int, axis: int, rank: int, size: int) -> NDArray[np.int64]:
    """Which tokens of a response a rank has, in its order.

    Args:
        total: tokens of prompt and response.
        response: tokens of the response.
        axis: what is cut into chunks: `total`, or the width of the padded batch.
        rank: the context-parallel rank.
        size: how many there are.
    """
    chunk = -(-axis // (2 * size))
    first = total - response - 1  # whose logits are about the response's first token
    owned = [range(max(n * chunk, first), min((n + 1) * chunk, total - 1)) for n in (rank, 2 * size - 1 - rank)]
    return np.concatenate([np.arange(part.start, max(part.stop, part.start)) for part in owned]) - first


def _joined(
    slices: list[NDArray[Any]], places: list[NDArray[np.int64]], length: int, name: str, row: int, paths: list[Path]
) -> NDArray[Any]:
    for rank, (part, place) in enumerate(zip(slices, places, strict=True)):
        if len(part) != len(place):
            problem = f"has {len(part)} values where zigzag rank {rank} of {len(places)} has {len(place)}"
            remedy = "only zigzag slices are known: save with one context-parallel rank"
            raise DataError(problem, file=str(paths[rank]), row=row, column=name, remedy=remedy)
    if sum(map(len, places)) != length:
        problem = f"the slices of all ranks hold {sum(map(len, places))} of the response's {length} tokens"
        raise DataError(problem, file=str(paths[0]), row=row, column=name)
    whole = np.empty(length, slices[0].dtype)
    whole[np.concatenate(places)] = np.concatenate(slices)
    return whole
