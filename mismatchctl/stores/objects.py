"""Objects behind `s3://`, `gs://` and `hf://`, where folders are only the beginnings of names."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mismatchctl.errors import DataError
from mismatchctl.stores.clients import ATTEMPTS
from mismatchctl.stores.failures import failure
from mismatchctl.stores.store import Done, Store

if TYPE_CHECKING:
    import pyarrow as pa

_NOT_REPEATED = "Failed to flush response stream"
_FIRST_WAIT = 0.05


@dataclass(frozen=True)
class ObjectStore(Store):
    """Objects behind `scheme://`; a folder is what objects have their names' beginning in common with."""

    scheme: str
    filesystem: Any

    remote = True

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What its client raises: the hub's lets the exceptions of its own clients through."""
        return (Exception,) if self.scheme == "hf" else super().failures

    def is_file(self, path: str) -> bool:
        """Whether there is such an object."""
        return bool(self._info(path).is_file)

    def is_folder(self, path: str) -> bool:
        """Whether there are objects below the path."""
        from pyarrow.fs import FileType

        return bool(self._info(path).type == FileType.Directory)

    def names(self, folder: str) -> list[str]:
        """What lies in a folder."""
        return [path.rpartition("/")[2] for path, _ in self._list(folder, recursive=False)]

    def walk(self, folder: str) -> Iterator[str]:
        """All objects below a folder, save hidden ones and `_names`."""
        for path, is_file in self._list(folder, recursive=True):
            below = path[len(folder) :].strip("/").split("/")
            if is_file and not any(name.startswith((".", "_")) for name in below):
                yield path

    def glob(self, pattern: str) -> dict[str, bool]:
        """What a pattern matches; `**` stands for any number of folders."""
        parts = pattern.split("/")
        fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        recursive = fixed < len(parts) - 1
        found = self._list("/".join(parts[:fixed]), recursive)
        return {path: is_file for path, is_file in found if _matches(path.split("/")[fixed:], parts[fixed:])}

    def location(self, path: str) -> str:
        """The path itself."""
        return path

    def version(self, location: str, file: pa.NativeFile) -> str:
        """The object's tag, which came with opening it; else when it was written."""
        tag = file.metadata().get("ETag")
        return tag.decode() if tag else str(self._info(location).mtime_ns)

    def explain(self, error: BaseException, path: str) -> DataError:
        """What went wrong at a path."""
        return failure(self.scheme, error, path)

    def patiently(self, work: Callable[[], Done]) -> Done:
        """Do it again after a failure that its client lets pass: of a request shorter than the error's text."""
        for attempt in range(1, ATTEMPTS):
            try:
                return work()
            except OSError as error:
                if _NOT_REPEATED not in str(error):
                    raise
            time.sleep(_FIRST_WAIT * 2**attempt)
        return work()

    def _open(self, location: str) -> pa.NativeFile:
        return self.filesystem.open_input_file(self._key(location))

    def _key(self, path: str) -> str:
        return path.partition("://")[2]

    def _info(self, path: str) -> Any:
        try:
            return self.filesystem.get_file_info(self._key(path))
        except self.failures as error:
            raise self.explain(error, path) from error

    def _list(self, folder: str, recursive: bool) -> list[tuple[str, bool]]:
        from pyarrow.fs import FileSelector

        try:
            found = self.filesystem.get_file_info(FileSelector(self._key(folder), recursive=recursive))
        except FileNotFoundError:
            return []
        except self.failures as error:
            raise self.explain(error, folder) from error
        return [(f"{self.scheme}://{one.path}", one.is_file) for one in found]


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(names[skipped:], rest) for skipped in range(len(names) + 1))
    hidden = bool(names) and names[0].startswith(".") and not first.startswith(".")
    return bool(names) and not hidden and fnmatchcase(names[0], first) and _matches(names[1:], rest)
