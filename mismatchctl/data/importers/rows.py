"""Read rows from files of frameworks: align and mask the lists, and convert them to Arrow columns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mismatchctl.core.schema import REQUIRED_COLUMNS
from mismatchctl.data.importers.pickles import DamagedError, array_from_bytes, load_pickle, load_torch, plain_dtype
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.adapter import FileLayout, Row, to_array
from mismatchctl.frameworks.registry import load_adapters
from mismatchctl.io.files import add_signature, natural_key, open_regular_file
from mismatchctl.io.stores import first_error_line, walk_files
from mismatchctl.io.yaml import decode_utf8, parse_json
from mismatchctl.recorder.recorder import parquet_settings

COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz", ".lz4")


@cache
def all_layouts() -> dict[str, FileLayout]:
    return {layout.framework: layout for shelf in load_adapters() for layout in shelf.layouts}


def framework_layouts(framework: str = "") -> Sequence[FileLayout]:
    if framework and framework not in all_layouts():
        known = ", ".join(all_layouts())
        raise ConfigError(
            f"--from {framework}: unknown framework{suggestion(framework, all_layouts())}; known: {known}"
        )
    return [all_layouts()[framework]] if framework else list(all_layouts().values())


def find_candidates(place: Path, framework: str = "") -> list[Path]:
    """Return the files whose names fit a framework. If the path is a file and `framework` is given, accept any name."""
    patterns = [pattern for layout in framework_layouts(framework) for pattern in layout.patterns]
    is_file = place.is_file()
    paths = sorted([place] if is_file else walk_files(place) if place.is_dir() else (), key=natural_key)
    chosen = is_file and framework
    named = [path for path in paths if chosen or _matches_name(_uncompressed_path(path), patterns)]
    found = [path for path in named if path.suffix not in COMPRESSED_SUFFIXES]
    packed = [path for path in named if path == place or not _uncompressed_path(path).exists()]
    if packed and not found:
        raise DataError("is an archive", file=str(packed[0]), remedy="unpack it")
    return found


def _uncompressed_path(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path


def recognize_layout(path: Path, framework: str = "") -> FileLayout | None:
    """Return the layout of a file, if known. With `framework`, return its layout, or `None` if only another fits."""
    chosen = framework_layouts(framework)[0] if framework else None
    file = OpenFile(path)

    def fits(layout: FileLayout) -> bool:
        return (not layout.keys or file.has_keys(*layout.keys)) and layout.recognizes(file)

    if chosen is not None and fits(chosen):
        return chosen
    found = next((one for one in framework_layouts() if _matches_name(path, one.patterns) and fits(one)), None)
    return found if chosen is None else chosen if found is None else None


def refuse_incomplete(path: Path) -> None:
    """Raise an error if a file looks like a file of a framework, but lacks some required columns."""
    if not any(one.keys and _matches_name(path, one.patterns) for one in framework_layouts()):
        return
    file = OpenFile(path)
    usual = (*REQUIRED_COLUMNS, "response_mask", "token_ids", "advantages")
    names = {
        name: {*one.keys, *(one.columns[column] for column in usual if column in one.columns)}
        for name, one in all_layouts().items()
    }
    alike = {name: sum(map(file.has_keys, names[name])) for name in all_layouts()}
    most, next_one = sorted(alike, key=alike.__getitem__, reverse=True)[:2]
    lacks = [name for name in all_layouts()[most].keys if not file.has_keys(name)]
    if lacks and alike[most] > max(alike[next_one], len(names[most]) / 2):
        problem = f"looks like a file of {most}, but lacks {', '.join(lacks)}"
        remedy = f"save the missing keys, or pass another framework with convert --from: {', '.join(all_layouts())}"
        raise DataError(problem, file=str(path), remedy=remedy)


def is_rollout_only(path: str) -> bool:
    """Return True if a framework saves files with this name without log-probs of the trainer."""
    return any(one.rollout_only and _matches_name(Path(path), one.patterns) for one in all_layouts().values())


def _matches_name(path: Path, patterns: Sequence[str]) -> bool:
    parts = path.absolute().parts
    return any(fnmatch("/".join(parts[-pattern.count("/") - 1 :]), pattern) for pattern in patterns)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with open_regular_file(path) as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                value = parse_json(decode_utf8(line), as_python_writes=True)
            except ValueError as error:
                remedy = "the file was cut off or damaged, so remove this row"
                raise DataError(f"not valid JSON: {error}", file=str(path), row=number, remedy=remedy) from None
            if not isinstance(value, dict):
                remedy = "write one object per line, with the columns of one sequence"
                raise DataError("the line is not a JSON object", file=str(path), row=number, remedy=remedy)
            yield value


@dataclass(frozen=True)
class OpenFile:
    """A file on disk, with the methods that layouts of frameworks use to read it."""

    path: Path

    @property
    def step(self) -> int | None:
        numbers = re.findall(r"\d+", self.path.stem)
        return int(numbers[-1]) if numbers else None

    def open(self, path: Path) -> OpenFile:
        return OpenFile(path)

    def lines(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self.path)

    def torch(self, content: Any = None) -> Any:
        """Load a torch file. A cache avoids a second read, because `recognize_layout` already loads the file."""
        if content is not None:
            return load_torch(self.path, content)
        status = self.path.stat()
        return _load_file(self.path, status.st_size, status.st_mtime_ns)

    def first_line(self) -> Mapping[str, Any]:
        try:
            return next(self.lines(), {})
        except DataError:
            return {}

    def has_keys(self, *names: str) -> bool:
        content = self.torch()
        return isinstance(content, dict) and all(name in content for name in names)

    def batch(self, names: Collection[str]) -> Iterator[Row]:
        content = self.torch()
        if not isinstance(content, dict):
            raise DataError("this file does not contain a dict of tensors", file=str(self.path))
        given = {name: to_array(content[name]) for name in names if name in content}
        columns = {name: value for name, value in given.items() if isinstance(value, (list, tuple)) or np.ndim(value)}
        counts = {len(value) for value in columns.values()}
        if len(counts) > 1:
            listed = ", ".join(f"{name} {len(value)}" for name, value in columns.items())
            raise DataError(f"columns differ in their number of rows: {listed}", file=str(self.path))
        for number in range(max(counts, default=0)):
            yield {"step": self.step, **{name: to_array(value[number]) for name, value in columns.items()}}

    def pickle(self, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
        return load_pickle(self.path, known)

    def array(self, data: Any, dtype: Any, shape: Any) -> Any:
        try:
            return array_from_bytes(data, plain_dtype(dtype), shape)
        except DamagedError as error:
            raise ValueError(str(error)) from error


@lru_cache(maxsize=1)
def _load_file(path: Path, size: int, modified: int) -> Any:
    return load_torch(path)


def _list_type(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_FLOATS, _INTEGERS = _list_type(pa.float32()), _list_type(pa.int64())
COLUMN_TYPES: dict[str, pa.DataType] = {
    "step": pa.int64(), "sequence_id": pa.string(), "rollout_log_probs": _FLOATS, "train_log_probs": _FLOATS,
    "response_mask": _list_type(pa.bool_()), "prompt_id": pa.string(), "token_ids": _INTEGERS,
    "current_log_probs": _FLOATS, "ref_log_probs": _FLOATS, "advantages": _FLOATS, "entropy": _FLOATS,
    "kept_tokens": _INTEGERS, "turn": _INTEGERS, "reward": pa.float64(), "rollout_version": pa.int64(),
    "train_version": pa.int64(), "worker": pa.string(), "truncated": pa.bool_(), "micro_batch": pa.string(),
    "rollout_ids": pa.string(), "reference_log_probs": _list_type(pa.float64()), "reference_version": pa.int64(),
    "prompt_token_ids": _INTEGERS,
}  # fmt: skip
"""Column of a converted file -> its type. Contains all possible columns, in the order in which they are written."""

TOKEN_COLUMNS = tuple(
    name for name, kind in COLUMN_TYPES.items() if pa.types.is_list(kind) and name != "prompt_token_ids"
)
_LOG_PROB_COLUMNS = tuple(name for name in TOKEN_COLUMNS if name.endswith("log_probs"))
NEEDED_COLUMNS = (*REQUIRED_COLUMNS, "response_mask")
"""If a file layout contains these columns, each row of the file must have a value for them."""

DERIVED = {b"derived": b"hash of the prompt"}
"""Metadata that marks a prompt_id column with hashes of prompts, which `convert --join` may replace by real ids."""


def layout_schema(layout: FileLayout) -> pa.Schema:
    """Return the Arrow schema of the imported rows. NEEDED_COLUMNS are never null, and lists do not contain nulls."""
    given = {"step", "sequence_id", *layout.columns}
    if layout.prompt and "token_ids" in layout.columns:
        given |= {"prompt_id", "prompt_token_ids"}
    elif "prompt_token_ids" in layout.columns:
        given.add("prompt_id")
    types = COLUMN_TYPES | {name: _list_type(COLUMN_TYPES[name]) for name in layout.token_versions}
    derived = {} if "prompt_id" in layout.columns else {"prompt_id": DERIVED}
    return pa.schema(
        [
            pa.field(name, types[name], nullable=name not in NEEDED_COLUMNS, metadata=derived.get(name))
            for name in types
            if name in given
        ]
    )


def read_rows(layout: FileLayout, path: Path) -> Iterator[Row]:
    """Yield the rows of a file. Per-token columns contain only the response's tokens, without prompt and padding."""
    try:
        for number, raw in enumerate(layout.rows(OpenFile(path))):
            yield _build_row(layout, path, number, raw)
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", file=str(path)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        problem = f"does not have the layout of {layout.framework}'s files ({first_error_line(error)})"
        remedy = "pass the framework that wrote the file with convert --from"
        raise DataError(problem, file=str(path), remedy=remedy) from error


