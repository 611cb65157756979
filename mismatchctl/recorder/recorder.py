"""Collect the columns of a training loop and write them to files, optionally in a background thread."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import operator
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

MAX_ELEMENTS = 2**31 - 1  # offsets of a list column have 32 bits
EXPERT_COLUMNS = ("rollout_experts", "train_experts")
TOP_COLUMNS = ("rollout_top_ids", "rollout_top_log_probs", "train_top_log_probs", "reference_top_log_probs")
NESTED_COLUMNS = EXPERT_COLUMNS + TOP_COLUMNS
"""Columns with one list per token. In a column, all these lists have the same length."""
MASK_COLUMN = "sampling_mask"
"""Column with vLLM's sampling mask: for each token of a sequence, a list of the ids that could be sampled."""
PROMPT_COLUMN = "prompt_token_ids"
SIDES = ("rollout_log_probs", "train_log_probs")
"""The two columns of log-probs to compare. A call of `write` may record only one of them."""
TOKEN_COLUMNS = ("token_ids", PROMPT_COLUMN, TOP_COLUMNS[0])

Array = NDArray[Any]
Cells = Array | list[Array]
"""Values of a column: one for all rows, one per row, padded rows (two or more dimensions), or a list of rows."""


def build_table(columns: dict[str, Any]) -> pa.Table:
    """Copy the columns of one call of `write` to a table. `sampling_mask` becomes the number of ids per token."""
    cells = {}
    for name, value in columns.items():
        with _add_name_to_errors(name):
            if name == MASK_COLUMN:
                name, value = "kept_tokens", [[len(ids) for ids in row] for row in value]
            cells[name] = _to_cells(name, value)
    sides = [name for name in SIDES if name in cells] or list(SIDES)
    reference = "response_mask" if "response_mask" in cells else sides[0]
    for name in dict.fromkeys((*sides, reference)):
        if name not in cells or not _is_per_token(cells[name]):
            found = "single values" if name in cells else "None"
            raise ValueError(f"{name}: needs one list of values per sequence, got {found}")
        if reference != "response_mask" and not isinstance(cells[name], list):
            raise ValueError("response_mask: missing; pass a mask, or the log-probs as a list of rows without padding")
    stored = _stored_parts(cells[reference])
    arrays = {}
    for name, value in cells.items():
        with _add_name_to_errors(name):
            if isinstance(value, np.ndarray) and not value.ndim:
                value = np.repeat(value, len(stored))
            if name == PROMPT_COLUMN and not isinstance(value, list):
                raise ValueError("needs a list of B rows without padding, as in [row[row_mask] for ...]")
            if len(value) != len(stored):
                raise ValueError(f"{len(value)} rows, but there are {len(stored)} sequences")
            if not _is_per_token(value):
                arrays[name] = _scalar_array(np.array(value))
            elif name == PROMPT_COLUMN:
                arrays[name] = _rows_array(name, value)
            else:
                kept = zip(value, cells[reference], stored, strict=True)
                arrays[name] = _rows_array(name, [_trim(i, reference, *row) for i, row in enumerate(kept)])
    fields = [
        pa.field(name, array.type, nullable=False, metadata=_dtype_metadata(columns.get(name), array.type))
        for name, array in arrays.items()
    ]
    return pa.table(list(arrays.values()), schema=pa.schema(fields))


def _stored_parts(rows: Cells) -> list[slice]:
    """Return the part of each row to store: all, or in a padded mask from the first to the last valid token."""
    if isinstance(rows, list):
        return [slice(0, len(row)) for row in rows]
    places = [np.flatnonzero(row) for row in rows]
    return [slice(place[0], place[-1] + 1) if len(place) else slice(0, 0) for place in places]


def _trim(index: int, reference: str, row: Array, other: Array, part: slice) -> Array:
    """Cut a row to the slice `part`. If the row already has the length of the slice, return it unchanged."""
    width, stored = len(other), part.stop - part.start
    if len(row) in (width, stored):
        return row[part] if len(row) == width else row
    alone = "" if stored == width else f" ({stored} of them from the first to the last valid token)"
    raise ValueError(f"row {index} has {len(row)} values, but {reference} has {width}{alone}")


@contextmanager
def _add_name_to_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _is_per_token(cells: Cells) -> bool:
    return isinstance(cells, list) or cells.ndim > 1


