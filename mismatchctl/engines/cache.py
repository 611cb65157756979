"""`--cache`: what was made of a file is kept, and found again while the file, the question and the tool are the same.

A folder of two kinds of files. `files/` remembers the SHA-256 of every file that was read, under its place and status
(device, inode, size, times of its last change of content and of status): as long as these are the same, so is the
content, and it need not be hashed again. The time of the last change of status cannot be set by a user, so that even
a write that restores the time of the content is seen. A status younger than `SETTLED` is not relied on: a write within
the same tick of the clock would not move it. `parts/` holds the parts of shards, by SHA-256 of content, question and
tool. Any entry may be deleted at any time; two processes may share the folder; what cannot be read is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel

import mismatchctl
from mismatchctl.dumps import Dump, DumpFile
from mismatchctl.engines.local import default_threads, ordered_map
from mismatchctl.engines.pack import UnpackableError, pack, unpack
from mismatchctl.engines.work import Engine, MergeableT, Shard, Work
from mismatchctl.errors import ConfigError, MismatchctlError
from mismatchctl.files import write_atomically
from mismatchctl.stores import store_of
from mismatchctl.texts import decoded, parse_json

SETTLED = 2.0
"""Seconds after its last change from which a file's status is relied on."""
_CHUNK = 1 << 20
_CHECK, _SIZE = 32, 8
"""Bytes of a part's checksum, and of the size of what it unpacks to."""


@dataclass(frozen=True)
class Cached:
    """An engine that makes only the shards that are not in a folder yet.

    Attributes:
        engine: makes the others.
        folder: where parts are kept; made if it is not there.
    """

    engine: Engine
    folder: Path

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """The part of each shard.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._prepare()
        shards = list(shards)
        contents = {file.index: digest for file, digest in self._digests(dump.files)}
        names = [self._names(work, dump, shard, contents) for shard in shards]
        kept = [next((name for name in found if name.exists()), None) for found in names]
        made = self.engine.map(work, dump, [shard for shard, place in zip(shards, kept, strict=True) if place is None])
        for shard, found, place in zip(shards, names, kept, strict=True):
            part = None if place is None else self._load(place, work.makes, shard.file.index)
            if part is None:
                _, part = next(made if place is None else self.engine.map(work, dump, [shard]))
                if found and all(self._digest(file) == contents[file.index] for file in shard.files):
                    self._save(found[0], part.moved(-shard.file.index))
            yield shard, part

    def _prepare(self) -> None:
        try:
            for name in ("files", "parts"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--cache {self.folder}: cannot be written: {error.strerror or error}") from None

    def _names(
        self, work: Work[MergeableT], dump: Dump, shard: Shard, contents: Mapping[int, str | None]
    ) -> list[Path]:
        """Where the part of a shard may be found: first where it would be saved."""
        content = [contents[file.index] for file in shard.files]
        if None in content:
            return []
        rows = shard.units[0].start, shard.units[-1].start + shard.units[-1].rows
        files = shard.files if len(shard.files) > 1 else ()  # what is told of several files numbers and names them
        places = [[file.index - shard.file.index, file.path] for file in files]
        about = [content, places, rows, described(dump.question(shard.file)), tool()]
        return [self.folder / "parts" / _hash([*about, described(asked)]) for asked in work.asked(shard.file)]

    def _load(self, place: Path, kind: Any, index: int) -> Any:
        """The part at a place; None if it is not there or damaged."""
        try:
            content = place.read_bytes()
            checksum, size, body = content[:_CHECK], content[_CHECK : _CHECK + _SIZE], content[_CHECK + _SIZE :]
            if _checksum(place, size, body) != checksum:
                return None
            unpacked = pa.decompress(body, int.from_bytes(size, "little"), "zstd", asbytes=True)
            return unpack(unpacked, kind).moved(index)
        except (OSError, UnpackableError, pa.ArrowException, ValueError, MemoryError):
            return None

    def _save(self, place: Path, part: Any) -> None:
        """Keep a part; one that cannot be packed or written is made again the next time."""
        with contextlib.suppress(UnpackableError, MismatchctlError, OSError):
            content = pack(part)
            size, body = len(content).to_bytes(_SIZE, "little"), pa.compress(content, "zstd", asbytes=True)
            write_atomically(place, _checksum(place, size, body) + size + body, at_once=True)

    def _digests(self, files: Sequence[DumpFile]) -> Iterator[tuple[DumpFile, str | None]]:
        return ordered_map(self._digest, files, default_threads())

    def _digest(self, file: DumpFile) -> str | None:
        """SHA-256 of what a file holds, or what its store calls its version; None if it is not what was opened."""
        if not file.location:
            return None
        if store_of(file.location).remote:
            return _hash([file.location, file.stored, file.version])
        memo = self.folder / "files" / _hash([file.location])
        try:
            with open(file.location, "rb") as opened:
                status = _status(opened.fileno())
                if (status[2], str(status[3])) != (file.stored, file.version):
                    return None
                known = _read_memo(memo)
                if known is not None and known[0] == status:
                    return known[1]
                digest = hashlib.sha256()
                while chunk := opened.read(_CHUNK):
                    digest.update(chunk)
                if _status(opened.fileno()) != status:
                    return None
        except OSError:
            return None
        if time.time() - max(status[3], status[4]) / 1e9 > SETTLED:
            with contextlib.suppress(MismatchctlError, OSError):
                write_atomically(memo, json.dumps([status, digest.hexdigest()]).encode(), at_once=True)
        return digest.hexdigest()


def _checksum(place: Path, size: bytes, body: bytes) -> bytes:
    """Of a part and of its name, which says what it is of: one that lies under another's name is damaged."""
    return hashlib.sha256(place.name.encode() + size + body).digest()


def _status(handle: int) -> list[int]:
    status = os.fstat(handle)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_memo(place: Path) -> tuple[list[int], str] | None:
    try:
        status, digest = parse_json(decoded(place.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return (status, digest) if isinstance(digest, str) else None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def tool() -> str:
    """What tells this version of the code, and of what it computes with, from others."""
    root = Path(mismatchctl.__file__).parent
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{mismatchctl.__version__} {sources.hexdigest()} numpy {np.__version__} pyarrow {pa.__version__}"


def described(value: Any) -> Any:
    """A value as JSON that is the same in every process, and another for every other value.

    Raises:
        TypeError: a value of a kind that cannot be described.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, value.model_dump(mode="json")]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            {field.name: described(getattr(value, field.name)) for field in fields(value)},
        ]
    if isinstance(value, Mapping):
        return ["mapping", sorted(([described(key), described(item)] for key, item in value.items()), key=json.dumps)]
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if isinstance(value, frozenset):
        return ["set", sorted((described(item) for item in value), key=json.dumps)]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, partial):
        return ["partial", described(value.func), described(value.args), described(value.keywords)]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"cannot describe a {type(value).__qualname__}")