def _build_row(layout: FileLayout, path: Path, number: int, raw: Row) -> Row:
    def refuse(problem: str, name: str, remedy: str | None = None) -> DataError:
        return DataError(problem, file=str(path), row=number, column=layout.columns.get(name, name), remedy=remedy)

    row: Row = {}
    for name in layout_schema(layout).names:
        value = raw.get(layout.columns.get(name, name))
        if name in _LOG_PROB_COLUMNS and isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            remedy = "save the values as float32, not the bits of bfloat16"
            raise refuse(f"contains {value.dtype} values instead of floats", name, remedy)
        try:
            row[name] = _column_value(name, value, name in layout.token_versions)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise refuse(f"contains a value that is not a number: {error}", name) from error
        if row[name] is None and name in NEEDED_COLUMNS:
            raise refuse(
                "the file does not contain this column",
                name,
                f"files of {layout.framework} must contain it, because mismatchctl reads {name} from it",
            )
    per_token = (*TOKEN_COLUMNS, *layout.token_versions)
    given = {name: row[name] for name in per_token if row.get(name) is not None and row[name].ndim}
    for name in given.keys() & layout.next_token:
        given[name] = np.concatenate([np.zeros(1, given[name].dtype), given[name]])
    if not given.keys() >= {name for name in NEEDED_COLUMNS if name in row}:
        single = next(name for name in NEEDED_COLUMNS if name in row and name not in given)
        raise refuse("expected a list with one number per token, found one number", single)
    length = len(given["rollout_log_probs"])
    if other := next((name for name, values in given.items() if len(values) != length), None):
        lengths = ", ".join(f"{layout.columns[name]} {len(values)}" for name, values in given.items())
        remedy = "save one value per token in each column"
        raise refuse(f"lists differ in length: {lengths}", other, remedy)
    if np.isnan(given["response_mask"]).any():
        raise refuse("the mask contains NaN or null", "response_mask", "save 0 and 1, or false and true")
    odd = (given["response_mask"] != 0) & (given["response_mask"] != 1)
    if odd.any() and not layout.weighted:
        what = f"{given['response_mask'][odd][0]:g}"
        raise refuse(f"a mask must contain only 0 and 1, found {what}", "response_mask", "save 0 and 1")
    given["response_mask"] = mask = given["response_mask"] > 0
    if problem := _find_row_misfit(layout, mask, raw.get("attention_mask")):
        raise refuse(problem, "response_mask", "if another framework wrote the file, pass its name with convert --from")
    window = slice(0, length)
    if layout.prompt or layout.padding != "none":
        inside = np.flatnonzero(mask)
        window = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
    prompt = row.get("prompt_token_ids")
    if layout.prompt and "token_ids" in given and prompt is None:
        prompt = _prompt_tokens(given["token_ids"], mask, raw.get("attention_mask"))
        if "token_ids" not in layout.next_token:  # if it is, the first token is unknown
            row["prompt_token_ids"] = prompt
    if "prompt_id" in row and row["prompt_id"] is None:
        row["prompt_id"] = prompt_hash(prompt)
    row.update({name: values[window] for name, values in given.items()})
    for name in per_token:
        if row.get(name) is not None and name not in given:
            row[name] = np.full(len(row["response_mask"]), row[name])
    row["sequence_id"] = f"{path.stem}:{number}" if row["sequence_id"] is None else row["sequence_id"]
    return row