def _dtype_metadata(value: Any, stored: pa.DataType) -> dict[str, str] | None:
    """Return column metadata that names the original float type, such as bfloat16."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    name = str(getattr(value, "dtype", "")).rpartition(".")[2]
    return {"dtype": name} if name and pa.types.is_floating(getattr(stored, "value_type", stored)) else None


def _to_array(value: Any) -> Array:
    """Convert a value to a numpy array. Narrow floats, such as bfloat16, and lists of Python floats become float32."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, on any device
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError:  # numpy lacks bfloat16 and narrower floats
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


def _scalar_array(values: Array) -> pa.Array:
    wanted = "needs numbers, booleans or strings, all of one type and none missing"
    try:
        array = pa.array(values.tolist() if values.dtype.kind in "OU" else values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise ValueError(f"{wanted} ({error})") from None
    kind = array.type
    fits = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if array.null_count or not (fits or pa.types.is_string(kind)):
        raise ValueError(f"{wanted}, got {'missing values' if array.null_count else kind}")
    return array


def _rows_array(name: str, rows: Cells) -> pa.Array:
    lengths = [len(row) for row in rows]
    kept = [row for row in rows if len(row)]  # empty lists are float arrays, which would turn integers into floats
    if name in NESTED_COLUMNS:
        matrix = _nested_values(name, kept)
        return _list_array(_list_array(pa.array(matrix.reshape(-1)), np.full(len(matrix), matrix.shape[1])), lengths)
    empty = np.empty(0, np.int32 if name in TOKEN_COLUMNS else np.float32)
    return _list_array(pa.array(_to_storage(name, np.concatenate(kept) if kept else empty)), lengths)


def _list_array(values: pa.Array, lengths: ArrayLike) -> pa.Array:
    if len(values) > MAX_ELEMENTS:
        raise ValueError(f"{len(values):,} values in one call; at most {MAX_ELEMENTS:,} are allowed")
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values, type=pa.list_(pa.field("element", values.type, nullable=False)))


def _nested_values(name: str, rows: list[Array]) -> Array:
    matrices = [row.reshape(len(row), -1) for row in rows] or [np.empty((0, 1), np.int16)]
    what = "numbers" if name.endswith("_log_probs") else "integers"
    kinds = "iuf" if what == "numbers" else "iu"
    if len({matrix.shape[1] for matrix in matrices}) > 1 or any(one.dtype.kind not in kinds for one in matrices):
        raise ValueError(f"needs the same number of {what} for each token")
    values = np.concatenate(matrices)
    if name in TOP_COLUMNS:
        return _to_storage(name, values)
    if values.size and not -(2**15) <= values.min() <= values.max() < 2**15:
        raise ValueError(f"needs expert ids below {2**15:,}, got {values.max()}")
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


log = logging.getLogger(__package__)


