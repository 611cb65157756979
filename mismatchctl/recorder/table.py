"""Convert the columns of a training loop to an Arrow table without nulls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

MAX_ELEMENTS = 2**31 - 1  # a list column counts its elements in 32 bits
EXPERT_COLUMNS = ("rollout_experts", "train_experts")
TOP_COLUMNS = ("rollout_top_ids", "rollout_top_log_probs", "train_top_log_probs", "reference_top_log_probs")
NESTED_COLUMNS = EXPERT_COLUMNS + TOP_COLUMNS
"""Columns with a list per token. All lists in a column have the same length."""
MASK_COLUMN = "sampling_mask"
"""vLLM's sampling mask: for each of B sequences, one list of token ids per token."""
PROMPT_COLUMN = "prompt_token_ids"
SIDES = ("rollout_log_probs", "train_log_probs")
"""The two columns of log-probs to compare. A call may record only one of the two columns."""
TOKEN_COLUMNS = ("token_ids", PROMPT_COLUMN, TOP_COLUMNS[0])

Array = NDArray[Any]
Cells = Array | list[Array]
"""One value (ndim 0), one per sequence (ndim 1), padded rows (ndim 2 and more), or a list of rows."""


def build_table(columns: dict[str, Any]) -> pa.Table:
    """Copy the columns of one `write` to a table.

    A sampling mask is stored as the number of tokens at each position.
    """
    cells = {}
    if MASK_COLUMN in columns:
        with _add_name_to_errors(MASK_COLUMN):
            sizes = [[len(ids) for ids in row] for row in columns[MASK_COLUMN]]
        columns = {name: value for name, value in columns.items() if name != MASK_COLUMN} | {"kept_tokens": sizes}
    for name, value in columns.items():
        with _add_name_to_errors(name):
            cells[name] = _to_cells(name, value)
    sides = [name for name in SIDES if name in cells] or list(SIDES)
    reference = "response_mask" if "response_mask" in cells else sides[0]
    for name in dict.fromkeys((*sides, reference)):
        if name not in cells or not _is_per_token(cells[name]):
            found = "single values" if name in cells else "None"
            raise ValueError(f"{name}: needs one list of values per sequence, got {found}")
        if reference != "response_mask" and not isinstance(cells[name], list):
            raise ValueError("response_mask: missing; padded log-probs need a mask (a list of rows does not)")
    responses = Responses.from_mask(reference, cells[reference])
    arrays = {}
    for name, value in cells.items():
        with _add_name_to_errors(name):
            if name == PROMPT_COLUMN:
                arrays[name] = _prompt_array(value, len(responses.widths))
            elif _is_per_token(value):
                arrays[name] = responses.to_lists(name, value)
            else:
                arrays[name] = _scalar_array(value, len(responses.widths))
    fields = [
        pa.field(name, array.type, nullable=False, metadata=_dtype_metadata(columns[name], array.type))
        for name, array in arrays.items()
    ]
    return pa.table(list(arrays.values()), schema=pa.schema(fields))


@dataclass(frozen=True)
class Responses:
    """The stored part of each row. Row i has `widths[i]` positions, and `starts[i]:stops[i]` are stored."""

    reference: str
    widths: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def from_mask(cls, reference: str, rows: Cells) -> Responses:
        """Store each row of a padded mask from its first to its last valid token. Lists of rows are stored whole."""
        widths = np.array([len(row) for row in rows], np.int64)
        if isinstance(rows, list):
            return cls(reference, widths, np.zeros_like(widths), widths)
        # An invalid last position gives rows without valid tokens the length 0.
        valid = np.pad(rows != 0, ((0, 0), (0, 1)))
        starts = valid.argmax(axis=1)
        stops = len(valid[0]) - valid[:, ::-1].argmax(axis=1) if len(valid) else starts
        return cls(reference, widths, starts, np.where(valid.any(axis=1), stops, starts))

    def to_lists(self, name: str, rows: Cells) -> pa.Array:
        if len(rows) != len(self.widths):
            raise ValueError(f"{len(rows)} rows for {len(self.widths)} sequences")
        kept = [self._trim(index, row) for index, row in enumerate(rows)]
        lengths = [len(row) for row in kept]
        kept = [row for row in kept if len(row)]  # an empty list would convert integers to floats
        if name in NESTED_COLUMNS:
            matrix = _nested_values(name, kept)
            inner = _list_array(pa.array(matrix.reshape(-1)), np.full(len(matrix), matrix.shape[1]))
            return _list_array(inner, lengths)
        empty = np.empty(0, np.int32 if name in TOKEN_COLUMNS else np.float32)
        return _list_array(pa.array(_to_storage(name, np.concatenate(kept) if kept else empty)), lengths)

    def _trim(self, index: int, row: Array) -> Array:
        """Return the stored part of a row that may already be trimmed to this part."""
        width, start, stop = self.widths[index], self.starts[index], self.stops[index]
        if len(row) == width:
            return row[start:stop]
        if len(row) == stop - start:
            return row
        alone = "" if stop - start == width else f", of which {stop - start} from the first to the last valid one"
        raise ValueError(f"row {index} has {len(row)} values, {self.reference} has {width}{alone}")


