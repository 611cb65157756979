"""A third column: tokens scored once more, in high precision, by a local checkpoint, or written for whoever can."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.contract import REFERENCE
from mismatchctl.dumps import DumpFile
from mismatchctl.errors import ConfigError
from mismatchctl.files import replaced_when_done
from mismatchctl.score.folder import Row, ScoreFolder, Settings, fingerprint
from mismatchctl.score.sequences import MASK, PROMPT, RESPONSE, Piece, open_sequences, pieces


@dataclass(frozen=True)
class SequenceChoice:
    """Some of the sequences of a dump.

    Attributes:
        count: how many.
        worst: those whose log ratios sum up to the most, on either side of 0; else a sample by the hash of their ids.
    """

    count: int
    worst: bool


def chosen(files: Sequence[DumpFile], choice: SequenceChoice | None) -> list[Bools]:
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


NAMES = ("run", "step", "sequence_id", PROMPT, RESPONSE, MASK)
"""What a line holds, of what the dump has, beside its file and row."""


def write_replay(place: str, out: Path, *, choice: SequenceChoice | None = None) -> int:
    """Write the sequences of a dump, one line each, in order; how many there are.

    Args:
        place: a dump, one row per sequence, with `prompt_token_ids` and `token_ids`.
        out: the file.
        choice: which sequences; None: all.

    Raises:
        DataError: the dump cannot be read, or has no ids.
    """
    files, written = open_sequences(place), 0
    with replaced_when_done(out) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for file, rows in zip(files, chosen(files, choice), strict=True):
            for piece in pieces(file):
                names = [name for name in NAMES if name in piece.batch.schema.names]
                for row in np.flatnonzero(rows[piece.first : piece.first + len(piece)]).tolist():
                    line = {"file": file.path, "row": piece.first + row}
                    line |= {name: piece.batch[name][row].as_py() for name in names}
                    lines.write(json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n")
                    written += 1
    return written


if TYPE_CHECKING:
    from mismatchctl.score.checkpoint import Checkpoint

__all__ = ["Scored", "SequenceChoice", "Settings", "fingerprint", "score", "write_replay"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scored:
    """What a folder holds now.

    Attributes:
        sequences: with a reference.
        tokens: of their responses.
        kept: sequences of these that an earlier run had scored.
        left_out: sequences without, since they were not chosen.
    """

    sequences: int
    tokens: int
    kept: int
    left_out: int


def score(
    place: str,
    out: Path,
    settings: Settings,
    load: Callable[[], Checkpoint],
    *,
    choice: SequenceChoice | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Scored:
    """Write the sequences of a dump into a folder, with `reference_log_probs`; what stands there already is kept.

    Each file there appears whole, so that an interrupted run is gone on with by the same call.

    Args:
        place: a dump, one row per sequence, with `prompt_token_ids` and `token_ids`.
        out: the folder.
        settings: what decides the numbers.
        load: gives the checkpoint; called once, if there is something to score.
        choice: which sequences; None: all.
        force: score anew what stands in the folder, and what has a reference.
        progress: is told how many sequences are done, of how many.

    Raises:
        DataError: the dump cannot be read, or its tokens cannot be scored.
        ConfigError: the folder holds something else, or what other settings gave.
    """
    if Path(out).resolve().is_relative_to(Path(place).resolve()):
        raise ConfigError(f"{out}: lies in the dump that is read; name a folder beside it")
    files = open_sequences(place, but=() if force else (REFERENCE,))
    wanted = chosen(files, choice)
    total = sum(int(rows.sum()) for rows in wanted)
    folder, checkpoint = ScoreFolder(out, settings, force=force), None
    sequences = tokens = kept = 0
    for file, rows in zip(files, wanted, strict=True):
        for piece in pieces(file):
            mine = rows[piece.first : piece.first + len(piece)]
            done = folder.tokens(piece, mine)
            if done is not None:
                kept += int(mine.sum())
            else:
                found = []
                for row in np.flatnonzero(mine).tolist():
                    checkpoint = checkpoint or load()
                    found.append(_log_probs(checkpoint, piece, row, settings.temperature))
                    if progress is not None:
                        progress(sequences + len(found), total)
                done = folder.write(piece, mine, found)
            sequences, tokens = sequences + int(mine.sum()), tokens + done
            if progress is not None:
                progress(sequences, total)
    return Scored(sequences, tokens, kept, sum(file.rows for file in files) - sequences)


def _log_probs(checkpoint: Checkpoint, piece: Piece, row: int, temperature: float) -> Row:
    tokens, top = piece.tokens(row, checkpoint.vocabulary), piece.top_ids(row, checkpoint.vocabulary)
    try:
        return checkpoint.log_probs(*tokens, temperature, top)
    except ValueError as error:
        raise piece.bad(RESPONSE, row, str(error), "name the checkpoint that sampled these tokens") from error
