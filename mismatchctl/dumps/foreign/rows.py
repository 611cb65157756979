"""Rows of the contract, made from a framework's file as its layout says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.contract import REQUIRED
from mismatchctl.dumps.foreign.file import OpenFile
from mismatchctl.errors import DataError
from mismatchctl.frameworks.layout import FileLayout, Row


def _lists(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


TYPES: dict[str, pa.DataType] = {
    "step": pa.int64(),
    "sequence_id": pa.string(),
    "rollout_log_probs": _lists(pa.float32()),
    "train_log_probs": _lists(pa.float32()),
    "response_mask": _lists(pa.bool_()),
    "prompt_id": pa.string(),
    "token_ids": _lists(pa.int64()),
    "current_log_probs": _lists(pa.float32()),
    "ref_log_probs": _lists(pa.float32()),
    "advantages": _lists(pa.float32()),
    "entropy": _lists(pa.float32()),
    "reward": pa.float64(),
    "rollout_version": pa.int64(),
    "train_version": pa.int64(),
    "worker": pa.string(),
    "micro_batch": pa.string(),
    "rollout_ids": pa.string(),
    "reference_log_probs": _lists(pa.float64()),
    "reference_version": pa.int64(),
    "prompt_token_ids": _lists(pa.int64()),
}
"""Columns that a converted file may have, in their order there."""

PER_TOKEN = tuple(name for name, kind in TYPES.items() if pa.types.is_list(kind) and name != "prompt_token_ids")
_LOG_PROBS = tuple(name for name in PER_TOKEN if name.endswith("log_probs"))
NEEDED = (*REQUIRED, "response_mask")
"""Columns that every row of a source has a value for, where its layout declares them."""


def schema_of(layout: FileLayout) -> pa.Schema:
    """Columns of the rows that `read` gives; lists without nulls, and of those that are needed none is null."""
    names = [name for name in TYPES if name in layout.columns or name in ("step", "sequence_id")]
    return pa.schema([pa.field(name, TYPES[name], nullable=name not in NEEDED) for name in names])


def read_rows(layout: FileLayout, path: Path) -> Iterator[Row]:
    """Rows of the contract, one by one: per-token columns as arrays of one length, prompt and padding cut off.

    Raises:
        DataError: a column is missing, lengths differ, the file cannot be read, or it is not as declared.
    """
    for number, raw in enumerate(_raw(layout, path)):
        yield _row(layout, path, number, raw)


def _raw(layout: FileLayout, path: Path) -> Iterator[Row]:
    try:
        yield from layout.rows(OpenFile(path))
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", file=str(path)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        problem = f"is not laid out as files of {layout.framework} are ({type(error).__name__}: {error})"
        remedy = "name the framework that wrote it with convert --from"
        raise DataError(problem, file=str(path), remedy=remedy) from error


def _row(layout: FileLayout, path: Path, number: int, raw: Row) -> Row:
    def refuse(problem: str, name: str, remedy: str | None = None) -> DataError:
        return DataError(problem, file=str(path), row=number, column=layout.columns.get(name, name), remedy=remedy)

    row: Row = {}
    for name in schema_of(layout).names:
        value = raw.get(layout.columns.get(name, name))
        if name in _LOG_PROBS and isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            remedy = "save them as float32: the bits of bfloat16 are not its values"
            raise refuse(f"holds numbers ({value.dtype}) where floats are needed", name, remedy)
        try:
            row[name] = _value(name, value)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise refuse(f"holds what is no number: {error}", name) from error
        if row[name] is None and name in NEEDED:
            raise refuse("there is no such value", name, f"{layout.framework} needs it for {name}")
    given = {name: row[name] for name in PER_TOKEN if row.get(name) is not None and row[name].ndim}
    for name in given.keys() & layout.next_token:
        given[name] = np.concatenate([np.zeros(1, given[name].dtype), given[name]])
    if not given.keys() >= {name for name in NEEDED if name in row}:
        single = next(name for name in NEEDED if name in row and name not in given)
        raise refuse("holds one number where a list of the sequence's tokens is needed", single)
    length = len(given["rollout_log_probs"])
    if other := next((name for name, values in given.items() if len(values) != length), None):
        lengths = ", ".join(f"{layout.columns[name]} {len(values)}" for name, values in given.items())
        remedy = "save columns of the same tokens"
        raise refuse(f"lists differ in length: {lengths}", other, remedy)
    if np.isnan(given["response_mask"]).any():
        raise refuse("the mask holds NaN or null", "response_mask", "save 0 and 1, or false and true")
    odd = (given["response_mask"] != 0) & (given["response_mask"] != 1)
    if odd.any() and not layout.weighted:
        what = f"{given['response_mask'][odd][0]:g}"
        raise refuse(f"a mask is 0 or 1 (or true or false), and this is {what}", "response_mask", "save 0 and 1")
    given["response_mask"] = mask = given["response_mask"] > 0
    if problem := _misfit(layout, mask, raw.get("attention_mask")):
        raise refuse(problem, "response_mask", "another framework wrote it: name it with convert --from")
    window = slice(0, length)
    if layout.prompt or layout.padding != "none":
        inside = np.flatnonzero(mask)
        window = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
    row.update({name: values[window] for name, values in given.items()})
    for name in PER_TOKEN:
        if row.get(name) is not None and name not in given:
            row[name] = np.full(len(row["response_mask"]), row[name])
    row["sequence_id"] = f"{path.stem}:{number}" if row["sequence_id"] is None else row["sequence_id"]
    return row


def _misfit(layout: FileLayout, mask: NDArray[np.bool_], attention: Any) -> str | None:
    """What of a row is not as declared."""
    if layout.prompt and len(mask) and mask[0]:
        return "the mask is 1 on the first token of the prompt, which no model predicts"
    if attention is not None and len(attention) == len(mask):
        inside = np.asarray(attention) != 0
        if inside.any() and layout.padding != "none" and not inside[0 if layout.padding == "right" else -1]:
            return f"rows are not padded on the {layout.padding}, as {layout.framework} does"
        if (mask & ~inside).any():
            return "the mask is 1 on padding"
    return None


def _value(name: str, value: Any) -> Any:
    """A value as its column holds it: numbers of a list as an array, one number alone as a scalar.

    Raises:
        ArithmeticError, TypeError, ValueError: it is something else.
    """
    if value is None:
        return None
    if name in PER_TOKEN:
        if _holds_text(value):
            raise ValueError("a text")
        with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite, and refused by whoever reads it
            values = np.asarray(value, np.int64 if name == "token_ids" else np.float32)
        if values.ndim > 1:
            raise ValueError(f"a sequence's values have the shape {values.shape}")
        return values
    if pa.types.is_string(TYPES[name]):
        return str(value.item() if hasattr(value, "item") else value)
    if isinstance(value, (Mapping, list, tuple)) or np.size(value) > 1:
        return None  # a reward of several parts is no number
    if pa.types.is_floating(TYPES[name]):
        return float(value)
    if int(value) != value:
        raise ValueError(f"{value!r} is not whole")
    return int(np.int64(int(value)))  # refuses what is beyond it


def _holds_text(value: Any) -> bool:
    """Whether numpy would read a text as the number that it spells."""
    kind = np.asarray(value).dtype.kind
    return kind in "SU" or (kind == "O" and any(isinstance(one, (str, bytes)) for one in np.ravel(value)))
