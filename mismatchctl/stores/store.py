"""What every store does: list, open and tell apart files, put its errors into one sentence; and this machine's disk."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
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


class Disk(Store):
    """Files of this machine."""

    def is_file(self, path: str) -> bool:
        """Whether the path names a file."""
        return os.path.isfile(path)

    def is_folder(self, path: str) -> bool:
        """Whether the path names a folder."""
        return os.path.isdir(path)

    def leads_nowhere(self, path: str) -> bool:
        """Whether the path is a link to what is not there."""
        return os.path.islink(path) and not os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        """What lies in a folder."""
        try:
            return os.listdir(folder or ".")
        except OSError:
            return []

    def walk(self, folder: str) -> Iterator[str]:
        """All files below a folder. Links are followed once; hidden names and `_names` are left out."""

        def refuse(error: OSError) -> None:
            raise DataError(f"cannot be listed ({error.strerror})", file=printable(str(error.filename)))

        seen: set[str] = set()
        for place, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
            real = os.path.realpath(place)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
            for name in names:
                if not name.startswith((".", "_")):
                    yield os.path.normpath(os.path.join(place, name))

    def glob(self, pattern: str) -> dict[str, bool]:
        """What a pattern matches. A link that leads nowhere is a file, whose absence is told when it is opened."""
        matches = glob.glob(pattern, recursive=True)
        found = {path: os.path.isfile(path) or self.leads_nowhere(path) for path in matches}
        return {path: is_file for path, is_file in found.items() if is_file or os.path.isdir(path)}

    def location(self, path: str) -> str:
        """The absolute path."""
        return os.path.abspath(path)

    def same(self, path: str) -> str:
        """The path with its links followed."""
        return os.path.realpath(path)

    def version(self, location: str, file: pa.NativeFile) -> str:
        """When the file was written."""
        return str(os.stat(location).st_mtime_ns)

    def explain(self, error: BaseException, path: str) -> DataError:
        """What went wrong at a path."""
        if self.leads_nowhere(path):
            where = printable(os.readlink(path))
            return DataError(f"this link leads nowhere, to {where}", file=printable(path), remedy="mend or remove it")
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else first_line(error)
        remedy = "let this user read it" if number == errno.EACCES else None
        return DataError(f"cannot be opened ({reason})", file=printable(path), remedy=remedy)

    def _open(self, location: str) -> pa.NativeFile:
        import pyarrow as pa

        return pa.OSFile(os.fsencode(location))  # as bytes, which need not be UTF-8
