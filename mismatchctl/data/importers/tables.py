"""Read dumps in common formats, and responses of inference engines, without executing code from the files."""

from __future__ import annotations

import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mismatchctl.core.formatting import format_command
from mismatchctl.core.schema import COLUMNS_BY_NAME, REQUIRED_COLUMNS
from mismatchctl.data.formats import VALUE_KINDS, classify, is_list, list_columns, make_array, with_names_in_file
from mismatchctl.data.importers.pickles import load_pickle, load_torch
from mismatchctl.data.importers.rows import prompt_hash, read_json_lines
from mismatchctl.errors import DataError
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.files import (
    is_baseline,
    is_own_output,
    natural_key,
    read_first_bytes,
    read_regular_file,
    require_regular_file,
)
from mismatchctl.io.stores import first_error_line, walk_files
from mismatchctl.io.yaml import TextError, decode_utf8, parse_json

MOST_BYTES = 1 << 34
_EXPANSION, _SMALL = 64, 1 << 28  # A compressed archive may expand to its own size times _EXPANSION, plus _SMALL bytes
_FIRST = 1 << 22  # A JSONL file is recognized by its first record, which must end within this number of bytes
_DEPTH = 3  # maximum number of dimensions of a column: sequences, tokens, and values per token
_TOKEN_IDS = ("responses", "response_ids", "completion_ids", "output_ids")
"""Names of columns that contain token ids in some files, and text in other files."""
_PROMPTS = ("prompt_token_ids", "prompt_ids", "prompt")
"""Columns with the prompt as token ids or text. If a file has no prompt ids, hashes of the prompts are used instead."""

JSON_LINES = (".jsonl", ".ndjson")


def is_table(path: Path) -> bool:
    return path.suffix.lower() in READERS


def table_files(place: Path) -> list[Path]:
    """Return the tables at a path. In a folder, these are the files with the most common suffix, in natural order."""
    if place.is_file():
        return [place] if is_table(place) else []
    found = [path for path in walk_files(place) if is_table(path)]
    counts = Counter(path.suffix.lower() for path in found)
    if not counts:
        return []
    most = max(counts, key=lambda suffix: (counts[suffix], -list(READERS).index(suffix)))
    return sorted((path for path in found if path.suffix.lower() == most), key=natural_key)


def read_table(path: Path) -> pa.Table:
    import polars as pl

    try:
        require_regular_file(path)
        if path.stat().st_size > MOST_BYTES:
            raise DataError(
                f"this file is larger than {MOST_BYTES >> 30} GB",
                file=str(path),
                remedy="split the file, or write Parquet",
            )
        if path.stat().st_size == 0:
            raise DataError("this file is empty (0 bytes)", file=str(path), remedy="write the file again")
        return with_prompt_ids(_with_token_ids(with_names_in_file(READERS[path.suffix.lower()](path))))
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", file=str(path)) from error
    except pl.exceptions.PanicException as error:  # a BaseException that damaged files can cause
        raise DataError(
            f"cannot be read ({first_error_line(error)})", file=str(path), remedy="write the file again"
        ) from None


def as_dump(table: pa.Table, path: Path) -> pa.Table:
    """Raise an error if a table cannot be a dump. Convert float64 columns to float32 if this changes no value."""
    kinds = dict(zip(table.schema.names, table.schema.types, strict=True))
    if PROMPT_LOG_PROBS in kinds or is_engine_file(path):
        remedy = f"also pass the trainer's file: --rollout {path.name} --train TRAINER_FILE --on id"
        raise DataError(
            "this file contains responses of an engine, which only have the rollout's log-probs",
            file=str(path),
            remedy=remedy,
        )
    types, elements = pa.types, [kind.value_type for kind in kinds.values() if is_list(kind)]
    whole = any(types.is_null(kind) or types.is_integer(kind) for kind in elements)
    if not whole and not any(map(types.is_floating, (*elements, *kinds.values()))):
        if path.suffix == ".json" and (is_own_output(path) or is_baseline(path)):
            remedy = f"show it with {format_command('report', [str(path)])}"
            raise DataError("this file is a saved Result, which contains no tokens", file=str(path), remedy=remedy)
        raise DataError(
            f"this file contains no log-probs. The columns are {list_columns(table.schema)}",
            file=str(path),
            remedy="write rollout_log_probs and train_log_probs, one list per sequence (docs/guides/files.md)",
        )
    return _narrow(table)


