"""Access to files on the local disk and in object stores (`s3://`, `gs://`, `hf://`)."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mismatchctl.errors import ConfigError, DataError
from mismatchctl.io.files import read_regular_file, require_regular_file

if TYPE_CHECKING:
    import pyarrow as pa

ResultT = TypeVar("ResultT")


def escape_unprintable(text: str) -> str:
    """Escape control characters and invalid characters, so that a terminal can show the text safely."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_names(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(escape_unprintable, names[:most])) + more


def first_error_line(error: BaseException) -> str:
    text = f"the key {error} is missing" if isinstance(error, KeyError) else str(error).strip()
    # Keep the first sentence. A capitalized word follows its period, unlike in "No. 3" and "my. runs/A. B/c".
    first = (text.splitlines() or [type(error).__name__])[0]
    line = re.split(r"(?<!\b[A-Z])\. (?=[A-Z][^\s/]*(?:\s|$))", first)[0]
    return escape_unprintable(line.rstrip(".")[:200])


_REASONS = {
    r"NO_?SUCH_?BUCKET|bucket does not exist|Bucket '.*' not found": ("the bucket does not exist", "bucket"),
    r"INVALID_?ACCESS_?KEY|SIGNATURE_?DOES_?NOT_?MATCH|INVALID_CLIENT_TOKEN|EXPIRED_?TOKEN|INVALID_?TOKEN"
    r"|UNRECOGNIZED_CLIENT|\b401\b|UNAUTHENTICATED|unauthorized|credentials": (
        "the credentials are missing or are not accepted",
        "credentials",
    ),
    r"ACCESS_?DENIED|\b403\b|PERMISSION_?DENIED|forbidden|gated": ("access is denied", "credentials"),
    r"PermanentRedirect|AuthorizationHeaderMalformed|\b301\b": ("the bucket is in another region", "region"),
    r"SLOW_?DOWN|INTERNAL_?FAILURE|Internal_?Error|SERVICE_UNAVAILABLE|\b50[0-4]\b": (
        "the object store failed repeatedly",
        "later",
    ),
    r"NETWORK_CONNECTION|curlCode|connect(ion )?(refused|reset|error)|resolve|name or service|timed? ?out"
    r"|UNAVAILABLE": ("the store cannot be reached", "network"),
}
"""Pattern in an object store client's error message -> (problem, key of the remedy in `store_error`)."""

_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, of a user who may list and read the bucket",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "hf": "run `hf auth login`, or set HF_TOKEN",
}
_ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "hf": "HF_ENDPOINT"}
_REMEDIES = {
    "bucket": "check the name of the bucket and the endpoint",
    "region": "unset AWS_ENDPOINT_URL, or set AWS_ENDPOINT_URL and AWS_REGION for the region of the bucket",
    "later": "run again later",
}


def store_error(scheme: str, error: BaseException, path: str) -> DataError:
    """Describe an error of an object store. The client's message is left out, because it can contain secrets."""
    shown, text = escape_unprintable(path), f"{type(error).__name__} {error}"
    if isinstance(error, FileNotFoundError):
        remedy = "check the name of the object. The object may have been deleted"
        return DataError("the object does not exist", file=shown, remedy=remedy)
    for pattern, (problem, about) in _REASONS.items():
        if re.search(pattern, text, re.IGNORECASE):
            network = f"check the network, and {_ENDPOINT[scheme]} if it is set"
            remedies = {**_REMEDIES, "credentials": _CREDENTIALS[scheme], "network": network}
            return DataError(problem, file=shown, remedy=remedies[about])
    code = re.search(r"AWS Error \w+|HTTP status \d+", text)
    kind = code[0] if code else type(error).__name__
    return DataError(f"cannot be read ({kind})", file=shown, remedy="check the path and your access rights")


SCHEMES = ("s3", "gs", "hf")
ATTEMPTS = 5  # number of tries per request
_RETRY_SECONDS = 20
_CONNECT_SECONDS, _REQUEST_SECONDS = 10, 60


