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

ROW_GROUP_TOKENS = 1 << 20
"""About so many tokens are decoded at a time; fewer or more cost time (docs/recording.md)."""


def parquet_settings(schema: pa.Schema) -> dict[str, Any]:
    """Those that decode fastest of those that benchmarks/recorder.py measures."""
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
    if int(pa.__version__.partition(".")[0]) >= 15:  # older ones cannot
        chosen["write_page_checksum"] = True
    return chosen


def write_parquet(table: pa.Table, handle: BinaryIO, **settings: Any) -> None:
    """With `parquet_settings`; `settings` change them."""
    chosen = {"row_group_size": _row_group_rows(table), **parquet_settings(table.schema)}
    pq.write_table(table, handle, **{**chosen, **settings})


def write_arrow(table: pa.Table, handle: BinaryIO, compression: str = "lz4") -> None:
    """An Arrow IPC file of compressed record batches."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(handle, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_row_group_rows(table))


def _row_group_rows(table: pa.Table) -> int:
    tokens = len(table["rollout_log_probs"].chunk(0).values)
    return max(1, min(len(table), ROW_GROUP_TOKENS * len(table) // max(1, tokens)))


HAS_LOCKS = importlib.util.find_spec("fcntl") is not None
"""Windows has none: what a dead process left there stays."""


@contextlib.contextmanager
def open_new_file(folder: Path, stem: str, suffix: str, first: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file under the next free name, which it gets when the block ends well.

    Yields:
        The name, and a handle of the temporary file, whose lock says that its process is alive.
    """
    final, partial, handle = _reserve_name(folder, stem, suffix, first)
    with handle:
        try:
            yield final, handle
            handle.flush()
            os.fsync(handle.fileno())
            if not HAS_LOCKS:  # there a file cannot be renamed while it is open
                handle.close()
            os.replace(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _reserve_name(folder: Path, stem: str, suffix: str, first: int) -> tuple[Path, Path, BinaryIO]:
    """Find the next free name: whoever creates and locks its temporary file, returned open, owns it."""
    for earlier in itertools.count(first):
        final = folder / f"{stem}{f'_{earlier:03d}' if earlier else ''}.{suffix}"
        partial = final.with_name(f".{final.name}.tmp")
        try:
            handle = open(partial, "xb")  # noqa: SIM115 (the caller closes it)
        except FileExistsError:
            continue
        if _try_lock(handle) is False or not _is_same_file(
            handle, partial
        ):  # before the lock it was a dead process's to others
            handle.close()
            continue
        if not final.exists():
            break
        partial.unlink()  # an earlier write, or another process, has the name
        handle.close()
    return final, partial, handle


def remove_stale_files(folder: Path, rank: int | None) -> None:
    """Remove what processes of this rank that are no more have begun: nobody holds its lock."""
    own = re.compile(r"\.step_\d+" + ("" if rank is None else f"_rank{rank:05d}") + r"(_\d+)?\.(parquet|arrow)\.tmp")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if own.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_if_stale(folder / name)


def _remove_if_stale(partial: Path) -> None:
    with open(partial, "r+b") as handle:
        if _try_lock(handle) and _is_same_file(handle, partial):
            partial.unlink()  # its owner would have to hold the lock to rename it or to let another have the name


def _is_same_file(handle: BinaryIO, path: Path) -> bool:
    """Whether the path still is the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _try_lock(handle: BinaryIO) -> bool | None:
    """Lock a file until it is closed; False: another process has, None: locks do not exist here."""
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