def _narrow(table: pa.Table) -> pa.Table:
    for index, one in enumerate(table.schema):
        listed = is_list(one.type)
        if (one.type.value_type if listed else one.type) != pa.float64():
            continue
        column = table[one.name].combine_chunks()
        values = (column.flatten() if listed else column).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore", invalid="ignore"):
            if np.array_equal(values, values.astype(np.float32).astype(np.float64), equal_nan=True):
                kind = pa.list_(pa.float32()) if listed else pa.float32()
                table = table.set_column(index, one.name, column.cast(kind))
    return table


def is_engine_file(path: Path) -> bool:
    if path.suffix.lower() not in (*JSON_LINES, ".json"):
        return False
    record = first_record(path)
    return record is not None and is_response(record)


def first_record(path: Path) -> Mapping[str, Any] | None:
    try:
        if path.suffix.lower() in JSON_LINES:
            lines = (line for line in read_first_bytes(path, _FIRST).splitlines() if line.strip())
            found = parse_json(decode_utf8(next(lines, b"null")), as_python_writes=True)
        else:
            found = _parse(path)
    except (OSError, TextError, DataError):
        return None
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, Mapping) else None


def _read_lines(path: Path) -> pa.Table:
    import polars as pl

    record = first_record(path)
    if record is not None and is_response(record):
        return _from_records(read_responses(read_json_lines(path), path), path)
    try:
        frame = pl.read_ndjson(path, infer_schema_length=None)
    except pl.exceptions.PolarsError:  # polars rejects NaN, and its errors do not name the line
        return _from_records(list(read_json_lines(path)), path)
    return _from_frame(frame)


def _parse(path: Path) -> Any:
    try:
        return parse_json(decode_utf8(read_regular_file(path, MOST_BYTES)), as_python_writes=True)
    except TextError as error:
        raise DataError(f"not valid JSON: {error}", file=str(path), remedy="write the file again") from None


def _read_csv(path: Path) -> pa.Table:
    import polars as pl

    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    read = partial(pl.read_csv, path, separator=separator, infer_schema_length=None)
    try:
        try:
            frame = read()
        except pl.exceptions.ComputeError:  # integers above 128 bits may be the cause
            plain = read(infer_schema=False)
            large = [name for name in plain.columns if plain[name].str.contains(r"^\s*-?\d{38,}\s*$").any()]
            frame = read(schema_overrides=dict.fromkeys(large, pl.String))
    except pl.exceptions.PolarsError as error:
        problem = f"is not a valid CSV table ({first_error_line(error)})"
        raise DataError(
            problem, file=str(path), remedy="write one header line and the same columns in each row"
        ) from None
    for name, kind in frame.schema.items():
        texts = frame[name] if kind == pl.String else ()
        if next((text for text in texts if text is not None and text.strip()), "").lstrip().startswith("["):
            frame = frame.with_columns(_lists_from_text(frame[name], path))
    return _from_frame(frame)


def _lists_from_text(column: Any, path: Path) -> Any:
    import polars as pl

    try:
        return column.str.json_decode(infer_schema_length=None)
    except pl.exceptions.PolarsError:  # polars rejects NaN, and its errors do not name the row
        values = [None if text is None or not text.strip() else _cell(text, row, column.name, path)
                  for row, text in enumerate(column)]  # fmt: skip
    try:
        return pl.Series(column.name, values, strict=False)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        raise DataError("the lists mix values of different types", file=str(path), column=column.name) from None


def _cell(text: str, row: int, name: str, path: Path) -> Any:
    try:
        return parse_json(text, as_python_writes=True)
    except TextError as error:
        remedy = "write lists as JSON, for example [-0.1, -0.2]"
        raise DataError(f"not valid JSON: {error}", file=str(path), row=row, column=name, remedy=remedy) from None


