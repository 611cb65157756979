"""Where files lie: on a disk, or in an object store behind `s3://`, `gs://` or `hf://`.

A store lists, opens and tells apart files, and puts its errors into one sentence. What the files hold, and how runs
are named, is found elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import posixpath
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mismatchctl.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

Done = TypeVar("Done")
SCHEMES = ("s3", "gs", "hf")
_REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?(.*)", re.DOTALL)
_NOT_REPEATED = "Failed to flush response stream"
_FIRST_WAIT = 0.05
_ATTEMPTS = 5
_RETRY_SECONDS = 20
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes escaped, safe to show in a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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

    @abstractmethod
    def same(self, path: str) -> str:
        """A name that two paths share when they lead to the same place."""

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


def remote(path: str) -> bool:
    """Whether a path names something in an object store."""
    return _REMOTE.match(path) is not None


def normal(path: str) -> str:
    """The path without `.`, `..` and doubled or trailing separators."""
    match = _REMOTE.match(path)
    if match is None:
        return os.path.normpath(path)
    return f"{match[1].lower()}://{posixpath.normpath(match[2]) if match[2] else ''}"


def store_of(path: str) -> Store:
    """The store that a path leads to.

    Raises:
        DataError: a scheme that is not read, or credentials in the path.
        ConfigError: a package that the store needs is not installed.
    """
    match = _REMOTE.match(path)
    if match is None:
        return _DISK
    scheme, rest = match[1].lower(), match[2]
    bucket = rest.split("/", 1)[0]
    if "@" in bucket:
        shown = f"{scheme}://{printable(rest.rpartition('@')[2])}"
        remedy = "put them into the environment or a profile"
        raise DataError("credentials do not belong into a path", file=shown, remedy=remedy)
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise DataError(f"{scheme}:// is not read", file=printable(path), remedy=f"copy it to a disk, or to {known}")
    if not bucket or glob.has_magic(bucket):
        raise DataError("this names no bucket", file=printable(path), remedy=f"write {scheme}://BUCKET/FOLDER")
    try:
        return ObjectStore(scheme, _filesystem(scheme, bucket))
    except (OSError, ValueError) as error:
        raise _remote_error(scheme, error, path) from error


class Disk(Store):
    """Files of this machine."""

    def is_file(self, path: str) -> bool:
        """Whether the path names a file."""
        return os.path.isfile(path)

    def is_folder(self, path: str) -> bool:
        """Whether the path names a folder."""
        return os.path.isdir(path)

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
        """What a pattern matches."""
        found = {path: os.path.isfile(path) for path in glob.glob(pattern, recursive=True)}
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
        reason = getattr(error, "strerror", None) or first_line(error)
        return DataError(f"cannot be opened ({reason})", file=printable(path))

    def _open(self, location: str) -> pa.NativeFile:
        import pyarrow as pa

        return pa.OSFile(location)


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

    def same(self, path: str) -> str:
        """The path itself."""
        return path

    def version(self, location: str, file: pa.NativeFile) -> str:
        """The object's tag, which came with opening it; else when it was written."""
        tag = file.metadata().get("ETag")
        return tag.decode() if tag else str(self._info(location).mtime_ns)

    def explain(self, error: BaseException, path: str) -> DataError:
        """What went wrong at a path."""
        return _remote_error(self.scheme, error, path)

    def patiently(self, work: Callable[[], Done]) -> Done:
        """Do it again after a failure that its client lets pass: of a request shorter than the error's text."""
        for attempt in range(1, _ATTEMPTS):
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


_DISK = Disk()


def read_whole(path: str | Path) -> bytes:
    """The content of a small file, wherever it lies.

    Raises:
        OSError: a file of the disk that cannot be read.
        DataError: an object that cannot be read.
    """
    if not remote(str(path)):
        return Path(path).read_bytes()
    where = normal(str(path))
    store = store_of(where)
    try:
        with store.open(where) as file:
            return bytes(file.read())
    except store.failures as error:
        raise store.explain(error, where) from error


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not names
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        return any(_matches(names[skipped:], rest) for skipped in range(len(names) + 1))
    hidden = bool(names) and names[0].startswith(".") and not first.startswith(".")
    return bool(names) and not hidden and fnmatchcase(names[0], first) and _matches(names[1:], rest)