@contextmanager
def _add_name_to_errors(name: str) -> Iterator[None]:
    """Add the column name to an error message."""
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _is_per_token(cells: Cells) -> bool:
    return isinstance(cells, list) or cells.ndim > 1


def _dtype_metadata(value: Any, stored: pa.DataType) -> dict[str, str] | None:
    """Return the original float type, such as bfloat16, as metadata of the column."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    return {"dtype": name} if name and pa.types.is_floating(getattr(stored, "value_type", stored)) else None


def _to_array(value: Any) -> Array:
    """Convert a value to a numpy array. Floats that Parquet does not support become wider floats."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, on any device
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:  # bfloat16 and narrower
            value = value.float().numpy()
    array = np.asarray(value)
    python = isinstance(value, (list, tuple)) and array.dtype == np.float64
    if python or ("float" in array.dtype.name and array.dtype.itemsize < 4):
        return array.astype(np.float32)
    return array


def _to_cells(name: str, value: Any) -> Cells:
    if getattr(value, "is_nested", False):
        value = value.detach().cpu().unbind()
    if not isinstance(value, (list, tuple)):
        array = _to_array(value)
        if array.dtype != object or array.ndim != 1:
            return _check_shape(name, array, array.shape[1:]) if array.ndim > 1 else array
        value = list(array)
    rows = [_to_array(row) for row in value]
    if rows and not any(row.ndim for row in rows):
        values = np.empty(len(rows), object)
        values[:] = [cell if isinstance(cell, str) else row.item() for cell, row in zip(value, rows, strict=True)]
        return values
    return [_check_shape(name, row, row.shape) for row in rows]


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    if len(shape) == 1 or (name in NESTED_COLUMNS and len(shape) > 1):
        return array
    raise ValueError(f"a row must be one value or one-dimensional, got shape {shape}")


def _scalar_array(values: Cells, count: int) -> pa.Array:
    values = np.array(values)
    values = values if values.ndim else np.repeat(values, count)
    if len(values) != count:
        raise ValueError(f"{len(values)} rows for {count} sequences")
    wanted = "needs numbers, booleans or strings, all of one type and none missing"
    try:
        array = pa.array(values.tolist() if values.dtype.kind in "OU" else values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"{wanted} ({error})") from None
    kind = array.type
    fits = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if array.null_count or not (fits or pa.types.is_string(kind)):
        raise ValueError(f"{wanted}, got {'gaps' if array.null_count else kind}")
    return array


def _list_array(values: pa.Array, lengths: ArrayLike) -> pa.Array:
    if len(values) > MAX_ELEMENTS:
        raise ValueError(f"{len(values):,} values in one call; at most {MAX_ELEMENTS:,} are allowed")
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(pa.field("element", values.type, nullable=False)))


def _prompt_array(rows: Cells, count: int) -> pa.Array:
    if not isinstance(rows, list):
        raise ValueError("needs a list of B rows without padding, as in [row[row_mask] for ...]")
    if len(rows) != count:
        raise ValueError(f"{len(rows)} rows for {count} sequences")
    kept = [row for row in rows if len(row)]
    ids = _to_storage(PROMPT_COLUMN, np.concatenate(kept) if kept else np.empty(0, np.int32))
    return _list_array(pa.array(ids), [len(row) for row in rows])


def _nested_values(name: str, rows: list[Array]) -> Array:
    """Return the values of the tokens of all rows [N, layers * k]."""
    matrices = [row.reshape(len(row), -1) for row in rows] or [np.empty((0, 1), np.int16)]
    what = "numbers" if name.endswith("_log_probs") else "integers"
    kinds = "iuf" if what == "numbers" else "iu"
    if len({matrix.shape[1] for matrix in matrices}) > 1 or any(one.dtype.kind not in kinds for one in matrices):
        raise ValueError(f"needs the same number of {what} for each token")
    values = np.concatenate(matrices)
    if name in TOP_COLUMNS:
        return _to_storage(name, values)
    if values.size and not -(2**15) <= values.min() <= values.max() < 2**15:
        raise ValueError(f"needs ids of experts, got {values.max()}")
    return values.astype(np.int16)


def _to_storage(name: str, values: Array) -> Array:
    kind = values.dtype.kind
    if name == "response_mask":
        if kind not in "biuf" or not np.isin(values, (0, 1)).all():
            raise ValueError("needs zeros and ones")
        return values.astype(np.bool_)
    if kind not in ("iu" if name in TOKEN_COLUMNS else "biuf"):
        wanted = "integers" if name in TOKEN_COLUMNS else "numbers"
        raise ValueError(f"needs {wanted}, got {values.dtype}")
    if kind == "f" or name.endswith("_log_probs"):
        return values.astype(np.float64 if values.dtype.itemsize > 4 and kind == "f" else np.float32, copy=False)
    small = kind != "b" and (not len(values) or (values.min() >= -(2**31) and values.max() < 2**31))
    return values.astype(np.int32) if small else values
