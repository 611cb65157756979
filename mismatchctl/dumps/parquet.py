"""Parquet files: the footer knows everything but the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from mismatchctl.dumps.contents import Contents, Span
from mismatchctl.dumps.kinds import is_list
from mismatchctl.footer import check_footer
from mismatchctl.measure.kernels.look import can_look

_READ_BYTES = 1 << 20
"""How much of a column is fetched at a time where a row group is too big to be held in memory."""


_GLANCE = 256
"""Rows that are looked at at once for a value."""


@dataclass(frozen=True)
class Parquet(Contents):
    """A Parquet file; its groups are its row groups."""

    footer: pq.FileMetaData = field(repr=False, compare=False)
    group_name: ClassVar[str] = "row group"

    @classmethod
    def of(cls, file: pa.NativeFile) -> Parquet:
        """Read the footer of an opened file."""
        check_footer(file)
        footer = pq.read_metadata(file)
        rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        return cls(footer.schema.to_arrow_schema(), rows, footer)

    def elements(self, group: int, column: str) -> int:
        """Values of the column's first leaf."""
        leaf = self._leaf(column)
        return 0 if leaf is None else int(self.footer.row_group(group).column(leaf).num_values)

    def spans(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[Span | None]:
        """What the statistics say."""
        leaf = self._leaf(column)
        if leaf is None:
            return [None] * len(self.rows)
        return [_span(self.footer.row_group(group).column(leaf)) for group in range(len(self.rows))]

    def is_void(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        """What the statistics say; without them, what the first rows say that say something."""
        leaf, filled = self._leaf(column), [group for group, rows in enumerate(self.rows) if rows]
        if leaf is None or not filled or not self.footer.schema.column(leaf).max_definition_level:
            return False
        if any(_has_no_null(self.footer.row_group(group).column(leaf)) for group in filled):
            return False
        levels = self.footer.schema.column(leaf)
        if levels.max_definition_level == levels.max_repetition_level and any(
            self.footer.row_group(group).column(leaf).num_values > self.rows[group] for group in filled
        ):
            return False  # nothing may be null, and not every list has one entry at most, which it would if empty
        try:
            with opening as file:
                return not any(
                    _holds_a_value(table.column(0)) for table in self.decode(file, filled, [column], _GLANCE)
                )
        except (OSError, pa.ArrowException):
            return False  # whoever decodes it will say what is wrong

    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        """Row groups, their checksums verified; of an object store in few, large requests."""
        parquet = pq.ParquetFile(
            file,
            metadata=self.footer,
            page_checksum_verification=True,
            buffer_size=0 if rows is None else _READ_BYTES,
            pre_buffer=rows is None,  # else it would hold the whole row group, compressed
        )
        if rows is None:
            lists: dict[str, pa.Array] = {}
            lists |= self._lists(file, groups, columns)  # without this line, pyarrow reads the same
            others = [name for name in columns if name not in lists]
            table = parquet.read_row_groups(list(groups), columns=others, use_threads=False)
            for name, array in lists.items():
                table = table.append_column(self.schema.field(name), array)
            yield table.select(columns) if lists else table
        else:
            for batch in parquet.iter_batches(rows, list(groups), columns, use_threads=False):
                yield pa.Table.from_batches([batch])

    def _lists(self, file: pa.NativeFile, groups: Sequence[int], columns: list[str]) -> dict[str, pa.Array]:
        """Those that are read page by page: of a file of this machine, once compiled loops were needed.

        Without loops at work, loading those takes longer than they save; of a store, pyarrow asks for all at once.
        """
        if not can_look() or not isinstance(file, pa.OSFile):
            return {}
        from mismatchctl.dumps.pages import read_lists

        return read_lists(file, self.footer, self.schema, groups, columns)

    def _leaf(self, column: str) -> int | None:
        """Index of the first leaf of a column, where its statistics and sizes are found."""
        for index in range(self.footer.num_columns):
            path = self.footer.schema.column(index).path
            if path == column or path.startswith(f"{column}."):
                return index
        return None


def _has_no_null(chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics
    return statistics is not None and statistics.has_null_count and statistics.null_count == 0 < chunk.num_values


def _holds_a_value(column: pa.ChunkedArray) -> bool:
    import pyarrow.compute as pc

    while is_list(column.type):
        column = pc.list_flatten(column)
    return bool(column.null_count < len(column))


def _span(chunk: pq.ColumnChunkMetaData) -> Span | None:
    statistics = chunk.statistics
    if statistics is None or not statistics.has_min_max:
        return None
    try:
        low, high = statistics.min, statistics.max
    except (OverflowError, ValueError):  # a moment that Python cannot hold
        return None
    return (low, high) if type(low) is int and type(high) is int else None
