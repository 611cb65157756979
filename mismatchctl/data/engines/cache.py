"""Cache of partial results (`--cache`): packed values that are reused for the same file, question and version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel

from mismatchctl.data.engines.engine import Engine, MergeableT, Shard, Work, default_threads, ordered_map
from mismatchctl.data.files import DumpFile
from mismatchctl.data.reader import Dump
from mismatchctl.errors import ConfigError, MismatchctlError
from mismatchctl.io.files import write_atomically
from mismatchctl.io.stores import find_store
from mismatchctl.io.version import __version__
from mismatchctl.io.yaml import decode_utf8, parse_json

_ALIGNMENT = 16
_PLAIN_TYPES = (bool, int, float, str)
_BUFFER_KINDS = "biufU"
"""Dtype kinds that are stored as raw bytes."""
_DTYPE_PATTERN = re.compile(rf"[<>|][{_BUFFER_KINDS}]\d{{1,9}}")


class UnpackableError(ValueError):
    """The value cannot be packed, or the bytes are not a packed value."""


def pack_value(value: Any) -> bytes:
    """Serialize a value to bytes.

    Raises:
        UnpackableError: the value contains an unsupported type.
    """
    buffers: list[bytes] = []
    tree = json.dumps(_pack_tree(value, buffers), separators=(",", ":")).encode()
    header = struct.pack("<Q", len(tree))
    return b"".join([header, tree, b"\0" * _padding(len(header) + len(tree)), *buffers])


def unpack_value(content: bytes, kind: Any) -> Any:
    """Deserialize a value. Only dataclasses that the type hints of `kind` mention are accepted.

    Raises:
        UnpackableError: the bytes are not such a value.
    """
    try:
        length = struct.unpack_from("<Q", content)[0]
        tree = parse_json(decode_utf8(bytes(content[8 : 8 + length])), as_python_writes=True)
        start = 8 + length + _padding(8 + length)
        return _unpack_tree(tree, memoryview(content)[start:], _known_dataclasses(kind))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise UnpackableError(f"not a packed value: {error}") from None


@cache
def _known_dataclasses(kind: Any) -> dict[str, type]:
    return _find_dataclasses(kind, {})


def _find_dataclasses(hint: Any, found: dict[str, type]) -> dict[str, type]:
    """Collect a dataclass and the dataclasses of its fields, by name."""
    if isinstance(hint, type) and is_dataclass(hint) and hint.__qualname__ not in found:
        found[hint.__qualname__] = hint
        hints = get_type_hints(hint)
        for field in fields(hint):
            _find_dataclasses(hints[field.name], found)
    for part in (get_origin(hint), *get_args(hint)):
        if part is not None:
            _find_dataclasses(part, found)
    return found


def _padding(length: int) -> int:
    return -length % _ALIGNMENT


def _pack_tree(value: Any, buffers: list[bytes]) -> Any:
    if value is None or type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *(_pack_tree(item, buffers) for item in value)]
    if isinstance(value, Mapping):
        pairs = [[_pack_tree(key, buffers), _pack_tree(item, buffers)] for key, item in value.items()]
        return ["dict", *pairs]
    if isinstance(value, np.generic):
        return ["scalar", _pack_array(np.asarray(value), buffers)]
    if isinstance(value, np.ndarray):
        return _pack_array(value, buffers)
    if is_dataclass(value) and not isinstance(value, type):
        known = {field.name: _pack_tree(getattr(value, field.name), buffers) for field in fields(value)}
        return [type(value).__qualname__, known]
    raise UnpackableError(f"cannot pack a {type(value).__qualname__}")


def _pack_array(values: NDArray[Any], buffers: list[bytes]) -> Any:
    if values.dtype == object:
        return ["objects", list(values.shape), [_pack_tree(item, buffers) for item in values.ravel().tolist()]]
    if values.dtype.kind not in _BUFFER_KINDS:
        raise UnpackableError(f"cannot pack an array of {values.dtype}")
    buffer = np.ascontiguousarray(values).tobytes()
    at = sum(map(len, buffers))
    buffers.append(buffer + b"\0" * _padding(len(buffer)))
    return ["array", values.dtype.str, list(values.shape), at]


def _unpack_tree(tree: Any, buffers: memoryview, kinds: Mapping[str, type]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind in ("list", "tuple"):
        found = [_unpack_tree(item, buffers, kinds) for item in items]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {_unpack_tree(key, buffers, kinds): _unpack_tree(item, buffers, kinds) for key, item in items}
    if kind == "scalar":
        return _unpack_tree(items[0], buffers, kinds)[()]
    if kind == "objects":
        shape, listed = items
        values = np.empty(len(listed), object)
        values[:] = [_unpack_tree(item, buffers, kinds) for item in listed]
        return values.reshape(shape)
    if kind == "array":
        return _unpack_array(*items, buffers=buffers)
    return kinds[kind](**{name: _unpack_tree(item, buffers, kinds) for name, item in items[0].items()})


def _unpack_array(dtype: str, shape: list[int], at: int, *, buffers: memoryview) -> NDArray[Any]:
    if not _DTYPE_PATTERN.fullmatch(dtype) or at < 0 or min(shape, default=0) < 0:
        raise UnpackableError("an array of another kind")
    kind = np.dtype(dtype)
    # A copy: a view of one small array would keep all buffers in memory for as long as it lives.
    return np.frombuffer(buffers, kind, math.prod(shape), at).reshape(shape).copy()


SETTLED_SECONDS = 2.0
"""Seconds since its last change after which the status of a file is trusted."""
_CHUNK_BYTES = 1 << 20
_CHECKSUM_BYTES, _SIZE_BYTES = 32, 8
"""Bytes of the checksum and of the unpacked size at the start of a part."""


@dataclass(frozen=True)
class CachedEngine:
    """Engine that only computes shards that are not in the cache folder.

    Attributes:
        engine: computes the missing shards.
        folder: the cache folder, created if necessary.
    """

    engine: Engine
    folder: Path

    def map(self, work: Work[MergeableT], dump: Dump, shards: Iterable[Shard]) -> Iterator[tuple[Shard, MergeableT]]:
        """Yield the part of each shard, in the given order.

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
        """Return the possible paths of the part of a shard. New parts go to the first."""
        content = [contents[file.index] for file in shard.files]
        if None in content:
            return []
        rows = shard.units[0].start, shard.units[-1].start + shard.units[-1].rows
        files = shard.files if len(shard.files) > 1 else ()  # parts of several files contain file indices and paths
        places = [[file.index - shard.file.index, file.path] for file in files]
        about = [content, places, rows, describe_value(dump.cache_key(shard.file)), tool_version()]
        return [self.folder / "parts" / _hash([*about, describe_value(asked)]) for asked in work.asked(shard.file)]

    def _load(self, place: Path, kind: Any, index: int) -> Any:
        """Load a part, unless it is missing or damaged."""
        try:
            content = place.read_bytes()
            checksum, size, body = (
                content[:_CHECKSUM_BYTES],
                content[_CHECKSUM_BYTES : _CHECKSUM_BYTES + _SIZE_BYTES],
                content[_CHECKSUM_BYTES + _SIZE_BYTES :],
            )
            if _checksum(place, size, body) != checksum:
                return None
            unpacked = pa.decompress(body, int.from_bytes(size, "little"), "zstd", asbytes=True)
            return unpack_value(unpacked, kind).moved(index)
        except (OSError, UnpackableError, pa.ArrowException, ValueError, MemoryError):
            return None

    def _save(self, place: Path, part: Any) -> None:
        """Store a part. A part that cannot be packed or written is computed again the next time."""
        with contextlib.suppress(UnpackableError, MismatchctlError, OSError):
            content = pack_value(part)
            size, body = len(content).to_bytes(_SIZE_BYTES, "little"), pa.compress(content, "zstd", asbytes=True)
            write_atomically(place, _checksum(place, size, body) + size + body, at_once=True)

    def _digests(self, files: Sequence[DumpFile]) -> Iterator[tuple[DumpFile, str | None]]:
        return ordered_map(self._digest, files, default_threads())

    def _digest(self, file: DumpFile) -> str | None:
        """Return the SHA-256 of a file or the version of an object, unless it changed since it was opened."""
        if not file.location:
            return None
        if find_store(file.location).remote:
            return _hash([file.location, file.stored, file.version])
        memo = self.folder / "files" / _hash([file.location])
        try:
            with open(file.location, "rb") as opened:
                status = _file_status(opened.fileno())
                if (status[2], str(status[3])) != (file.stored, file.version):
                    return None
                known = _read_memo(memo)
                if known is not None and known[0] == status:
                    return known[1]
                digest = hashlib.sha256()
                while chunk := opened.read(_CHUNK_BYTES):
                    digest.update(chunk)
                if _file_status(opened.fileno()) != status:
                    return None
        except OSError:
            return None
        if time.time() - max(status[3], status[4]) / 1e9 > SETTLED_SECONDS:
            with contextlib.suppress(MismatchctlError, OSError):
                write_atomically(memo, json.dumps([status, digest.hexdigest()]).encode(), at_once=True)
        return digest.hexdigest()


