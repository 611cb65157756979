"""Write dumps from inside a training loop: one Parquet file per call, one row per sequence.

    with Recorder("dumps/", run="moe-3") as recorder:
        recorder.write(step=3, rollout_log_probs=..., train_log_probs=..., response_mask=..., reward=...)

It runs where the trainer runs, so it needs numpy and pyarrow and nothing else; torch tensors are
recognized by what they can do. The settings are those that decode fastest: required lists of required
elements, byte-stream-split floats, zstd level 1, no dictionary, row groups of 512 sequences.
"""

from __future__ import annotations

import itertools
import operator
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

MAX_TOKENS = 2**31 - 1  # a list column counts its elements in 32 bits

Array = NDArray[Any]


class Recorder:
    """Writes dumps into a folder. Every file appears whole: it gets its name only when it is complete.

    A file is called `step_00003.parquet`, or `step_00003_rank00001.parquet` where `rank` is given; a
    further write of the same step adds `_001`, `_002`, ... Nothing is ever overwritten.
    """

    def __init__(self, folder: str | os.PathLike[str], *, run: str | None = None, rank: int | None = None) -> None:
        self.folder, self.run, self.rank, self._closed = Path(folder), run, rank, False
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further writes. Every earlier one is already on disk."""
        self._closed = True

    def write(
        self, *, step: int, rollout_log_probs: Any, train_log_probs: Any, response_mask: Any = None, **rest: Any
    ) -> Path:
        """Write the B sequences of one call to a file of their own and return its path.

        A per-token column is a list of B one-dimensional arrays, a nested tensor, or a padded array or
        tensor [B, T]. Padding stays in the file, left or right: `response_mask` says what is valid, so
        padded log-probs need one. A per-sequence column is a list or array of B values, or a single value
        for all of them. Per-token floats are stored in 32 bits, in 64 where they come as arrays or tensors
        of such. What does not fit raises a ValueError, and nothing is written.
        """
        if self._closed:
            raise ValueError("the recorder is closed")
        if self.run is not None:
            rest = {"run": self.run, **rest}
        if (step := operator.index(step)) < 0:
            raise ValueError(f"step: {step} is negative")
        per_token = {"rollout_log_probs": rollout_log_probs, "train_log_probs": train_log_probs}
        if response_mask is not None:
            per_token["response_mask"] = response_mask
        elif any(getattr(value, "ndim", 1) == 2 and not _is_nested(value) for value in per_token.values()):
            raise ValueError("response_mask: missing; padded log-probs need one (a list of rows does not)")
        cells = {name: _cells(name, value) for name, value in {"step": step, **rest, **per_token}.items()}
        for name in per_token:
            if not isinstance(cells[name], list):
                raise ValueError(f"{name}: needs one list of values per sequence, got one value")
        lengths = np.array([len(row) for row in cells["rollout_log_probs"]], dtype=np.int64)
        if len(lengths) == 0 or lengths.sum() > MAX_TOKENS:
            raise ValueError(f"rollout_log_probs: {len(lengths)} sequences with {lengths.sum()} tokens")
        arrays = {name: _column(name, value, lengths) for name, value in cells.items()}
        schema = pa.schema([pa.field(name, array.type, nullable=False) for name, array in arrays.items()])
        return self._publish(step, pa.table(list(arrays.values()), schema=schema))

    def _publish(self, step: int, table: pa.Table) -> Path:
        """Write `table` under a temporary name beside its final one, then rename it."""
        floats = [
            field.name if field.type == kind else f"{field.name}.list.element"
            for field in table.schema
            if pa.types.is_floating(kind := getattr(field.type, "value_type", field.type))
        ]
        final, partial, handle = self._reserve(step)
        try:
            with handle:
                pq.write_table(
                    table,
                    handle,
                    row_group_size=512,
                    compression="zstd",
                    compression_level=1,
                    use_dictionary=False,
                    use_byte_stream_split=floats,
                    write_statistics=["step"],
                    write_page_checksum=True,
                )
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return final

    def _reserve(self, step: int) -> tuple[Path, Path, BinaryIO]:
        """Find the next free name of `step`; whoever creates its temporary file, returned open, owns it."""
        stem = f"step_{step:05d}" if self.rank is None else f"step_{step:05d}_rank{self.rank:05d}"
        for earlier in itertools.count():
            final = self.folder / (f"{stem}_{earlier:03d}.parquet" if earlier else f"{stem}.parquet")
            partial = final.with_name(f".{final.name}.tmp")
            try:
                handle = open(partial, "xb")  # noqa: SIM115 (the caller closes it)
            except FileExistsError:
                continue
            if not final.exists():
                break
            handle.close()  # an earlier write, or another process, has the name
            partial.unlink()
        return final, partial, handle


def _is_nested(value: Any) -> bool:
    return bool(getattr(value, "is_nested", False))


def _array(value: Any) -> Array:
    """A numpy array of anything that is like one; narrow floats that Parquet lacks become float32."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, on any device
        value = value.detach().cpu()
        value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    array = np.asarray(value)
    python = isinstance(value, (list, tuple)) and array.dtype == np.float64
    return array.astype(np.float32) if python or array.dtype == np.float16 else array


