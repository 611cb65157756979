"""Stand-ins for the classes that numbers are pickled with: each says what it was built from, and becomes a numpy array.

Whatever a pickle names is one of these or refused, so that nothing of numpy's or torch's own ever reads a state from a
file. An array is a view of bytes that are at hand: its shape is held against them first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_PLAIN = re.compile(r"[<>|=]?([biufc]\d{1,2}|[US]\d{1,6}|O8?|[?bBhHiIlLqQefd])")
"""Kinds of numpy that are numbers, texts or lists of values."""
MOST_DIMENSIONS = 32


class DamagedError(Exception):
    """What a file says about itself cannot be true."""


def plain_dtype(text: Any) -> np.dtype[Any]:
    """The dtype of a plain kind: by its code (`<f4`) or its name (`float32`).

    Raises:
        DamagedError: it is of another kind.
    """
    try:
        code = text if isinstance(text, str) and _PLAIN.fullmatch(text) else np.dtype(str(text)).str
        found = np.dtype(code) if _PLAIN.fullmatch(code) else None
    except (TypeError, ValueError, SyntaxError, MemoryError):
        found = None
    if found is None:
        raise DamagedError(f"an array of the kind {str(text)[:40]!r}, which is none of numbers")
    return found


def size_of(shape: Any) -> int:
    """How many values a shape has.

    Raises:
        DamagedError: it is none.
    """
    if not isinstance(shape, (tuple, list)) or len(shape) > MOST_DIMENSIONS:
        raise DamagedError("an array whose shape is none")
    if not all(isinstance(one, int) and 0 <= one < 1 << 62 for one in shape):
        raise DamagedError("an array whose shape is none")
    return math.prod(shape)


def from_bytes(data: Any, dtype: np.dtype[Any], shape: Any, order: str = "C") -> NDArray[Any]:
    """An array over bytes.

    Raises:
        DamagedError: they are not as many as its shape needs.
    """
    size = size_of(shape)
    if isinstance(data, str):  # as protocols below 3 write bytes
        data = data.encode("latin1")
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) != size * dtype.itemsize or dtype.hasobject:
        raise DamagedError(f"an array of the shape {tuple(shape)} whose bytes are not as many")
    if not dtype.itemsize:
        return np.zeros(shape, dtype)
    is_flags = dtype.kind == "b"  # a byte that is neither 0 nor 1 is no boolean to numpy
    flat = np.frombuffer(data, np.uint8 if is_flags else dtype)
    return (flat != 0 if is_flags else flat).reshape(shape, order="F" if order == "F" else "C")


class Dtype:
    """numpy's dtype: its code, and from its state the order of bytes alone."""

    def __init__(self, code: Any) -> None:
        self._dtype = plain_dtype(code)

    def build(self, state: Any) -> None:
        """Take the order of bytes from the state, which may not name fields or parts."""
        if not isinstance(state, tuple) or len(state) < 8 or state[2:5] != (None, None, None):
            raise DamagedError("an array of a kind that is made of others")
        if state[1] in ("<", ">"):
            self._dtype = self._dtype.newbyteorder("<" if state[1] == "<" else ">")

    @staticmethod
    def of(value: Any) -> np.dtype[Any]:
        """What one in a file stands for."""
        if not isinstance(value, Dtype):
            raise DamagedError("an array without a kind")
        return value._dtype


class Array:
    """numpy's array as it is pickled: empty first, then given a state."""

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None

    def build(self, state: Any) -> None:
        """Become an array."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise DamagedError("an array without a state")
        _, shape, kind, is_fortran, data = state
        dtype = Dtype.of(kind)
        if not dtype.hasobject:
            self.value = from_bytes(data, dtype, shape, "F" if is_fortran else "C")
        elif isinstance(data, list) and len(data) == size_of(shape):
            flat = np.empty(len(data), object)
            for place, value in enumerate(data):
                flat[place] = value
            self.value = flat.reshape(shape, order="F" if is_fortran else "C")
        else:
            raise DamagedError("an array of values whose shape is another")


def scalar(kind: Any, data: Any = None) -> Any:
    """A number of numpy's."""
    dtype = Dtype.of(kind)
    return data if dtype.hasobject else from_bytes(data, dtype, ())[()]


def frombuffer(data: Any, kind: Any, shape: Any, order: Any = "C") -> NDArray[Any]:
    """An array as protocol 5 pickles it."""
    return from_bytes(data, Dtype.of(kind), shape, str(order))


@dataclass(frozen=True)
class UnreadValue:
    """What a file holds and nothing here reads: an error only for whoever needs it."""

    kind: str


BFLOAT16 = "bfloat16"
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "BFloat16Storage": BFLOAT16, "LongStorage": "i8",
    "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "b1",
    "ComplexFloatStorage": "c8", "ComplexDoubleStorage": "c16", "UntypedStorage": "u1",
}  # fmt: skip
"""Kind of the elements by the class of torch's storage."""
DTYPES: Mapping[str, str] = {
    "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": BFLOAT16, "int64": "i8", "int32": "i4",
    "int16": "i2", "int8": "i1", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8", "bool": "b1",
    "complex64": "c8", "complex128": "c16",
}  # fmt: skip


@dataclass
class Room:
    """Bytes that all tensors of a file together may have: some repeat theirs, none makes much of little."""

    left: int

    def take(self, count: int) -> None:
        """Use some of it up."""
        self.left -= count
        if self.left < 0:
            raise DamagedError("tensors that are together far larger than the file")


