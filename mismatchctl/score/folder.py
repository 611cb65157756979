"""The folder that scored sequences go to: a file per piece, each whole, each saying what made it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from mismatchctl.batch import Bools, Float64s
from mismatchctl.contract import REFERENCE
from mismatchctl.dumps.foreign.batches import parquet_writer
from mismatchctl.errors import ConfigError
from mismatchctl.files import replaced_when_done
from mismatchctl.footer import check_footer
from mismatchctl.score.sequences import REFERENCE_TOP, Piece

Row = tuple[Float64s, Float64s | None]
"""Log-probs of a sequence's tokens [T], and of the rollout's most likely ones at each place [T, k], if it has them."""
_KEY = b"mismatchctl.score"
_NAME = re.compile(r"\d{5}_\d{5}\.parquet")
_VERSION = "reference_version"
_ENDS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What decides the numbers.

    Attributes:
        model: hash of the checkpoint.
        dtype: of its weights and of the column.
        temperature: by which logits are divided, as the rollout's were.
        version: weight version of the checkpoint, written as `reference_version`; None: none is written.
    """

    model: str
    dtype: Literal["float32", "float64"] = "float32"
    temperature: float = 1.0
    version: int | None = None


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint: its configuration, and the sizes and ends of its weights.

    Raises:
        ConfigError: the folder holds no checkpoint.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not weights:
        kinds = "config.json and *.safetensors"
        raise ConfigError(f"{folder}: holds no checkpoint: name a folder with {kinds}, as save_pretrained writes them")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size} ".encode())
            for start in (0, max(0, size - _ENDS)):
                file.seek(start)
                digest.update(file.read(_ENDS))
    return digest.hexdigest()


class ScoreFolder:
    """Where scored pieces go, and which of them stand there."""

    def __init__(self, place: Path, settings: Settings, *, force: bool = False) -> None:
        """Look at what is there; nothing is written yet.

        Raises:
            ConfigError: something that scoring did not write, whatever `force` says, since a dump is what a folder is.
        """
        self._place, self._settings, self._force = place, settings, force
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place}: is a file; name a folder for the scored sequences")
        other = next((path for path in sorted(place.glob("*")) if not _NAME.fullmatch(path.name)), None)
        if other is not None:
            raise ConfigError(f"{place}: holds {other.name}, which is not of scoring; name an empty folder")

    def tokens(self, piece: Piece, chosen: Bools) -> int | None:
        """Tokens of a piece that have a reference already; None: it is to be scored.

        Raises:
            ConfigError: it was scored with other settings, or from other files.
        """
        path = self._path(piece)
        if self._force or not path.exists():
            return None
        try:
            with pa.OSFile(str(path)) as file:
                check_footer(file)
                metadata = pq.read_schema(file).metadata or {}
        except (OSError, pa.ArrowException):
            metadata = {}
        made, mine = metadata.get(_KEY, b"{}").decode(), self._made(piece, chosen)
        if made != mine:
            anew = "name another folder, or score anew with --force"
            raise ConfigError(f"{path}: was not scored from the same sequences with the same settings; {anew}")
        return int(piece.log_ratios[0].lengths[chosen].sum())

    def write(self, piece: Piece, chosen: Bools, found: Sequence[Row]) -> int:
        """Write a piece with the log-probs of the chosen sequences; how many tokens these have."""
        sampled, top = [values for values, _ in found], [values for _, values in found]
        kind = pa.list_(pa.field("element", pa.type_for_alias(self._settings.dtype), nullable=False))
        lengths = np.zeros(len(piece), np.int64)
        lengths[chosen] = [len(values) for values in sampled]
        values = pa.array(np.concatenate([np.empty(0), *sampled]).astype(self._settings.dtype))
        lists = pa.ListArray.from_arrays(_offsets(lengths), values, type=kind, mask=pa.array(~chosen))
        batch = _with(piece.batch, REFERENCE, lists)
        if any(values is not None for values in top):
            batch = _with(batch, REFERENCE_TOP, _nested(top, chosen, kind))
        if self._settings.version is not None:
            batch = _with(batch, _VERSION, pa.array([self._settings.version] * len(piece), pa.int64()))
        self._place.mkdir(parents=True, exist_ok=True)
        schema = batch.schema.with_metadata({**(batch.schema.metadata or {}), _KEY: self._made(piece, chosen)})
        with replaced_when_done(self._path(piece)) as temporary, parquet_writer(temporary, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(writer.schema.metadata))
        return int(lengths.sum())

    def _path(self, piece: Piece) -> Path:
        return self._place / f"{piece.file.index:05d}_{piece.number:05d}.parquet"

    def _made(self, piece: Piece, chosen: Bools) -> str:
        source = {"file": piece.file.path, "version": piece.file.version, "rows": np.packbits(chosen).tobytes().hex()}
        return json.dumps({**asdict(self._settings), **source}, sort_keys=True)


def _nested(top: Sequence[Float64s | None], chosen: Bools, kind: pa.DataType) -> pa.Array:
    """The lists of each token of the chosen sequences; null of the others, and of those that have none."""
    of_row: list[Float64s | None] = [None] * len(chosen)
    for row, values in zip(np.flatnonzero(chosen).tolist(), top, strict=True):
        of_row[row] = values
    tokens = [0 if values is None else len(values) for values in of_row]
    widths = [values.shape[1] for values in of_row if values is not None for _ in range(len(values))]
    flat = np.concatenate([np.empty(0), *(values.reshape(-1) for values in of_row if values is not None)])
    inner = pa.ListArray.from_arrays(_offsets(widths), pa.array(flat).cast(kind.value_type), type=kind)
    whole = pa.list_(pa.field("element", kind, nullable=False))
    missing = pa.array([values is None for values in of_row])
    return pa.ListArray.from_arrays(_offsets(tokens), inner, type=whole, mask=missing)


def _offsets(lengths: ArrayLike) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _with(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    if name in batch.schema.names:
        batch = batch.drop_columns([name])
    return batch.append_column(pa.field(name, column.type), column)
