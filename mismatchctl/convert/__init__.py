"""Files that frameworks write, converted to one Parquet file of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.files import replaced_when_done
from mismatchctl.frameworks.importers.layout import SCHEMA, Row, check_alignment
from mismatchctl.frameworks.importers.registry import sources

ROWS = 256
"""Rows held in memory and checked at a time."""


def convert(
    source: Path, out: Path, framework: str = "", progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Write the rows of `source` to `out`, whole or not at all; returns how many sequences and tokens.

    Raises:
        DataError: nothing is recognized, a row is bad, or columns are shifted against each other.
        ConfigError: an unknown framework, or `out` cannot be written.
    """
    found = sources(source, framework)
    sequences = tokens = 0
    seen: dict[tuple[object, ...], Path] = {}
    with replaced_when_done(out) as temporary, pq.ParquetWriter(temporary, SCHEMA) as writer:
        for path, layout in found:
            rows = layout.read(path)
            if layout.duplicates:
                rows = _first_of_each(rows, path, seen)
            while part := list(islice(rows, ROWS)):
                check_alignment(path, part)
                writer.write_batch(pa.RecordBatch.from_pylist(part, schema=SCHEMA))
                sequences += len(part)
                tokens += sum(int(row["response_mask"].sum()) for row in part)
                if progress is not None:
                    progress(tokens, tokens)
    return sequences, tokens


def _first_of_each(rows: Iterator[Row], path: Path, seen: dict[tuple[object, ...], Path]) -> Iterator[Row]:
    """The rows that no other file of the folder has: the same sample, with the same values."""
    for row in rows:
        values = (row[name].tobytes() for name in ("rollout_log_probs", "train_log_probs", "response_mask"))
        key = (path.parent, row["step"], row["sequence_id"], *values)
        if seen.setdefault(key, path) == path:
            yield row
