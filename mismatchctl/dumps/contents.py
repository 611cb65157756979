"""What a file holds, whatever its format: its columns, its groups of rows, and decoding them.

A group is what can be decoded by itself: a row group of Parquet, a record batch of Arrow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

Span = tuple[int, int]


@dataclass(frozen=True)
class Contents(ABC):
    """What a file says about itself before a column is decoded. It travels to other processes.

    Attributes:
        schema: the columns and their types.
        rows: rows of each group.
        group_name: what this format calls a group.
    """

    schema: pa.Schema = field(repr=False)
    rows: tuple[int, ...]
    group_name: ClassVar[str]

    @abstractmethod
    def elements(self, group: int, column: str) -> int:
        """Roughly how many values a column has in a group: elements of its lists where it holds lists."""

    @abstractmethod
    def spans(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> list[Span | None]:
        """The lowest and highest value of a column in each group, where it holds integers and that is cheap to know.

        `opening` opens the file, if need be.
        """

    @abstractmethod
    def is_void(self, opening: AbstractContextManager[pa.NativeFile], column: str) -> bool:
        """Whether a column holds no value at all, in any row: nulls, lists of them, empty lists.

        `opening` opens the file, if need be.
        """

    @abstractmethod
    def decode(
        self, file: pa.NativeFile, groups: Sequence[int], columns: list[str], rows: int | None
    ) -> Iterator[pa.Table]:
        """Columns of some groups: as one table, or in pieces of `rows` rows.

        Raises:
            OSError, pa.ArrowException: a damaged file.
        """
