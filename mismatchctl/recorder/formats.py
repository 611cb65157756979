"""A table as a file, with the settings that are read fastest."""

from __future__ import annotations

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
    chosen = {"row_group_size": _rows_at_a_time(table), **parquet_settings(table.schema)}
    pq.write_table(table, handle, **{**chosen, **settings})


def write_arrow(table: pa.Table, handle: BinaryIO, compression: str = "lz4") -> None:
    """An Arrow IPC file of compressed record batches."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(handle, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=_rows_at_a_time(table))


def _rows_at_a_time(table: pa.Table) -> int:
    tokens = len(table["rollout_log_probs"].chunk(0).values)
    return max(1, min(len(table), ROW_GROUP_TOKENS * len(table) // max(1, tokens)))