class Recorder:
    """Write dumps into a folder. A file has a temporary name until it is complete.

    The final name contains the first step of the file: `step_00003.parquet`, or `step_00003_rank00001.parquet` if the
    process has a rank. If a file with this name exists, `_001`, `_002`, ... is added, so no file is overwritten. Many
    processes may write into one folder, and many threads may use one recorder. After a fork, the recorder of the child
    process starts empty, because the rows in memory belong to the parent.

    Attributes:
        lost: number of `write` calls whose rows did not reach the disk.

    Args:
        folder: output folder, created by the first write.
        run: value of the `run` column in every row. Default: no such column, and mismatchctl names the run after
            the path of the dump.
        rank: number of this process, for the file names. Default: the environment variable RANK (set by torchrun).
        format: "parquet", or "arrow" for Arrow IPC files (lz4), which are larger than Parquet and faster to read.
        file_bytes: collect rows in memory until their uncompressed size reaches this number of bytes, then write a
            file. 0: one file per write.
        background: maximum number of writes that wait for a background thread, which compresses and writes them. If
            the queue is full, `write` blocks. 0: no thread, `write` returns when its file is complete.
        on_error: "raise" raises an error if a write fails. "warn" never stops training: the first error is logged, and
            `lost` counts all lost writes.

    Raises:
        ValueError: An argument has a value that is not allowed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        run: str | None = None,
        rank: int | None = None,
        format: Literal["parquet", "arrow"] = "parquet",
        file_bytes: int = 0,
        background: int = 0,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        if format not in ("parquet", "arrow"):
            raise ValueError(f"format: expected 'parquet' or 'arrow', got {format!r}")
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error: expected 'raise' or 'warn', got {on_error!r}")
        if rank is None and os.environ.get("RANK", "").isdecimal():
            rank = int(os.environ["RANK"])
        if "://" in os.fspath(folder):
            raise ValueError(f"folder: {folder} is not a local folder; record locally and upload the files")
        for name, number in {"rank": rank or 0, "file_bytes": file_bytes, "background": background}.items():
            if number < 0:
                raise ValueError(f"{name}: {number} is negative")
        self.folder, self.run, self.rank, self.format = Path(folder), run, rank, format
        self.file_bytes, self.background, self.on_error, self.lost = file_bytes, background, on_error, 0
        self._files: Counter[int] = Counter()
        self._closed = self._warned = self._one_sided = False
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._waiting: list[pa.Table] = []
        self._failure: OSError | None = None
        self._lock = threading.Lock()  # protects the failure, the counts and the thread
        self._saving = threading.RLock()  # protects the tables in memory and the files
        self._queue: queue.Queue[pa.Table | None] = queue.Queue(self.background)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            if error is None:  # an error from inside the `with` block is more important
                raise

    def close(self) -> None:
        """Write the rows in memory and refuse further writes. `close` is called automatically when the process ends.

        Raises:
            OSError: A file could not be written, in this call or earlier in the background thread.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._process != os.getpid():
            return
        if self._thread is None:
            self._flush()
        else:
            self._queue.put(None)
            self._thread.join()
            self._raise_failure()

    def write(
        self, *, step: int, rollout_log_probs: Any, train_log_probs: Any, response_mask: Any = None, **optional: Any
    ) -> Path | None:
        """Record B sequences. All values are copied before the call returns.

        A per-token column is a padded array or tensor [B, T] (numpy, or torch on any device), a nested tensor, or a
        list of B rows (one-dimensional tensors, arrays or lists). float64 arrays stay float64, other floats become
        float32. A per-sequence column is a list or array of B numbers, booleans or strings, or one value for all rows.

        If `response_mask` is padded, each row is stored from its first to its last valid token, including masked tokens
        between them. Other columns may have the same padding, or contain only the stored tokens. If `response_mask` is
        a list or missing, whole rows are stored. With k experts per token and layer, columns of experts have the shape
        [B, T, k] or [B, T, layers, k]. Columns of the k most likely tokens are [B, T, k]. `prompt_token_ids` is a list
        of B rows of any length. `sampling_mask` contains, for each token, the ids that vLLM could sample. Only their
        number is stored, as `kept_tokens`.

        Args:
            step: the training step, a non-negative integer.
            rollout_log_probs: log-prob per token in nats, as the engine reported it, or `None`.
            train_log_probs: log-prob per token in nats, recomputed by the trainer with the model weights that sampled
                the tokens, or `None`.
            response_mask: per token, 1 if the policy sampled it, else 0. Pass the loss mask as it is before rejection.
            optional: any other column of docs/reference/dump-format.md, or your own per-sequence column for `--by`.
                `None` omits the column.

        Returns:
            The file that this call completed, or `None` if it completed no file.

        Raises:
            ValueError: The step or a column is not valid, or the recorder is closed. No row of this call is recorded.
            OSError: A file could not be written and its rows are lost. If a thread writes the files, the error may come
                from an earlier call of `write`.
        """
        if self._process != os.getpid():
            self._begin()
        try:
            if self._closed:
                raise ValueError("the recorder is closed; create a new Recorder")
            columns = {"step": _parse_step(step), "run": self.run, **optional, "response_mask": response_mask}
            columns |= {"rollout_log_probs": rollout_log_probs, "train_log_probs": train_log_probs}
            table = build_table({name: value for name, value in columns.items() if value is not None})
            self._report_missing_side(rollout_log_probs is None, train_log_probs is None)
        except Exception as error:
            self._lose(error, 1)
            return None
        if len(table) == 0:
            return None
        if not self.background:
            return self._save(table)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._drain, name="recorder", daemon=True)
                self._thread.start()
        self._queue.put(table)
        self._raise_failure()
        return None

    def _drain(self) -> None:
        while True:
            table = self._queue.get()
            try:
                self._flush() if table is None else self._save(table)
            except OSError as error:
                with self._lock:
                    self._failure = self._failure or error
            if table is None:
                return

    def _raise_failure(self) -> None:
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _lose(self, error: Exception, writes: int) -> None:
        """Add `writes` calls to the lost calls. Then raise `error` if `on_error` is "raise", or log the first error."""
        with self._lock:
            self.lost += writes
            first, self._warned = not self._warned, True
        if self.on_error == "raise":
            raise error
        if first:  # not `warnings.warn`, which filters can turn into an error
            what = f"{type(error).__name__}: {error}"
            log.warning("not recorded: %s (training goes on; Recorder.lost counts the lost calls)", what)

    def _report_missing_side(self, rollout: bool, train: bool) -> None:
        if (rollout or train) and not self._one_sided:
            self._one_sided = True
            missing, other = ("rollout", "train") if rollout else ("train", "rollout")
            log.warning(
                "%s_log_probs is None: only %s_log_probs is recorded, so no comparison is possible (does the engine "
                "return log-probs, and does the trainer recompute them?)", missing, other
            )  # fmt: skip

    def _save(self, table: pa.Table) -> Path | None:
        """Add a table to the rows in memory. If this completes a file, return its path."""
        done = None
        with self._saving:
            if self._waiting and not table.schema.equals(self._waiting[0].schema, check_metadata=True):
                done = self._flush(then=[table])
            else:
                self._waiting.append(table)
            return self._flush() if sum(waiting.nbytes for waiting in self._waiting) >= self.file_bytes else done

    def _flush(self, then: Sequence[pa.Table] = ()) -> Path | None:
        """Write the tables in memory to a file. Then keep the tables in `then` in memory, for the next file."""
        tables, self._waiting = self._waiting, list(then)
        if not tables:
            return None
        try:
            return self._publish(pa.concat_tables(tables).combine_chunks())
        except Exception as error:
            number, why = getattr(error, "errno", None), getattr(error, "strerror", None) or error
            text = f"{self.folder}: cannot be written, {len(tables)} call(s) of write are lost: {why}"
            problem = OSError(number, text) if number else OSError(text)
            problem.__cause__ = error
            self._lose(problem, len(tables))
            return None

    def _publish(self, table: pa.Table) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        step, rank = table["step"][0].as_py(), "" if self.rank is None else f"_rank{self.rank:05d}"
        if not self._files:
            _remove_stale_files(self.folder)
        stem = f"step_{step:05d}{rank}"
        partial = self.folder / f".{stem}.{os.getpid()}-{os.urandom(6).hex()}.tmp"
        try:
            with open(partial, "xb") as handle:
                write_parquet(table, handle) if self.format == "parquet" else write_arrow(table, handle)
                handle.flush()
                os.fsync(handle.fileno())
            numbers = itertools.count(self._files[step])
            names = (self.folder / f"{stem}{f'_{part:03d}' if part else ''}.{self.format}" for part in numbers)
            final = next(name for name in names if claim_name(partial, name))
        finally:
            partial.unlink(missing_ok=True)
        self._files[step] += 1
        return final