def _cells(name: str, value: Any) -> Array | list[Array]:
    """One value for all sequences (ndim 0), one per sequence (ndim 1), or a list with one array for each."""
    value = value.unbind() if _is_nested(value) else value
    if isinstance(value, (list, tuple)):
        rows = [_array(row) for row in value]
        if {row.ndim for row in rows} == {0}:
            return np.stack(rows)
    elif (array := _array(value)).ndim < 2:
        return array
    else:
        rows = list(array)
    if wrong := [row.shape for row in rows if row.ndim != 1]:
        raise ValueError(f"{name}: a row must be one value or one-dimensional, got shape {wrong[0]}")
    return rows


def _column(name: str, cells: Array | list[Array], lengths: NDArray[np.int64]) -> pa.Array:
    """A column without nulls; the rows of a per-token one must have these `lengths`."""
    if not isinstance(cells, list) and cells.ndim == 0:
        cells = np.repeat(cells, len(lengths))
    if len(cells) != len(lengths):
        raise ValueError(f"{name}: {len(cells)} rows for {len(lengths)} sequences")
    if not isinstance(cells, list):
        if cells.dtype.kind not in "biufU":
            raise ValueError(f"{name}: needs numbers, booleans or strings without gaps, got {cells.dtype}")
        return pa.array(cells.tolist() if cells.dtype.kind == "U" else np.ascontiguousarray(cells))
    for row, (values, length) in enumerate(zip(cells, lengths, strict=True)):
        if len(values) != length:
            raise ValueError(f"{name}: row {row} has {len(values)} values, rollout_log_probs has {length}")
    filled = [row for row in cells if len(row)]  # an empty list would make integers floats
    empty = np.empty(0, np.int32 if name == "token_ids" else np.float32)
    elements = pa.array(_stored(name, np.concatenate(filled) if filled else empty))
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    kind = pa.list_(pa.field("element", elements.type, nullable=False))
    return pa.ListArray.from_arrays(offsets, elements, type=kind)


def _stored(name: str, values: Array) -> Array:
    """The elements of a per-token column in the type that they have on disk."""
    kind = values.dtype.kind
    if name == "response_mask":
        if kind not in "biuf" or not np.isin(values, (0, 1)).all():
            raise ValueError(f"{name}: needs zeros and ones")
        return values.astype(np.bool_)
    if kind not in ("iu" if name == "token_ids" else "biuf"):
        wanted = "integers" if name == "token_ids" else "numbers"
        raise ValueError(f"{name}: needs {wanted}, got {values.dtype}")
    if kind == "f" or name.endswith("_log_probs"):
        return values.astype(np.float64 if values.dtype == np.float64 else np.float32, copy=False)
    small = kind != "b" and (not len(values) or (values.min() >= -(2**31) and values.max() < 2**31))
    return values.astype(np.int32) if small else values
