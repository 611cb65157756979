"""Which sequences are worth scoring: all, the worst, or a sample that does not depend on their order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.dumps import DumpFile
from mismatchctl.score.sequences import Piece, pieces


@dataclass(frozen=True)
class Choice:
    """Some of the sequences of a dump.

    Attributes:
        count: how many.
        worst: those whose log ratios sum up to the most, on either side of 0; else a sample by the hash of their ids.
    """

    count: int
    worst: bool


def chosen(files: Sequence[DumpFile], choice: Choice | None) -> list[Bools]:
    """Which rows of each file are chosen; of equal ones, the first.

    Raises:
        DataError: a part cannot be decoded.
    """
    if choice is None:
        return [np.ones(file.rows, np.bool_) for file in files]
    of = _badness if choice.worst else _hashes
    keys = [np.concatenate([of(piece) for piece in pieces(file)] or [np.empty(0)]) for file in files]
    everything = np.concatenate(keys)
    taken = np.zeros(len(everything), np.bool_)
    taken[np.argsort(everything, kind="stable")[: choice.count]] = True
    return np.split(taken, np.cumsum([len(part) for part in keys])[:-1])


def _badness(piece: Piece) -> Float64s:
    segments, x, valid = piece.log_ratios
    return -np.abs(segments.sum(np.where(valid, x, 0.0)))


def _hashes(piece: Piece) -> Float64s:
    """A number of each sequence that follows from its ids; from its row, where it has none."""
    has = piece.batch.schema.names
    named = [piece.batch[name].to_pylist() for name in ("run", "step", "sequence_id") if name in has]
    rows = zip(*named, strict=True) if "sequence_id" in has else _rows(piece)
    return np.array([zlib.crc32(repr(row).encode(errors="backslashreplace")) for row in rows], np.float64)


def _rows(piece: Piece) -> Sequence[tuple[str, int]]:
    return [(piece.file.path, piece.first + row) for row in range(len(piece))]