def _read_npz(path: Path) -> pa.Table:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            total = sum(entry.file_size for entry in entries)
            if total > _EXPANSION * size + _SMALL:
                problem = f"would unpack to {total:,} bytes from {size:,}, which is more than a dump needs"
                raise DataError(problem, file=str(path), remedy="save it with numpy.savez")
            for entry in entries:
                with archive.open(entry) as stream:
                    _check_header(stream, entry.file_size)
        with np.load(path, allow_pickle=False) as content:
            columns = {name: content[name] for name in content.files}
    except (EOFError, KeyError, NotImplementedError, ValueError, zipfile.BadZipFile, RuntimeError, zlib.error) as error:
        # zipfile raises NotImplementedError for unknown compression methods, and RuntimeError for encrypted entries
        problem = f"this is not a complete NPZ file ({first_error_line(error)})"
        remedy = "save plain arrays: rows padded to one length, with a response_mask"
        if "allow_pickle" in str(error):
            problem = "contains Python objects"
        raise DataError(problem, file=str(path), remedy=remedy) from None
    return _from_columns(columns, path)


def _check_header(stream: Any, size: int) -> None:
    """Raise an error if the header of an .npy array declares Python objects, or more data than `size` bytes."""
    from numpy.lib import format as npy

    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject:
        raise ValueError("allow_pickle")
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError("an array is longer than its file")


def _read_safetensors(path: Path) -> pa.Table:
    from safetensors import SafetensorError, deserialize

    try:
        tensors = deserialize(path.read_bytes())  # type: ignore[no-untyped-call, unused-ignore]
        columns = {name: _from_safetensor(**tensor) for name, tensor in tensors}
    except (SafetensorError, ValueError, TypeError, RuntimeError) as error:
        problem = f"is not a complete safetensors file ({first_error_line(error)})"
        raise DataError(problem, file=str(path), remedy="save it again") from None
    return _from_columns(columns, path)


_SAFETENSOR_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
"""safetensors type -> numpy type. bfloat16 is read as the upper half of a float32."""


def _from_safetensor(data: Any, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    if dtype not in _SAFETENSOR_TYPES:
        raise ValueError(f"a tensor has the type {dtype}, expected one of {', '.join(_SAFETENSOR_TYPES)}")
    values = np.frombuffer(data, _SAFETENSOR_TYPES[dtype]).reshape(shape)
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "F16" else values


READERS: dict[str, Callable[[Path], pa.Table]] = {
    **dict.fromkeys(JSON_LINES, _read_lines),
    ".json": lambda path: _from_content(_parse(path), path),
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), lambda path: _from_content(load_torch(path), path)),
    **dict.fromkeys((".pkl", ".pickle"), lambda path: _from_content(load_pickle(path, {}), path)),
}

_TABLE_REMEDY = "save a dict of columns, or a list of dicts with one sequence each"


def _from_content(content: Any, path: Path) -> pa.Table:
    if isinstance(content, Mapping) and is_response(content):
        content = [content]
    if isinstance(content, (list, tuple)) and content and all(isinstance(one, Mapping) for one in content):
        return _from_records(read_responses(content, path) if is_response(content[0]) else content, path)
    if isinstance(content, Mapping):
        inner = [one for one in content.values() if isinstance(one, Mapping) and _known(one)]
        if not _known(content) and len(inner) == 1:
            content = inner[0]
        if not _known(content):
            values = content.values()
            rows = [one for one in values if isinstance(one, (list, tuple)) and one and isinstance(one[0], Mapping)]
            if len(rows) == 1:
                return _from_content(rows[0], path)
        return _from_columns(content, path)
    what = "a list" if isinstance(content, (list, tuple)) else f"a {type(content).__name__}"
    raise DataError(f"contains {what} instead of a table of columns", file=str(path), remedy=_TABLE_REMEDY)


def _known(names: Iterable[Any]) -> list[str]:
    return [name for name in names if canonical_name(name) in REQUIRED_COLUMNS]


def canonical_name(name: Any) -> Any:
    return name if name in COLUMNS_BY_NAME else column_aliases().get(name, name)


def _from_records(records: Sequence[Mapping[str, Any]], path: Path) -> pa.Table:
    names = list(dict.fromkeys(name for record in records for name in record if isinstance(name, str)))
    columns = {name: [record.get(name) for record in records] for name in names}
    return _plain(pa.table(_arrays(columns, len(records), path)))