@functools.lru_cache(maxsize=64)
def open_filesystem(scheme: str, bucket: str) -> Any:
    from pyarrow import fs

    if scheme == "hf":
        try:
            from huggingface_hub import HfFileSystem
        except ImportError:
            raise ConfigError("hf:// needs the package huggingface_hub: pip install 'mismatchctl[hf]'") from None
        return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))
    if scheme == "gs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        protocol, _, host = emulator.rpartition("://")
        return fs.GcsFileSystem(
            anonymous=bool(emulator),
            endpoint_override=host or None,
            scheme=protocol or ("http" if emulator else "https"),
            retry_time_limit=timedelta(seconds=_RETRY_SECONDS),
        )
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return fs.S3FileSystem(
        endpoint_override=endpoint,
        region=None if endpoint else fs.resolve_s3_region(bucket),  # the environment may name another region
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        connect_timeout=_CONNECT_SECONDS,
        request_timeout=_REQUEST_SECONDS,
    )


class Store:
    """Files on this machine. A location is an absolute path."""

    remote = False
    error_types: tuple[type[Exception], ...] = (OSError, ValueError)
    """Exceptions that reading from the store can raise."""

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_broken_link(self, path: str) -> bool:
        return os.path.islink(path) and not os.path.exists(path)

    def list_names(self, folder: str) -> list[str]:
        try:
            return os.listdir(folder or ".")
        except OSError:
            return []

    def walk(self, folder: str) -> Iterator[str]:
        """Yield all files below a folder. Skip names that start with `.` or `_`. Visit each folder only once."""
        seen: set[tuple[int, int]] = set()
        pending = [folder]  # os.walk recurses before Python 3.12, and folders may be nested thousands deep
        while pending:
            place = pending.pop()
            try:
                found = os.stat(place)
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
                with os.scandir(place) as listing:
                    entries = [(one.path, _is_folder(one)) for one in listing if not one.name.startswith((".", "_"))]
            except OSError as error:
                raise DataError(f"cannot be listed ({error.strerror})", file=escape_unprintable(place)) from None
            pending += sorted((path for path, is_folder in entries if is_folder), reverse=True)
            yield from (os.path.normpath(path) for path, is_folder in entries if not is_folder)

    def glob(self, pattern: str) -> dict[str, bool]:
        """Map each matching path to True if it is a file or a broken link, and to False if it is a folder."""
        matches = glob.glob(pattern, recursive=True)
        found = {path: os.path.isfile(path) or self.is_broken_link(path) for path in matches}
        return {path: is_file for path, is_file in found.items() if is_file or os.path.isdir(path)}

    def location(self, path: str) -> str:
        return os.path.abspath(path)

    def resolve(self, path: str) -> str:
        return os.path.realpath(path)

    def version(self, location: str, file: pa.NativeFile) -> str:
        return str(os.stat(location).st_mtime_ns)

    def explain(self, error: BaseException, path: str) -> DataError:
        if self.is_broken_link(path):
            problem = f"broken link to {escape_unprintable(os.readlink(path))}"
            return DataError(problem, file=escape_unprintable(path), remedy="repair or remove the link")
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else first_error_line(error)
        if number == errno.EINVAL:  # raised by require_regular_file
            reason = getattr(error, "strerror", None) or reason
        remedy = "change the permissions of the file" if number == errno.EACCES else None
        return DataError(f"cannot be opened ({reason})", file=escape_unprintable(path), remedy=remedy)

    @contextlib.contextmanager
    def open(self, location: str) -> Iterator[pa.NativeFile]:
        with self._open(location) as file:
            yield file

    def _open(self, location: str) -> pa.NativeFile:
        import pyarrow as pa

        require_regular_file(location)  # opening a pipe would wait for its writer
        return pa.OSFile(os.fsencode(location))  # as bytes, because a path may contain bytes that are not UTF-8

    def retry(self, work: Callable[[], ResultT]) -> ResultT:
        """Call `work`. Subclasses for object stores call it again after a temporary error."""
        return work()

    def read_start(self, path: str, length: int) -> bytes:
        try:
            with self.open(self.location(path)) as file:
                return bytes(file.read(length))
        except self.error_types as error:
            raise self.explain(error, path) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads to itself
        return False


_HIDDEN_MESSAGE = "Failed to flush response stream"
_FIRST_WAIT_SECONDS = 0.05


