"""Scalars of TensorBoard's event files, read as bytes: records with checksums, and the few fields that scalars need.

A record is its length, the checksum of that, its bytes, and their checksum (CRC-32C, masked). A file that is still
being written may end within one: what came before counts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np

from mismatchctl.errors import DataError

_HEAD, _TAIL = 12, 4
_MOST_SCALARS = 1 << 16
"""Bytes of a record with scalars: larger ones are pictures, text or histograms, and passed over."""
_FLOAT, _DOUBLE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Field = tuple[int, int, int | bytes]
"""(number, kind, value) of a message."""


def is_event_file(path: Path) -> bool:
    """Whether a file is called as TensorBoard calls them."""
    return "tfevents" in path.name


def event_files(path: Path) -> list[Path]:
    """The event files of a folder and those below, by name; or the file itself."""
    if path.is_dir():
        return sorted(found for found in path.rglob("*tfevents*") if found.is_file())
    return [path]


def scalars(content: bytes, path: str) -> Iterator[tuple[int, str, Decimal]]:
    """Step, name and value of every scalar, in the order of the file.

    Raises:
        DataError: it is no event file, or damaged.
    """
    for number, record in _records(content, path):
        try:
            yield from _of_event(record)
        except (ValueError, struct.error, IndexError, UnicodeDecodeError):
            raise DataError(f"record {number} is no event", file=path, remedy="name TensorBoard's own file") from None


def _records(content: bytes, path: str) -> Iterator[tuple[int, bytes]]:
    place, number = 0, 0
    while place + _HEAD <= len(content):
        length, checksum = struct.unpack_from("<QI", content, place)
        if masked_crc(content[place : place + 8]) != checksum:
            raise _damaged(path, number)
        end = place + _HEAD + length
        if end + _TAIL > len(content):
            return
        if length <= _MOST_SCALARS:
            record = content[place + _HEAD : end]
            if masked_crc(record) != struct.unpack_from("<I", content, end)[0]:
                raise _damaged(path, number)
            yield number, record
        place, number = end + _TAIL, number + 1


def _damaged(path: str, number: int) -> DataError:
    problem = "is no event file of TensorBoard" if not number else f"record {number} is damaged: its checksum differs"
    return DataError(problem, file=path, remedy="copy the file again, or name a log as JSON lines or CSV")


def _of_event(record: bytes) -> Iterator[tuple[int, str, Decimal]]:
    step, summaries = 0, []
    for number, kind, value in _fields(record):
        if number == 2 and kind == _VARINT:
            step = _signed(value)
        elif number == 5 and kind == _BYTES:
            summaries.append(value)
    for summary in summaries:
        assert isinstance(summary, bytes)
        for number, kind, value in _fields(summary):
            if number == 1 and kind == _BYTES:
                assert isinstance(value, bytes)
                name, found = _of_value(value)
                if name and found is not None and math.isfinite(found):
                    yield step, name, found


def _of_value(message: bytes) -> tuple[str, Decimal | None]:
    name, found = "", None
    for number, kind, value in _fields(message):
        if number == 1 and isinstance(value, bytes):
            name = value.decode("utf-8")
        elif number == 2 and kind == _FIXED32:
            assert isinstance(value, bytes)
            found = _printed(np.frombuffer(value, "<f4")[0])
        elif number == 8 and isinstance(value, bytes):
            found = _of_tensor(value)
    return name, found


def _of_tensor(message: bytes) -> Decimal | None:
    """The value of a tensor that holds one."""
    dtype, held = 0, b""
    for number, kind, value in _fields(message):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and isinstance(value, bytes) and (number == 4 or kind != _VARINT):
            held = value
    form = {_FLOAT: "<f4", _DOUBLE: "<f8"}.get(dtype)
    if form is None or len(held) != np.dtype(form).itemsize:
        return None
    return _printed(np.frombuffer(held, form)[0])


def _printed(value: np.floating) -> Decimal:
    """With the digits that its type has, and no more."""
    return Decimal(np.format_float_scientific(value)) if np.isfinite(value) else Decimal("nan")


def _signed(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(message: bytes) -> Iterator[Field]:
    """The fields of a message, one level deep.

    Raises:
        ValueError: it is none.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, place = _varint(message, place)
            yield number, kind, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if size is None:
            if kind != _BYTES:
                raise ValueError(kind)
            size, place = _varint(message, place)
        if place + size > len(message):
            raise ValueError(size)
        yield number, kind, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return value, place
    raise ValueError("a number without an end")


def masked_crc(content: bytes) -> int:
    """CRC-32C, rotated and shifted as the format has it."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = [_row(byte) for byte in range(256)]