def _from_columns(columns: Mapping[Any, Any], path: Path) -> pa.Table:
    """Build a table from the columns with the most common number of rows. A single value is repeated in every row."""
    named = {name: value for name, value in columns.items() if isinstance(name, str)}
    lengths = {name: len(value) for name, value in named.items() if _has_rows(value)}
    needed = {name: lengths[name] for name in _known(lengths)}
    if len(set(needed.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in needed.items())
        raise DataError(f"columns differ in their number of rows: {listed}", file=str(path))
    counted = needed or lengths
    if not counted:
        raise DataError("contains no column", file=str(path), remedy=_TABLE_REMEDY)
    rows = Counter(counted.values()).most_common(1)[0][0]
    kept = {name: value for name, value in named.items() if not _has_rows(value) or lengths[name] == rows}
    return _plain(pa.table(_arrays(kept, rows, path)))


def _has_rows(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _arrays(columns: Mapping[str, Any], rows: int, path: Path) -> dict[str, pa.Array]:
    """Convert columns to Arrow. Leave out unsupported columns, but raise an error if they contain log-probs."""
    found = {}
    for name, value in columns.items():
        try:
            found[name] = _array(value, rows)
        except (ArithmeticError, TypeError, ValueError, pa.ArrowException) as error:
            if _known([name]):
                problem = f"contains values that are not lists of numbers ({first_error_line(error)})"
                raise DataError(problem, file=str(path), column=name) from None
    return found


def _array(value: Any, rows: int) -> pa.Array:
    if not _has_rows(value):
        if isinstance(value, Mapping):
            raise TypeError("a mapping")
        return pa.array([value.item() if hasattr(value, "item") else value] * rows)
    if isinstance(value, np.ndarray):
        return _to_lists(value)
    arrays = [one for one in value if isinstance(one, np.ndarray)]
    common = np.result_type(*arrays) if arrays and all(one.dtype.kind in "fiub" for one in arrays) else None
    cells = list(value)
    for row, one in enumerate(cells):
        if isinstance(one, np.ndarray):  # an array of one row, [1, T], is also one sequence
            one = one[0] if one.ndim == 2 and one.shape[0] == 1 else one
            cells[row] = _to_cells(one if common is None else one.astype(common, copy=False))
    return make_array(cells)


def _to_lists(values: NDArray[Any]) -> pa.Array:
    """Convert an array to nested Arrow lists, without a Python object for each of millions of rows."""
    if values.ndim > _DEPTH or values.dtype.kind not in "fiub":
        return pa.array(_to_cells(values))
    found = pa.array(_to_cells(values.reshape(-1)))
    for axis in range(values.ndim - 1, 0, -1):
        count = int(np.prod(values.shape[:axis], dtype=np.int64))
        offsets = pa.array(np.arange(count + 1, dtype=np.int64) * values.shape[axis])
        found = pa.LargeListArray.from_arrays(offsets, found)
    return found


def _to_cells(values: NDArray[Any]) -> Any:
    """Convert an array to nested lists of one-dimensional arrays, which Arrow copies fast."""
    if values.ndim > _DEPTH:
        raise ValueError(f"{values.ndim} dimensions")
    if values.dtype.kind not in "fiub" or values.ndim == 0:
        return values.tolist()
    kind = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype.newbyteorder("=")
    return values.astype(kind, copy=False) if values.ndim == 1 else [_to_cells(row) for row in values]


def _from_frame(frame: Any) -> pa.Table:
    """Convert a polars table to Arrow, without unsupported columns. Columns with integers above 64 bits become text."""
    import polars as pl

    columns = []
    for column in frame.select(name for name in frame.columns if "\0" not in name):
        if column.dtype == pl.Int128:
            short = column.cast(pl.UInt64, strict=False)
            column = short if short.null_count() == column.null_count() else column.cast(pl.String)
        columns += [] if "128" in str(column.dtype) else [column]
    return _plain(pl.DataFrame(columns).to_arrow(compat_level=pl.CompatLevel.oldest()))


def _plain(table: pa.Table) -> pa.Table:
    return table.select([one.name for one in table.schema if classify(one.type)[1] in VALUE_KINDS])


def _with_token_ids(table: pa.Table) -> pa.Table:
    """If a column such as `responses` contains lists of integers, rename it to token_ids."""
    for name in () if "token_ids" in map(canonical_name, table.schema.names) else _TOKEN_IDS:
        kind = table.schema.field(name).type if name in table.schema.names else pa.null()
        if is_list(kind) and pa.types.is_integer(kind.value_type):
            names = ["token_ids" if one == name else one for one in table.schema.names]
            return table.rename_columns(names).replace_schema_metadata(table.schema.metadata)
    return table


def with_prompt_ids(table: pa.Table) -> pa.Table:
    """Add hashes of the prompts (tokens or text), if the table lacks prompt ids."""
    for name in () if "prompt_id" in map(canonical_name, table.schema.names) else _PROMPTS:
        if name in table.schema.names and not pa.types.is_floating(table.schema.field(name).type):
            values = table[name].to_pylist()
            return table.append_column("prompt_id", pa.array(map(prompt_hash, values), pa.string()))
    return table


PROMPT_LOG_PROBS = "prompt_log_probs"
"""Column with the log-probs of a prompt's tokens, except for the first token, which lacks a log-prob."""
_WRAPPERS = ("response", "body", "result", "output")
"""Keys of the response in objects that scripts and batch jobs write, such as {"id": ..., "response": ...}."""
_IDS = ("custom_id", "id", "request_id", "rid", "sequence_id")
_TOKEN = re.compile(r"token_id:(\d+)")

Record = Mapping[str, Any]


def is_response(record: Record) -> bool:
    return _find_response(record) is not None


def read_responses(records: Iterable[Record], path: Path) -> list[dict[str, Any]]:
    """Return one row per sampled response in the records of an inference engine."""
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        try:
            found = list(_rows(record))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"is not a complete response of an engine ({first_error_line(error)})"
            raise DataError(problem, file=str(path), row=number) from None
        if not found:
            raise DataError("this row is not a response of an engine", file=str(path), row=number)
        for row in found:
            if row.get("rollout_log_probs") is None and row.get(PROMPT_LOG_PROBS) is None:
                remedy = "request them: logprobs=1 (vLLM, OpenAI), return_logprob=true (SGLang), logprobs=true (chat)"
                raise DataError("the response contains no log-probs", file=str(path), row=number, remedy=remedy)
        rows += found
    return rows


def _find_response(record: Any) -> tuple[str, Record] | None:
    if not isinstance(record, Mapping):
        return None
    if isinstance(record.get("meta_info"), Mapping):
        return "sglang", record
    choices = record.get("choices")
    if isinstance(choices, list) and (not choices or isinstance(choices[0], Mapping)):
        return "openai", record
    outputs = record.get("outputs")
    has_ids = isinstance(outputs, list) and any(isinstance(one, Mapping) and "token_ids" in one for one in outputs)
    prompt = record.get("prompt_logprobs")
    if has_ids or isinstance(prompt, list) or (isinstance(outputs, list) and prompt is not None):
        return "vllm", record
    return next((found for name in _WRAPPERS if (found := _find_response(record.get(name))) is not None), None)


def _rows(record: Record) -> Iterator[dict[str, Any]]:
    kind, body = _find_response(record) or ("", {})
    outer = (
        {name: value for name, value in record.items() if isinstance(value, (str, int, float))}
        if body is not record
        else {}
    )
    read = {"sglang": _sglang, "openai": _openai, "vllm": _vllm}.get(kind)
    if read is None:
        return
    found = list(read(body))
    for number, row in enumerate(found):
        name = next((outer[key] for key in _IDS if key in outer), row.pop("id", None))
        row.pop("id", None)
        row["id"] = None if name is None else f"{name}:{number}" if len(found) > 1 else str(name)
        yield {**{key: value for key, value in outer.items() if key not in _IDS}, **row}


def _openai(body: Record) -> Iterator[dict[str, Any]]:
    for choice in sorted(body["choices"], key=lambda one: one.get("index") or 0):
        found = choice.get("logprobs")
        row: dict[str, Any] = {"id": body.get("id"), "finish_reason": choice.get("finish_reason")}
        if isinstance(found, Mapping) and isinstance(found.get("content"), list):
            row["rollout_log_probs"] = [_log_prob(one["logprob"]) for one in found["content"]]
            tokens = [one.get("token") for one in found["content"]]
        elif isinstance(found, Mapping) and isinstance(found.get("token_logprobs"), list):
            row["rollout_log_probs"] = [_log_prob(one) for one in found["token_logprobs"]]
            tokens = found.get("tokens") or []
        else:
            tokens = []
        ids = choice.get("token_ids")
        row["token_ids"] = ids if isinstance(ids, list) else _token_ids(tokens)
        row |= _kept_tokens(choice.get("sampling_mask"))
        prompt = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
        yield row | _prompt(prompt, choice.get("prompt_logprobs", body.get("prompt_logprobs")))


def _token_ids(tokens: Sequence[Any]) -> list[int] | None:
    """Parse strings such as `token_id:123`, which vLLM writes if return_tokens_as_token_ids is set."""
    matches = [_TOKEN.fullmatch(token) if isinstance(token, str) else None for token in tokens]
    return [int(match[1]) for match in matches if match] if matches and all(matches) else None


def _vllm(body: Record) -> Iterator[dict[str, Any]]:
    prompt = _prompt(body.get("prompt_token_ids"), body.get("prompt_logprobs"))
    for output in body.get("outputs") or [{}]:
        row: dict[str, Any] = {
            "id": body.get("request_id", body.get("id")),
            "finish_reason": output.get("finish_reason"),
        }
        ids, found = output.get("token_ids"), output.get("logprobs")
        row["token_ids"] = ids
        if isinstance(found, list) and isinstance(ids, list):
            if len(found) != len(ids):
                raise ValueError(f"the response has {len(found)} log-probs for {len(ids)} tokens")
            row["rollout_log_probs"] = [_pick_log_prob(entry, token) for entry, token in zip(found, ids, strict=True)]
        yield row | prompt | _kept_tokens(output.get("sampling_mask"))


def _kept_tokens(mask: Any) -> dict[str, Any]:
    mask = mask.get("token_ids") if isinstance(mask, Mapping) else mask
    return {"kept_tokens": [len(ids) for ids in mask]} if isinstance(mask, list) else {}


def _pick_log_prob(entry: Any, token: int | None) -> float:
    """Return the log-prob of `token`, or the first if `token` is `None`. `entry`: a number, or token -> log-prob."""
    if entry is None or isinstance(entry, (int, float)):
        return _log_prob(entry)
    found = next(iter(entry.values())) if token is None else entry[str(token)] if str(token) in entry else entry[token]
    return _log_prob(found["logprob"] if isinstance(found, Mapping) else found)


def _sglang(body: Record) -> Iterator[dict[str, Any]]:
    info = body["meta_info"]
    reason = info.get("finish_reason")
    row: dict[str, Any] = {
        "id": info.get("id", body.get("id")),
        "finish_reason": reason.get("type") if isinstance(reason, Mapping) else reason,
    }
    output = info.get("output_token_logprobs")
    if isinstance(output, list):
        row["rollout_log_probs"] = [_log_prob(one[0]) for one in output]
        row["token_ids"] = [int(one[1]) for one in output]
    version = str(info.get("weight_version", ""))
    if version.isdecimal():
        row["rollout_version"] = int(version)
    given = info.get("input_token_logprobs")
    if isinstance(given, list) and given:
        row["prompt_token_ids"] = [int(one[1]) for one in given]
        row[PROMPT_LOG_PROBS] = [_log_prob(one[0]) for one in given[1:]]
    yield row


def _prompt(ids: Any, found: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if isinstance(ids, list):
        row["prompt_token_ids"] = ids
    if isinstance(found, list) and found:
        tokens = ids if isinstance(ids, list) and len(ids) == len(found) else [None] * len(found)
        pairs = list(zip(found[1:], tokens[1:], strict=True))
        if any(token is None and isinstance(entry, Mapping) and len(entry) != 1 for entry, token in pairs):
            raise ValueError("prompt_logprobs has several tokens at one position; add prompt_token_ids")
        row[PROMPT_LOG_PROBS] = [_pick_log_prob(entry, token) for entry, token in pairs]
    return row


def _log_prob(value: Any) -> float:
    """Convert a log-prob to a float. vLLM writes null for a token without a log-prob."""
    return math.nan if value is None else float(value)