@functools.lru_cache(maxsize=64)
def _filesystem(scheme: str, bucket: str) -> Any:
    return {"s3": _s3, "gs": _gcs, "hf": _hugging_face}[scheme](bucket)


def forget() -> None:
    """Connect anew at the next path: credentials or endpoints in the environment may have changed."""
    _filesystem.cache_clear()


def _s3(bucket: str) -> Any:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem, resolve_s3_region

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return S3FileSystem(
        endpoint_override=endpoint,
        region=None if endpoint else resolve_s3_region(bucket),  # whatever the environment says of others
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
    )


def _gcs(bucket: str) -> Any:
    from pyarrow.fs import GcsFileSystem

    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    scheme, _, host = emulator.rpartition("://")
    return GcsFileSystem(
        anonymous=bool(emulator),
        endpoint_override=host or None,
        scheme=scheme or ("http" if emulator else "https"),
        retry_time_limit=timedelta(seconds=_RETRY_SECONDS),
    )


def _hugging_face(bucket: str) -> Any:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        from huggingface_hub import HfFileSystem
    except ImportError:
        raise ConfigError("hf:// needs a package more: pip install 'mismatchctl[hf]'") from None
    return PyFileSystem(FSSpecHandler(HfFileSystem()))


_REASONS = {
    r"NO_?SUCH_?BUCKET|bucket does not exist|Bucket '.*' not found": ("there is no such bucket", "bucket"),
    r"INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT_?MATCH|INVALID_CLIENT_TOKEN|EXPIRED_?TOKEN|INVALID_?TOKEN"
    r"|UNRECOGNIZED_CLIENT|\b401\b|UNAUTHENTICATED|unauthorized|credentials": (
        "the credentials are missing or are not accepted",
        "credentials",
    ),
    r"ACCESS_?DENIED|\b403\b|PERMISSION_?DENIED|forbidden|gated": ("access is denied", "credentials"),
    r"PermanentRedirect|AuthorizationHeaderMalformed|\b301\b": ("the bucket is in another region", "region"),
    r"SLOW_?DOWN|INTERNAL_?FAILURE|Internal_?Error|SERVICE_UNAVAILABLE|\b50[0-4]\b": (
        "the store fails, again and again",
        "later",
    ),
    r"NETWORK_CONNECTION|curlCode|connect(ion )?(refused|reset|error)|resolve|name or service|timed? ?out"
    r"|UNAVAILABLE": ("the store cannot be reached", "network"),
}
"""Error text of the stores' clients -> what to say, and what the remedy is about."""

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of somebody who may list and read it",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run `hf auth login`, or set HF_TOKEN",
}
_REMEDIES = {
    "bucket": "check the name, and the endpoint that is asked",
    "region": "leave AWS_ENDPOINT_URL unset, or name the endpoint and AWS_REGION of that bucket",
    "network": "check the network, and the endpoint where the environment names one (AWS_ENDPOINT_URL for s3://)",
    "later": "run again later",
}


def _remote_error(scheme: str, error: BaseException, path: str) -> DataError:
    """One sentence about a failing store. Its client's own words may hold secrets and are not repeated."""
    shown, text = printable(path), f"{type(error).__name__} {error}"
    if isinstance(error, FileNotFoundError):
        return DataError("there is no such object", file=shown, remedy="check the name, and that it was not deleted")
    for pattern, (problem, about) in _REASONS.items():
        if re.search(pattern, text, re.IGNORECASE):
            remedy = _CREDENTIALS[scheme] if about == "credentials" else _REMEDIES[about]
            return DataError(problem, file=shown, remedy=remedy)
    code = re.search(r"AWS Error \w+|HTTP status \d+", text)
    kind = code[0] if code else type(error).__name__
    return DataError(f"cannot be read ({kind})", file=shown, remedy="check the path and the store")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, short and printable."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])
