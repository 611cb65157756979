"""Pickles and torch files as data: nothing that a file names is ever run, and nothing is larger than the file."""

from __future__ import annotations

import mmap
import os
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mismatchctl.dumps.foreign.standins import BFLOAT16, TORCH, DamagedError, Room, Storage, UnreadValue, pickled
from mismatchctl.dumps.foreign.unpickle import ASKS, Unpickler
from mismatchctl.errors import DataError

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What torch files begin with where they are no zip archives."""
_LOCAL_HEADER = 30
"""Bytes of a zip entry's own header before its name."""
_REPEATED, _SMALL = 4, 1 << 26
"""How often over the tensors of a file may hold its bytes, and bytes that are no matter."""


def load_pickle(path: Path, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
    """What a pickle holds: plain values and numpy arrays.

    Args:
        path: the file.
        known: classes that it may ask for besides: see `File.pickle`.

    Raises:
        DataError: it asks for any other class, which is named, or it is damaged.
    """
    try:
        return Unpickler(_opened(path), pickled(known)).load()
    except OSError:
        raise
    except Exception as error:
        raise _refusal(path, error) from error


def load_torch(path: Path, content: Any = None) -> Any:
    """A torch file of plain values, and of tensors (of any device) as numpy arrays over the file's own bytes.

    Args:
        path: the file.
        content: bytes of a torch file that lie within it, to be read instead.

    Raises:
        DataError: it asks for any other class, which is named, or it is damaged.
    """
    try:
        if not isinstance(content, (bytes, bytearray, memoryview, type(None))):
            raise DamagedError("holds a torch file that is no bytes")
        stream = _opened(path) if content is None else BytesIO(content)
        data = memoryview(stream) if isinstance(stream, mmap.mmap) else stream.getbuffer()
        room = Room(_REPEATED * len(data) + _SMALL)
        return _from_zip(stream, data, room) if bytes(data[:2]) == b"PK" else _from_stream(stream, data, room)
    except OSError:
        raise
    except Exception as error:
        raise _refusal(path, error) from error


def _opened(path: Path) -> BytesIO | mmap.mmap:
    """A file's bytes: a small one's, that it may change, and a large one mapped: only what is looked at is read."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= _SMALL:
            return BytesIO(file.read(_SMALL))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _from_zip(stream: Any, data: memoryview, room: Room) -> Any:
    """A torch file as it is since 1.6: an archive of a pickle and, uncompressed, of the bytes of each storage."""
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries.values()):
        raise DamagedError("is a compressed archive, and torch writes none: save it again")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise DamagedError("says that it holds more bytes than it has")
    found = [name for name in entries if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise DamagedError("is an archive, but none that torch.save wrote")
    prefix = found[0].removesuffix("data.pkl")

    def record(name: str) -> memoryview:
        entry = entries[prefix + name]
        header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
        begin = entry.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        if len(header) < _LOCAL_HEADER or begin + entry.file_size > len(data):
            raise DamagedError("was cut off")
        return data[begin : begin + entry.file_size]

    order: Literal["<", ">"] = ">" if prefix + "byteorder" in entries and bytes(record("byteorder")) == b"big" else "<"

    def stored(pid: Any) -> Storage | UnreadValue:
        kind, key = _identity(pid)
        if isinstance(kind, UnreadValue):
            return kind
        if f"{prefix}data/{key}" not in entries:
            raise DamagedError("was cut off: the bytes of a tensor are not there")
        return Storage(kind, record(f"data/{key}"), order, room)

    return Unpickler(BytesIO(record("data.pkl")), TORCH, stored).load()


def _from_stream(stream: Any, data: memoryview, room: Room) -> Any:
    """A torch file as it was before: pickles one after another, then the bytes of each storage."""
    stream.seek(0)
    head = [Unpickler(stream, {}).load() for _ in range(3)]
    if head[:2] != [_MAGIC, _PROTOCOL]:
        raise DamagedError("is no file that torch.save wrote")
    begin = stream.tell()
    kinds: dict[str, str] = {}
    storages: dict[str, Storage] = {}

    def stored(pid: Any) -> Storage | UnreadValue:
        kind, key = _identity(pid)
        if isinstance(kind, UnreadValue):
            return kind
        kinds[key] = kind
        return storages.get(key, Storage(kind))

    # The bytes lie behind the pickle that says of which kind they are: so it is read again, when they are known.
    Unpickler(stream, TORCH, stored).load()
    keys = Unpickler(stream, {}).load()
    place = stream.tell()
    for key in keys if isinstance(keys, list) else ():
        if str(key) not in kinds:
            raise DamagedError("holds bytes of an unknown kind")
        kind = kinds[str(key)]
        size = (2 if kind == BFLOAT16 else np.dtype(kind).itemsize) * int.from_bytes(data[place : place + 8], "little")
        place += 8
        if place + size > len(data):
            raise DamagedError("was cut off: the bytes of a tensor are not there")
        storages[str(key)] = Storage(kind, data[place : place + size], room=room)
        place += size
    if kinds.keys() - storages.keys():
        raise DamagedError("was cut off: the bytes of a tensor are not there")
    stream.seek(begin)
    return Unpickler(stream, TORCH, stored).load()


def _identity(pid: Any) -> tuple[str | UnreadValue, str]:
    """What a pickle of torch's says of a storage: the kind of its elements, and its name."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or (len(pid) > 5 and pid[5] is not None):
        raise DamagedError("refers to what lies outside of it")
    if not isinstance(pid[1], (Storage, UnreadValue)):
        raise DamagedError("a tensor without a storage")
    return pid[1] if isinstance(pid[1], UnreadValue) else pid[1].kind, str(pid[2])


def _refusal(path: Path, error: Exception) -> DataError:
    """In our words: a library's own may advise to trust the file."""
    message = str(error) if isinstance(error, DamagedError) else "it is damaged"
    if message.startswith(ASKS):
        return DataError(message, file=str(path), remedy="save plain tensors, arrays and numbers")
    return DataError(
        f"cannot be read: {message}", file=str(path), remedy="it is damaged or of another kind: save it again"
    )
