"""What every store does: list, open and tell apart files, and put its errors into one sentence."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from mismatchctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Done = TypeVar("Done")


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes escaped, safe to show in a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short and printable."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])


class Store(ABC):
    """One place where files lie. Paths are as the user wrote them; a location is a path that opens anywhere."""

    remote = False

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What it raises when it fails."""
        return (OSError, ValueError)

    @abstractmethod
    def is_file(self, path: str) -> bool:
        """Whether the path names a file."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether the path names a folder."""

    def leads_nowhere(self, path: str) -> bool:
        """Whether the path is a link to what is not there."""
        return False

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """What lies in a folder; nothing where there is no such folder."""

    @abstractmethod
    def walk(self, folder: str) -> Iterator[str]:
        """All files below a folder, save hidden ones and `_names`."""

    @abstractmethod
    def glob(self, pattern: str) -> dict[str, bool]:
        """What a pattern with wildcards matches, and whether it is a file."""

    @abstractmethod
    def location(self, path: str) -> str:
        """The path as it means the same everywhere."""

    def same(self, path: str) -> str:
        """A name that two paths share when they lead to the same place."""
        return self.location(path)

    @abstractmethod
    def version(self, location: str, file: pa.NativeFile) -> str:
        """Something that changes when the opened file is written again."""

    @abstractmethod
    def explain(self, error: BaseException, path: str) -> DataError:
        """What went wrong at a path, as one sentence."""

    @abstractmethod
    def _open(self, location: str) -> pa.NativeFile: ...

    @contextlib.contextmanager
    def open(self, location: str) -> Iterator[pa.NativeFile]:
        """The file, opened to be read anywhere in it."""
        with self._open(location) as file:
            yield file

    def patiently(self, work: Callable[[], Done]) -> Done:
        """Do what reads from the store, and may be done again."""
        return work()

    def start(self, path: str, length: int) -> bytes:
        """The first bytes of a file."""
        try:
            with self.open(self.location(path)) as file:
                return bytes(file.read(length))
        except self.failures as error:
            raise self.explain(error, path) from error