@dataclass(frozen=True)
class Storage:
    """Bytes of a tensor's, and what its elements are.

    Attributes:
        kind: as in `STORAGES`.
        data: its bytes; None in a first reading, which only finds where the file's bytes begin.
        order: `<` or `>`.
        room: what is left for tensors of the file.
    """

    kind: str
    data: memoryview | None = None
    order: Literal["<", ">"] = "<"
    room: Room = field(default_factory=lambda: Room(0))


def tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, kind: str | None = None) -> Any:
    """A tensor as an array: bfloat16 as float32, everything else over the file's bytes.

    Raises:
        DamagedError: it reaches beyond its storage, or repeats it more often than a file's bytes allow.
    """
    if not isinstance(storage, Storage):
        raise DamagedError("a tensor without a storage")
    if storage.data is None:
        return None
    kind = kind or storage.kind
    wide = kind == BFLOAT16
    dtype = np.dtype("u2" if wide else "u1" if kind == "b1" else kind).newbyteorder(storage.order)
    whole = np.frombuffer(storage.data[: len(storage.data) // dtype.itemsize * dtype.itemsize], dtype)
    count = size_of(size)
    if not size_of(stride) >= 0 or len(stride) != len(size) or not isinstance(offset, int) or offset < 0:
        raise DamagedError("a tensor whose strides do not fit its shape")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not count:
        return np.zeros(size, np.float32 if wide else np.bool_ if kind == "b1" else dtype.newbyteorder("="))
    if last >= len(whole):
        raise DamagedError(f"a tensor of the shape {tuple(size)} whose bytes are not there")
    storage.room.take(count * dtype.itemsize)
    strides = tuple(step * dtype.itemsize for step in stride)
    view = np.lib.stride_tricks.as_strided(whole[offset:], tuple(size), strides, writeable=False)
    if wide:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view != 0 if kind == "b1" else view


def tensor_of_kind(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, kind: Any, *rest: Any
) -> Any:
    """A tensor that names its kind apart from its storage."""
    if isinstance(kind, UnreadValue):
        return kind
    return tensor(storage, offset, size, stride, kind=str(kind))


def text_to_bytes(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes as protocol 2 writes them."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise DamagedError("bytes in an unknown encoding")
    return text.encode("latin1")


def _dict(*parts: Any) -> dict[Any, Any]:
    pairs = parts[0] if parts else []
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in pairs):
        raise DamagedError("a dict that is none")
    return {plain_key(pair[0]): pair[1] for pair in pairs}


def plain_key(key: Any) -> Any:
    """A key of a dict: of one that nests others, the hash could take for ever."""
    if not isinstance(key, (str, int, float, bytes, type(None), np.generic)):
        raise DamagedError("a dict whose keys are no texts or numbers")
    return key


def _set(values: Any = ()) -> set[Any]:
    if not isinstance(values, (list, tuple)):
        raise DamagedError("a set that is none")
    return {plain_key(value) for value in values}


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    return data if isinstance(data, bytes) else text_to_bytes(data, encoding)


def _shape(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (list, tuple)) else ()


@dataclass(frozen=True)
class PickleCall:
    """What a pickle may call: a function of this module, by the name that it goes by there."""

    function: Callable[..., Any]

    def __call__(self, arguments: Any) -> Any:
        """Its answer to arguments of a file."""
        if not isinstance(arguments, tuple):
            raise DamagedError("a call without arguments")
        return self.function(*arguments)


def _named(modules: Sequence[str], **functions: Callable[..., Any]) -> dict[tuple[str, str], Any]:
    return {(module, name): PickleCall(function) for module in modules for name, function in functions.items()}


NUMPY: dict[tuple[str, str], Any] = {
    **_named(("numpy",), dtype=lambda code, *rest: Dtype(code)),
    **_named(("numpy.core.multiarray", "numpy._core.multiarray"), _reconstruct=lambda *rest: Array(), scalar=scalar),
    **_named(("numpy.core.numeric", "numpy._core.numeric"), _frombuffer=frombuffer),
    ("numpy", "ndarray"): UnreadValue("numpy.ndarray"),
    **_named(("_codecs",), encode=text_to_bytes),
    **_named(("builtins", "__builtin__"), set=_set, bytearray=_bytes, bytes=_bytes, complex=complex),
    **_named(("collections",), OrderedDict=_dict),
}
TORCH: dict[tuple[str, str], Any] = {
    **NUMPY,
    **_named(("torch._utils",), _rebuild_tensor=tensor, _rebuild_tensor_v2=tensor, _rebuild_tensor_v3=tensor_of_kind),
    **_named(("torch._utils",), _rebuild_parameter=lambda data, *rest: data),
    **_named(("torch",), Size=_shape, device=lambda *parts: ":".join(str(part)[:40] for part in parts)),
    **{("torch", name): Storage(kind) for name, kind in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Storage("u1"),
    **{("torch", name): kind for name, kind in DTYPES.items()},
}


def pickled(known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> dict[tuple[str, str], Any]:
    """What a pickle of plain values and arrays may ask for, and what is known of its own classes besides."""
    own = {place: UnreadValue(place[1]) if made is None else PickleCall(made) for place, made in known.items()}
    return {**NUMPY, ("torch", "device"): TORCH["torch", "device"], **own}
