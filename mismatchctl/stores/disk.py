"""Files of this machine."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mismatchctl.errors import DataError
from mismatchctl.stores.store import Store, first_line, printable

if TYPE_CHECKING:
    import pyarrow as pa


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