def _parse_step(step: Any) -> int:
    try:
        whole = operator.index(step)
    except TypeError:
        raise ValueError(f"step: needs a whole number, got {step!r}") from None
    if not 0 <= whole < 2**63:
        raise ValueError(f"step: {whole} is {'negative' if whole < 0 else 'too large'}")
    return whole


ROW_GROUP_TOKENS = 1 << 20
"""Approximate number of tokens per row group. 16 million would double decode times (docs/methods/benchmarks.md)."""


def parquet_settings(schema: pa.Schema) -> dict[str, Any]:
    """Return the recorder's Parquet settings: small files that decode fast, with checksums (benchmarks/recorder.py)."""
    chosen: dict[str, Any] = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": False,
        "use_byte_stream_split": [
            f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
            for field in schema
            if pa.types.is_floating(getattr(field.type, "value_type", field.type))
        ],
        "write_statistics": ["step"],
    }
    if int(pa.__version__.partition(".")[0]) >= 15:  # older versions lack this setting
        chosen["write_page_checksum"] = True
    return chosen


def write_parquet(table: pa.Table, handle: BinaryIO, **settings: Any) -> None:
    chosen = {"row_group_size": _row_group_rows(table), **parquet_settings(table.schema)}
    pq.write_table(table, handle, **{**chosen, **settings})


def write_arrow(table: pa.Table, handle: BinaryIO, compression: str = "lz4") -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(handle, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_row_group_rows(table))


def _row_group_rows(table: pa.Table) -> int:
    side = next(name for name in SIDES if name in table.column_names)
    tokens = len(table[side].chunk(0).values)
    return max(1, min(len(table), ROW_GROUP_TOKENS * len(table) // max(1, tokens)))


def claim_name(temporary: Path, final: Path) -> bool:
    """Publish the file `temporary` as `final`, and return True. If `final` exists, change nothing and return False."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            os.close(os.open(final, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
        try:
            os.replace(temporary, final)
        except OSError:
            final.unlink()  # do not leave an empty file, which is not a dump
            raise
    return True


_STALE_SECONDS = 24 * 3600  # an older temporary file belongs to a killed process


def _remove_stale_files(folder: Path) -> None:
    for path in folder.glob(".step_*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()