def _checksum(place: Path, size: bytes, body: bytes) -> bytes:
    """Hash a part together with its name, so that a renamed file counts as damaged."""
    return hashlib.sha256(place.name.encode() + size + body).digest()


def _file_status(handle: int) -> list[int]:
    status = os.fstat(handle)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_memo(place: Path) -> tuple[list[int], str] | None:
    try:
        status, digest = parse_json(decode_utf8(place.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    return (status, digest) if isinstance(digest, str) else None


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def tool_version() -> str:
    """Return the version of the code, numpy and pyarrow."""
    root = Path(__file__).parents[2]
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        sources.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__} {sources.hexdigest()} numpy {np.__version__} pyarrow {pa.__version__}"


def describe_value(value: Any) -> Any:
    """Return JSON that identifies a value in every process.

    Raises:
        TypeError: the value has an unsupported type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, BaseModel):
        return [type(value).__qualname__, value.model_dump(mode="json")]
    if is_dataclass(value) and not isinstance(value, type):
        return [
            type(value).__qualname__,
            {field.name: describe_value(getattr(value, field.name)) for field in fields(value)},
        ]
    if isinstance(value, Mapping):
        return [
            "mapping",
            sorted(([describe_value(key), describe_value(item)] for key, item in value.items()), key=json.dumps),
        ]
    if isinstance(value, (tuple, list)):
        return [describe_value(item) for item in value]
    if isinstance(value, frozenset):
        return ["set", sorted((describe_value(item) for item in value), key=json.dumps)]
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if isinstance(value, partial):
        return ["partial", describe_value(value.func), describe_value(value.args), describe_value(value.keywords)]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"cannot describe a {type(value).__qualname__}")