class ObjectStore(Store):
    """Objects under `scheme://`. A folder is a common prefix of object names."""

    remote = True

    def __init__(self, scheme: str, filesystem: Any) -> None:
        self.scheme, self.filesystem = scheme, filesystem
        if scheme == "hf":  # its client raises exceptions of many libraries
            self.error_types = (Exception,)

    def is_file(self, path: str) -> bool:
        return bool(self._info(path).is_file)

    def is_folder(self, path: str) -> bool:
        return bool(self._info(path).type.name == "Directory")

    def list_names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path, _ in self._list(folder, recursive=False)]

    def walk(self, folder: str) -> Iterator[str]:
        for path, is_file in self._list(folder, recursive=True):
            below = path[len(folder) :].strip("/").split("/")
            if is_file and not any(name.startswith((".", "_")) for name in below):
                yield path

    def glob(self, pattern: str) -> dict[str, bool]:
        """Map each matching path to True if it is a file, else to False. `**` matches any number of folders."""
        parts = pattern.split("/")
        fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        found = self._list("/".join(parts[:fixed]), recursive=fixed < len(parts) - 1)
        return {path: is_file for path, is_file in found if _matches(path.split("/")[fixed:], parts[fixed:])}

    def location(self, path: str) -> str:
        return path

    def resolve(self, path: str) -> str:
        return path

    def version(self, location: str, file: pa.NativeFile) -> str:
        tag = file.metadata().get("ETag")
        return tag.decode() if tag else str(self._info(location).mtime_ns)

    def explain(self, error: BaseException, path: str) -> DataError:
        return store_error(self.scheme, error, path)

    def retry(self, work: Callable[[], ResultT]) -> ResultT:
        """Run a read operation, and repeat it after a temporary error that the client does not handle."""
        for attempt in range(1, ATTEMPTS):
            try:
                return work()
            except OSError as error:
                if _HIDDEN_MESSAGE not in str(error):
                    raise
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt)
        return work()

    def _open(self, location: str) -> pa.NativeFile:
        return self.filesystem.open_input_file(location.partition("://")[2])

    def _info(self, path: str) -> Any:
        try:
            return self.filesystem.get_file_info(path.partition("://")[2])
        except self.error_types as error:
            raise self.explain(error, path) from error

    def _list(self, folder: str, recursive: bool) -> list[tuple[str, bool]]:
        from pyarrow.fs import FileSelector

        try:
            found = self.filesystem.get_file_info(FileSelector(folder.partition("://")[2], recursive=recursive))
        except FileNotFoundError:
            return []
        except self.error_types as error:
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


MOST_BYTES = 1 << 30  # maximum size of a local file that `read_file` reads, in bytes
_REMOTE_PATH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://?(.*)", re.DOTALL)
_LOCAL_DISK = Store()


def is_remote(path: str) -> bool:
    return _REMOTE_PATH.match(path) is not None


def normalize_path(path: str) -> str:
    match = _REMOTE_PATH.match(path)
    if match is None:
        return os.path.normpath(path)
    return f"{match[1].lower()}://{posixpath.normpath(match[2]) if match[2] else ''}"


def find_store(path: str) -> Store:
    match = _REMOTE_PATH.match(path)
    if match is None:
        return _LOCAL_DISK
    scheme, rest = match[1].lower(), match[2]
    bucket = rest.split("/", 1)[0]
    if "@" in bucket:
        shown = f"{scheme}://{escape_unprintable(rest.rpartition('@')[2])}"
        remedy = "put the credentials into environment variables or a profile"
        raise DataError("a path must not contain credentials", file=shown, remedy=remedy)
    if scheme not in SCHEMES:
        remedy = f"copy the file to a disk, or to {', '.join(f'{name}://' for name in SCHEMES)}"
        raise DataError(f"{scheme}:// is not supported", file=escape_unprintable(path), remedy=remedy)
    repository = ("repository", "datasets/OWNER/NAME/FOLDER", 2)
    what, shape, count = repository if scheme == "hf" else ("bucket", "BUCKET/FOLDER", 1)
    root = rest.split("/")[:count]
    if len(root) < count or not all(root) or any(map(glob.has_magic, root)):
        raise DataError(
            f"missing {what} in the path", file=escape_unprintable(path), remedy=f"write {scheme}://{shape}"
        )
    try:
        return ObjectStore(scheme, open_filesystem(scheme, bucket))
    except (OSError, ValueError) as error:
        raise store_error(scheme, error, path) from error


def walk_files(folder: Path) -> Iterator[Path]:
    return map(Path, _LOCAL_DISK.walk(str(folder)))


def read_file(path: str | Path) -> bytes:
    if not is_remote(str(path)):
        return read_regular_file(path, MOST_BYTES)
    where = normalize_path(str(path))
    store = find_store(where)
    try:
        with store.open(where) as file:
            return bytes(file.read())
    except store.error_types as error:
        raise store.explain(error, where) from error