def _prompt_tokens(tokens: NDArray[np.int64], mask: NDArray[np.bool_], attention: Any) -> NDArray[np.int64] | None:
    if not mask.any():
        return None
    before = tokens[: mask.argmax()]
    is_known = attention is not None and len(attention) == len(tokens)
    return before[np.asarray(attention)[: len(before)] != 0] if is_known else before


def prompt_hash(prompt: Any) -> str | None:
    if prompt is None or (isinstance(prompt, (list, np.ndarray)) and len(prompt) == 0):
        return None
    prompt = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    return hashlib.blake2b(repr(prompt).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _find_row_misfit(layout: FileLayout, mask: NDArray[np.bool_], attention: Any) -> str | None:
    if layout.prompt and len(mask) and mask[0]:
        return "the mask is 1 on the first token of the prompt, which no model predicts"
    if attention is not None and len(attention) == len(mask):
        inside = np.asarray(attention) != 0
        if inside.any() and layout.padding != "none" and not inside[0 if layout.padding == "right" else -1]:
            return f"rows are not padded on the {layout.padding}, as {layout.framework} does"
        if (mask & ~inside).any():
            return "the mask is 1 on padding"
    return None


def _column_value(name: str, value: Any, per_token: bool = False) -> Any:
    if value is None:
        return None
    if name in TOKEN_COLUMNS:
        if _contains_text(value):
            raise ValueError("found text")
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, which readers refuse
            is_whole = pa.types.is_integer(COLUMN_TYPES[name].value_type)
            values = np.asarray(value, np.int64 if is_whole else np.float32)
        if values.ndim > 1:
            raise ValueError(f"a sequence's values have the shape {values.shape}")
        return values
    if name == "prompt_token_ids" or per_token:
        values = np.asarray(value)
        if values.ndim != 1 or values.dtype.kind not in "iub" or _contains_text(value):
            raise ValueError("not a list of whole numbers")
        return values.astype(np.int64)
    if pa.types.is_string(COLUMN_TYPES[name]):
        return str(value.item() if hasattr(value, "item") else value)
    if isinstance(value, (Mapping, list, tuple)) or np.size(value) > 1:
        return None  # a reward with several parts is not a number
    if pa.types.is_floating(COLUMN_TYPES[name]):
        return float(value)
    if pa.types.is_boolean(COLUMN_TYPES[name]):
        return bool(value)
    if int(value) != value:
        raise ValueError(f"{value!r} is not a whole number")
    return int(np.int64(int(value)))  # np.int64 raises an error for numbers outside its range


def _contains_text(value: Any) -> bool:
    """Return True if a value is or contains a string. Otherwise, numpy would convert strings such as "1" to numbers."""
    kind = np.asarray(value).dtype.kind
    return kind in "SU" or (kind == "O" and any(isinstance(one, (str, bytes)) for one in np.ravel(value)))


BATCH_ROWS, BATCH_TOKENS = 512, 1 << 21
"""A batch ends at this number of rows, or earlier at this number of tokens. Each batch becomes a row group."""


def open_parquet_writer(place: Path, schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(place, schema.with_metadata(add_signature(schema.metadata)), **parquet_settings(schema))


def read_raw_batches(path: Path, layout: FileLayout) -> Iterator[pa.RecordBatch]:
    """Read the rows of one file. Leave out columns without any value in the first batch."""
    schema: pa.Schema | None = None
    tokens, most = 0, path.stat().st_size
    for rows in _split_rows(read_rows(layout, path)):
        tokens += sum(len(row["response_mask"]) for row in rows)
        if path.suffix in (".pt", ".pkl") and tokens > most:  # rows may share bytes
            problem = f"contains {tokens:,} tokens in {most:,} bytes, which is only possible if rows share their values"
            raise DataError(problem, file=str(path), remedy="save a copy of the values for each row")
        columns = [pa.array([row[one.name] for row in rows], one.type) for one in layout_schema(layout)]
        batch = pa.RecordBatch.from_arrays(columns, schema=layout_schema(layout))
        if schema is None:
            schema = pa.schema([one for one in batch.schema if batch[one.name].null_count < len(batch)])
        yield fit_schema(batch, schema, path)


def fit_schema(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    for name in batch.schema.names:
        if name not in schema.names and batch[name].null_count < len(batch):
            problem = "this file contains the column, but the files before this one do not"
            raise DataError(problem, file=str(path), column=name, remedy="convert files with this column separately")
    columns = [batch[one.name] if one.name in batch.schema.names else pa.nulls(len(batch), one.type) for one in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _split_rows(rows: Iterator[Row]) -> Iterator[list[Row]]:
    part: list[Row] = []
    tokens = 0
    for row in rows:
        part.append(row)
        tokens += len(row["response_mask"])
        if len(part) == BATCH_ROWS or tokens >= BATCH_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part
