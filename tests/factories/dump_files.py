"""Write dumps in each format, and read them back."""

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.core.batch import TokenBatch
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import Dump, open_dump

FORMAT = ContextVar("FORMAT", default="parquet")
"""Format of the files that `write` writes: parquet, arrow or stream. The fixture `file_format` sets it."""

ROLLOUT, TRAIN, MASK = "rollout_log_probs", "train_log_probs", "response_mask"


def lists(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind or pa.list_(pa.float32()))


def write(path: Path, columns: Mapping[str, Any], rows: int | None = None, **options: Any) -> str:
    """Write a file in the current format. If Parquet options are passed, the file is Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    if options or FORMAT.get() == "parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    else:
        path = path.with_suffix(".arrow")
        new = pa.ipc.new_stream if FORMAT.get() == "stream" else pa.ipc.new_file
        with new(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
            writer.write_table(table, max_chunksize=rows)
    return str(path)


def wide(lengths: Sequence[int] = (3, 2), **extra: Any) -> dict[str, Any]:
    """Make sequences in which the n-th token of the file has the log-probs -n/64 and -n/64 - 1/4."""
    starts = np.cumsum([0, *lengths])
    rollout = [[-(first + n) / 64 for n in range(length)] for first, length in zip(starts, lengths, strict=False)]
    train = [[value - 0.25 for value in row] for row in rollout]
    return {ROLLOUT: lists(rollout), TRAIN: lists(train), **extra}


def to_long(columns: Mapping[str, Any], drop_masked: bool = False) -> dict[str, Any]:
    table = pa.table(dict(columns))
    rows = []
    for number, row in enumerate(table.to_pylist()):
        length = len(row[ROLLOUT])
        row.setdefault("sequence_id", number)
        for place in range(length):
            token = {name: cell[place] if isinstance(cell, list) else cell for name, cell in row.items()}
            if not (drop_masked and MASK in token and not token[MASK]):
                rows.append({**token, "position": place})
    names = rows[0]
    kinds = {name: table.schema.field(name).type for name in table.column_names}
    kinds = {name: kind.value_type if pa.types.is_list(kind) else kind for name, kind in kinds.items()}
    return {name: pa.array([row[name] for row in rows], kinds.get(name)) for name in names}


def batches(dump: Dump, problems: Problems | None = None) -> Iterator[TokenBatch]:
    for unit in dump.units:
        yield from dump.read(unit, Problems() if problems is None else problems)


def content(dump: Dump, problems: Problems | None = None) -> dict[str, list[Any]]:
    result: dict[str, list[Any]] = {}
    for batch in batches(dump, problems):
        offsets = batch.segments.offsets
        flat = {"rollout": batch.rollout, "train": batch.train, "positions": batch.positions}
        flat.update({"current": batch.current, "advantages": batch.advantages})
        for name, values in flat.items():
            if values is not None:
                parts = [values[offsets[i] : offsets[i + 1]].tolist() for i in range(len(batch))]
                result.setdefault(name, []).extend(parts)
        for name, values in batch.columns.items():
            assert len(values) == len(batch)
            result.setdefault(name, []).extend(values.tolist())
        result.setdefault("rows", []).extend(batch.rows.tolist())
    return result


def read(path: str | Path, **options: Any) -> dict[str, list[Any]]:
    return content(open_dump([str(path)], **options))
