"""Values as bytes that can be read without running anything: arrays, plain data, and dataclasses of known kinds.

A packed value is a JSON tree followed by the buffers of its arrays. Nothing but the constructors of the dataclasses
that the reader names is ever called.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mismatchctl.texts import decoded, parse_json

_ALIGNMENT = 16
_PLAIN = (bool, int, float, str)
_BUFFERS = "biufU"
"""Kinds of numbers and text that are stored as they lie in memory."""
_DTYPE = re.compile(rf"[<>|][{_BUFFERS}]\d{{1,9}}")


class UnpackableError(ValueError):
    """A value of a kind that cannot be packed, or bytes that are no packed value."""


def pack(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        UnpackableError: something in it is none of the kinds above.
    """
    buffers: list[bytes] = []
    tree = json.dumps(_tree(value, buffers), separators=(",", ":")).encode()
    header = struct.pack("<Q", len(tree))
    return b"".join([header, tree, b"\0" * _gap(len(header) + len(tree)), *buffers])


def unpack(content: bytes, kind: Any) -> Any:
    """The value; dataclasses are refused that the type hints of `kind` do not speak of.

    Raises:
        UnpackableError: these are not the bytes of such a value.
    """
    try:
        length = struct.unpack_from("<Q", content)[0]
        tree = parse_json(decoded(bytes(content[8 : 8 + length])), as_python_writes=True)
        start = 8 + length + _gap(8 + length)
        return _value(tree, memoryview(content)[start:], _known(kind))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise UnpackableError(f"not a packed value: {error}") from None


@cache
def _known(kind: Any) -> dict[str, type]:
    return _dataclasses(kind, {})


def _dataclasses(hint: Any, found: dict[str, type]) -> dict[str, type]:
    """A dataclass and all that its fields can hold, by name."""
    if isinstance(hint, type) and is_dataclass(hint) and hint.__qualname__ not in found:
        found[hint.__qualname__] = hint
        hints = get_type_hints(hint)
        for field in fields(hint):
            _dataclasses(hints[field.name], found)
    for part in (get_origin(hint), *get_args(hint)):
        if part is not None:
            _dataclasses(part, found)
    return found


def _gap(length: int) -> int:
    return -length % _ALIGNMENT


def _tree(value: Any, buffers: list[bytes]) -> Any:
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *(_tree(item, buffers) for item in value)]
    if isinstance(value, Mapping):
        pairs = [[_tree(key, buffers), _tree(item, buffers)] for key, item in value.items()]
        return ["dict", *pairs]
    if isinstance(value, np.generic):
        return ["scalar", _array(np.asarray(value), buffers)]
    if isinstance(value, np.ndarray):
        return _array(value, buffers)
    if is_dataclass(value) and not isinstance(value, type):
        known = {field.name: _tree(getattr(value, field.name), buffers) for field in fields(value)}
        return [type(value).__qualname__, known]
    raise UnpackableError(f"cannot pack a {type(value).__qualname__}")


def _array(values: NDArray[Any], buffers: list[bytes]) -> Any:
    if values.dtype == object:
        return ["objects", list(values.shape), [_tree(item, buffers) for item in values.ravel().tolist()]]
    if values.dtype.kind not in _BUFFERS:
        raise UnpackableError(f"cannot pack an array of {values.dtype}")
    buffer = np.ascontiguousarray(values).tobytes()
    at = sum(map(len, buffers))
    buffers.append(buffer + b"\0" * _gap(len(buffer)))
    return ["array", values.dtype.str, list(values.shape), at]


def _value(tree: Any, buffers: memoryview, kinds: Mapping[str, type]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind in ("list", "tuple"):
        found = [_value(item, buffers, kinds) for item in items]
        return found if kind == "list" else tuple(found)
    if kind == "dict":
        return {_value(key, buffers, kinds): _value(item, buffers, kinds) for key, item in items}
    if kind == "scalar":
        return _value(items[0], buffers, kinds)[()]
    if kind == "objects":
        shape, listed = items
        values = np.empty(len(listed), object)
        values[:] = [_value(item, buffers, kinds) for item in listed]
        return values.reshape(shape)
    if kind == "array":
        return _from_buffer(*items, buffers=buffers)
    return kinds[kind](**{name: _value(item, buffers, kinds) for name, item in items[0].items()})


def _from_buffer(dtype: str, shape: list[int], at: int, *, buffers: memoryview) -> NDArray[Any]:
    if not _DTYPE.fullmatch(dtype) or at < 0 or min(shape, default=0) < 0:
        raise UnpackableError("an array of another kind")
    kind = np.dtype(dtype)
    # A copy: a view of one small array would keep all buffers in memory for as long as it lives.
    return np.frombuffer(buffers, kind, math.prod(shape), at).reshape(shape).copy()
