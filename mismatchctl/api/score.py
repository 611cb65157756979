"""Recompute the log-probs of a dump with a checkpoint, and store them as `reference_log_probs`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments
from mismatchctl.core.schema import REFERENCE_COLUMN
from mismatchctl.data.blocks import MASK_COLUMN, TOKEN_IDS_COLUMN
from mismatchctl.data.catalog import DumpFile
from mismatchctl.data.conversion import open_parquet_dump, read_parquet_batches
from mismatchctl.data.formats import ListColumn, to_numpy
from mismatchctl.data.importers.rows import open_parquet_writer
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.io.files import atomic_output
from mismatchctl.io.parquet_footer import check_footer

if TYPE_CHECKING:
    from mismatchctl.api.checkpoint import Checkpoint

PROMPT_COLUMN, RESPONSE_COLUMN = "prompt_token_ids", TOKEN_IDS_COLUMN
ROWS_PER_PIECE = 128
"""Number of sequences that are scored and then written together. An interruption loses at most this number."""
_REMEDIES = {
    PROMPT_COLUMN: "record the prompt's tokens, or take them from another file with `mismatchctl convert --join`",
    RESPONSE_COLUMN: "record the sampled tokens, or take them from another file with `mismatchctl convert --join`",
    REFERENCE_COLUMN: "add --force to replace the column",
}


@dataclass(frozen=True)
class SequencePiece:
    """Up to ROWS_PER_PIECE consecutive sequences of a file."""

    file: DumpFile
    number: int  # index of the piece in the file, from 0
    first: int  # row of its first sequence in the file
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.batch)

    def tokens(self, row: int, vocabulary: int) -> tuple[Ints, Ints]:
        """Return the token ids of the prompt and of the response. An id of `vocabulary` or more is an error."""
        prompt, response = self._ids(PROMPT_COLUMN, row, vocabulary), self._ids(RESPONSE_COLUMN, row, vocabulary)
        if not len(prompt):
            raise self.make_error(PROMPT_COLUMN, row, "is empty, so the first token cannot be scored", _BOS_REMEDY)
        expected = int(self.log_ratios[0].lengths[row])
        if len(response) != expected:
            problem = f"has {len(response)} token ids, but the sequence has {expected} log-probs"
            raise self.make_error(RESPONSE_COLUMN, row, problem, "correct the dump")
        return prompt, response

    def _ids(self, column: str, row: int, vocabulary: int) -> Ints:
        values = self.batch[column][row].values
        if values is None:
            raise self.make_error(column, row, "is null", "correct the dump")
        ids: Ints = to_numpy(values).astype(np.int64, copy=False)
        unknown = ids[(ids < 0) | (ids >= vocabulary)]
        if len(unknown):
            problem = f"has the id {unknown[0]}, but the model has only {vocabulary:,} ids"
            raise self.make_error(column, row, problem, _CHECKPOINT_REMEDY)
        return ids

    def make_error(self, column: str, row: int, problem: str, remedy: str) -> DataError:
        return DataError(problem, file=self.file.path, row=self.first + row, column=column, remedy=remedy)

    @cached_property
    def log_ratios(self) -> tuple[Segments, Float64s, Bools]:
        """Return the token range of each sequence, the log ratio of each token [T], and a mask of valid tokens [T]."""
        train, rollout = (self.batch[name] for name in ("train_log_probs", "rollout_log_probs"))
        segments = Segments.from_lengths(ListColumn.of(rollout).lengths)
        x = to_numpy(train.flatten()).astype(np.float64) - to_numpy(rollout.flatten()).astype(np.float64)
        if MASK_COLUMN not in self.batch.schema.names:
            return segments, x, np.ones(len(x), np.bool_)
        return segments, x, self.batch[MASK_COLUMN].flatten().cast(pa.int8()).to_numpy() == 1


_CHECKPOINT_REMEDY = "pass the checkpoint that sampled these tokens"
_BOS_REMEDY = "record the token with which every text begins (BOS) as the prompt's first token"


def open_scorable_files(place: str, *, without: Sequence[str] = ()) -> Sequence[DumpFile]:
    """Open the files of a dump for scoring. Raise an error if they lack token ids or contain a column in `without`."""
    files = open_parquet_dump(place).files
    for file in files:
        if file.layout == "long":
            raise DataError("this dump has one row per token, but scoring needs one row per sequence", file=file.path)
        for column in (PROMPT_COLUMN, RESPONSE_COLUMN):
            if column not in file.columns:
                raise DataError("the dump lacks this column", file=file.path, column=column, remedy=_REMEDIES[column])
        for column in without:
            if column in file.columns:
                raise DataError("the column already exists", file=file.path, column=column, remedy=_REMEDIES[column])
    return files


def read_pieces(file: DumpFile) -> Iterator[SequencePiece]:
    first = 0
    for number, batch in enumerate(read_parquet_batches(file, ROWS_PER_PIECE)):
        yield SequencePiece(file, number, first, batch)
        first += len(batch)


_METADATA_KEY = b"mismatchctl.score"
_FILE_PATTERN = re.compile(r"\d{5}_\d{5}\.parquet")
_VERSION_COLUMN = "reference_version"
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True)
class ScoreSettings:
    """The checkpoint and the settings that determine its log-probs."""

    model: str  # hash of the checkpoint
    dtype: Literal["float32", "float64"] = "float32"  # of the model's weights and of `reference_log_probs`
    temperature: float = 1.0  # the rollout's temperature, which divides the logits
    version: int | None = None  # version of the weights, written to the column `reference_version`


def hash_checkpoint(folder: Path) -> str:
    """Return a hash of config.json, and of the name, size, first MiB and last MiB of each weight file."""
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        kinds = "config.json and *.safetensors"
        raise ConfigError(
            f"{folder}: this folder is not a checkpoint; pass a folder that save_pretrained wrote, with {kinds}"
        )
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size} ".encode())
            for start in (0, max(0, size - _HASHED_BYTES)):
                file.seek(start)
                digest.update(file.read(_HASHED_BYTES))
    return digest.hexdigest()


class ScoreFolder:
    """The output folder with the scored pieces of a dump."""

    def __init__(self, place: Path, settings: ScoreSettings, *, force: bool = False) -> None:
        """Check the output folder without creating it. The folder must not contain files that `score` did not write."""
        self._place, self._settings, self._force = place, settings, force
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place}: this is a file; choose a folder for the scored sequences")
        other = next((path for path in sorted(place.glob("*")) if not _FILE_PATTERN.fullmatch(path.name)), None)
        if other is not None:
            raise ConfigError(f"{place}: contains {other.name}, which `score` did not write; choose an empty folder")

    def count_scored(self, piece: SequencePiece, chosen: Bools) -> int | None:
        path = self._path(piece)
        if self._force or not path.exists():
            return None
        try:
            with pa.OSFile(str(path)) as file:
                check_footer(file)
                metadata = pq.read_schema(file).metadata or {}
        except (OSError, pa.ArrowException):
            metadata = {}
        made, mine = metadata.get(_METADATA_KEY, b"{}").decode(), self._settings_json(piece, chosen)
        if made != mine:
            remedy = "choose another folder, or score again with --force"
            raise ConfigError(
                f"{path}: an earlier call of score with other sequences or settings wrote this file; {remedy}"
            )
        return int(piece.log_ratios[0].lengths[chosen].sum())

    def write(self, piece: SequencePiece, chosen: Bools, found: Sequence[Float64s]) -> int:
        """Write a piece and the log-probs `found` of its `chosen` sequences. Return the number of scored tokens."""
        kind = pa.list_(pa.field("element", pa.type_for_alias(self._settings.dtype), nullable=False))
        lengths = np.zeros(len(piece), np.int64)
        lengths[chosen] = [len(values) for values in found]
        values = pa.array(np.concatenate([np.empty(0), *found]).astype(self._settings.dtype))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        lists = pa.ListArray.from_arrays(offsets, values, type=kind, mask=pa.array(~chosen))
        batch = _set_column(piece.batch, REFERENCE_COLUMN, lists)
        if self._settings.version is not None:
            batch = _set_column(batch, _VERSION_COLUMN, pa.array([self._settings.version] * len(piece), pa.int64()))
        self._place.mkdir(parents=True, exist_ok=True)
        metadata = {**(batch.schema.metadata or {}), _METADATA_KEY: self._settings_json(piece, chosen)}
        schema = batch.schema.with_metadata(metadata)
        with atomic_output(self._path(piece)) as temporary, open_parquet_writer(temporary, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(writer.schema.metadata))
        return int(lengths.sum())

    def _path(self, piece: SequencePiece) -> Path:
        return self._place / f"{piece.file.index:05d}_{piece.number:05d}.parquet"

    def _settings_json(self, piece: SequencePiece, chosen: Bools) -> str:
        source = {"file": piece.file.path, "version": piece.file.version, "rows": np.packbits(chosen).tobytes().hex()}
        return json.dumps({**asdict(self._settings), **source}, sort_keys=True)


def _set_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    if name in batch.schema.names:
        batch = batch.drop_columns([name])
    return batch.append_column(pa.field(name, column.type), column)


@dataclass(frozen=True)
class SequenceChoice:
    """Choice of the sequences to score: the worst sequences, or random sequences."""

    count: int  # number of sequences
    worst: bool  # True: the sequences whose summed log ratio is furthest from 0. False: random sequences


def select_rows(files: Sequence[DumpFile], choice: SequenceChoice | None) -> list[Bools]:
    """For each file, return a mask of the rows to score. Without a `choice`, all rows are scored."""
    if choice is None:
        return [np.ones(file.rows, np.bool_) for file in files]
    parts = [[_sort_keys(piece, choice) for piece in read_pieces(file)] for file in files]
    keys = [np.concatenate([np.empty(0), *part]) for part in parts]
    everything = np.concatenate(keys)
    flags = np.zeros(len(everything), np.bool_)
    flags[np.argsort(everything, kind="stable")[: choice.count]] = True
    return np.split(flags, np.cumsum([len(part) for part in keys])[:-1])


def _sort_keys(piece: SequencePiece, choice: SequenceChoice) -> Float64s:
    """Return one key per sequence. `select_rows` chooses the sequences with the smallest keys."""
    if choice.worst:
        segments, x, valid = piece.log_ratios
        return -np.abs(segments.sum(np.where(valid, x, 0.0)))
    has = piece.batch.schema.names
    named = [piece.batch[name].to_pylist() for name in ("run", "step", "sequence_id") if name in has]
    places = ((piece.file.path, piece.first + row) for row in range(len(piece)))
    rows = zip(*named, strict=True) if "sequence_id" in has else places
    return np.array([zlib.crc32(repr(row).encode(errors="backslashreplace")) for row in rows], np.float64)


REPLAY_COLUMNS = ("run", "step", "sequence_id", PROMPT_COLUMN, RESPONSE_COLUMN, MASK_COLUMN)
"""Columns that `write_replay` copies from the dump if they exist. It also writes the file and row."""


def write_replay(place: str, out: Path, *, choice: SequenceChoice | None = None) -> int:
    """Write the chosen sequences as JSON lines in dump order, to score them elsewhere. Return their number."""
    files, written = open_scorable_files(place), 0
    with atomic_output(out) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for file, rows in zip(files, select_rows(files, choice), strict=True):
            for piece in read_pieces(file):
                names = [name for name in REPLAY_COLUMNS if name in piece.batch.schema.names]
                for row in np.flatnonzero(rows[piece.first : piece.first + len(piece)]).tolist():
                    line = {"file": file.path, "row": piece.first + row}
                    line |= {name: piece.batch[name][row].as_py() for name in names}
                    lines.write(json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n")
                    written += 1
    return written


@dataclass(frozen=True)
class ScoreSummary:
    """Numbers of sequences and tokens that have reference log-probs after a call of `score`."""

    sequences: int
    tokens: int
    kept: int  # number of these sequences that an earlier call had scored
    left_out: int  # sequences of the dump that `choice` does not include


def score(
    place: str,
    out: Path,
    settings: ScoreSettings,
    load: Callable[[], Checkpoint],
    *,
    choice: SequenceChoice | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreSummary:
    """Write a copy of a dump with the column `reference_log_probs` to a folder.

    Each piece is written completely or not at all. To continue after an interruption, repeat the same call. With
    `force`, pieces that an earlier call wrote are scored again.
    """
    if Path(out).resolve().is_relative_to(Path(place).resolve()):
        raise ConfigError(f"{out}: this folder is inside the input dump; choose another folder")
    files = open_scorable_files(place, without=() if force else (REFERENCE_COLUMN,))
    wanted = select_rows(files, choice)
    total = sum(int(rows.sum()) for rows in wanted)
    folder, checkpoint = ScoreFolder(out, settings, force=force), None
    sequences = tokens = kept = 0
    for file, rows in zip(files, wanted, strict=True):
        for piece in read_pieces(file):
            mine = rows[piece.first : piece.first + len(piece)]
            done = folder.count_scored(piece, mine)
            if done is not None:
                kept += int(mine.sum())
            else:
                found = []
                for row in np.flatnonzero(mine).tolist():
                    checkpoint = checkpoint or load()
                    found.append(_score_row(checkpoint, piece, row, settings.temperature))
                    if progress is not None:
                        progress(sequences + len(found), total)
                done = folder.write(piece, mine, found)
            sequences, tokens = sequences + int(mine.sum()), tokens + done
            if progress is not None:
                progress(sequences, total)
    return ScoreSummary(sequences, tokens, kept, sum(file.rows for file in files) - sequences)


def _score_row(checkpoint: Checkpoint, piece: SequencePiece, row: int, temperature: float) -> Float64s:
    try:
        return checkpoint.log_probs(*piece.tokens(row, checkpoint.vocabulary), temperature)
    except ValueError as error:
        raise piece.make_error(RESPONSE_COLUMN, row, str(error), _CHECKPOINT_REMEDY) from error
