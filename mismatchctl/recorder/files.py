"""Output files of the recorder: Parquet and Arrow settings, and unique file names among many processes."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.recorder.table import SIDES

ROW_GROUP_TOKENS = 1 << 20
"""Approximate tokens per row group: the fastest size to decode (docs/guides/recording.md)."""


def parquet_settings(schema: pa.Schema) -> dict[str, Any]:
    """Return the Parquet settings that decode fastest, as measured by benchmarks/recorder.py."""
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
    if int(pa.__version__.partition(".")[0]) >= 15:  # not in older versions
        chosen["write_page_checksum"] = True
    return chosen


def write_parquet(table: pa.Table, handle: BinaryIO, **settings: Any) -> None:
    """Write a table with `parquet_settings`, which `settings` override."""
    chosen = {"row_group_size": _row_group_rows(table), **parquet_settings(table.schema)}
    pq.write_table(table, handle, **{**chosen, **settings})


def write_arrow(table: pa.Table, handle: BinaryIO, compression: str = "lz4") -> None:
    """Write an Arrow IPC file of compressed record batches."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(handle, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_row_group_rows(table))


def _row_group_rows(table: pa.Table) -> int:
    side = next(name for name in SIDES if name in table.column_names)
    tokens = len(table[side].chunk(0).values)
    return max(1, min(len(table), ROW_GROUP_TOKENS * len(table) // max(1, tokens)))


HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""False on Windows, where the temporary files of a dead process are never removed."""


@contextlib.contextmanager
def open_new_file(folder: Path, stem: str, suffix: str, first: int) -> Iterator[tuple[Path, BinaryIO]]:
    """Create a file under the next free name. The name appears only if the block ends without an error."""
    final, partial, handle = _reserve_name(folder, stem, suffix, first)
    with handle:
        try:
            yield final, handle
            handle.flush()
            os.fsync(handle.fileno())
            if not HAS_LOCKS:  # Windows cannot rename an open file
                handle.close()
            os.replace(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _reserve_name(folder: Path, stem: str, suffix: str, first: int) -> tuple[Path, Path, BinaryIO]:
    """Return the next free name, and its temporary file, open and locked. The process with the lock owns the name."""
    for earlier in itertools.count(first):
        final = folder / f"{stem}{f'_{earlier:03d}' if earlier else ''}.{suffix}"
        partial = final.with_name(f".{final.name}.tmp")
        try:
            handle = open(partial, "xb")  # noqa: SIM115 (the caller closes it)
        except FileExistsError:
            continue
        if _try_lock(handle) is False or not _is_same_file(
            handle, partial
        ):  # another process took it for a stale file before it was locked
            handle.close()
            continue
        if not final.exists():
            break
        partial.unlink()  # the name was taken in the meantime
        handle.close()
    return final, partial, handle


def remove_stale_files(folder: Path, rank: int | None) -> None:
    """Remove temporary files of this rank whose process has ended, so that their lock is free."""
    own = re.compile(r"\.step_\d+" + ("" if rank is None else f"_rank{rank:05d}") + r"(_\d+)?\.(parquet|arrow)\.tmp")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if own.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(folder / name)


def _remove_if_stale(partial: Path) -> None:
    with open(partial, "r+b") as handle:
        if _try_lock(handle) and _is_same_file(handle, partial):
            partial.unlink()  # its owner would need the lock to rename it


def _is_same_file(handle: BinaryIO, path: Path) -> bool:
    """Return True if the path still is the open file."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(handle: BinaryIO) -> bool | None:
    """Lock a file until it is closed. False: another process has the lock. None: this system has no locks."""
    if not HAS_LOCKS:
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
