"""Read pickles and torch files of plain values, arrays and tensors without running their code."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.errors import DataError
from mismatchctl.io.files import open_regular_file

_PLAIN_DTYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[US]\d{1,6}|O8?|[?bBhHiIlLqQefd])")
"""Codes of numpy dtypes that can be read: numbers, strings and objects."""
_MOST_DIMENSIONS = 32
_MOST_INTEGER_KEY = 1 << 24
"""Integer keys of a dict must be below this. Large keys with equal hashes would let an attacker slow down reading."""
_SECONDS, _SECONDS_PER_BYTE = 30.0, 2e-6
"""Time limit for reading a pickle: `_SECONDS`, plus `_SECONDS_PER_BYTE` for each byte of the file."""
_MOST_REPEATS, _SMALL_BYTES = 4, 1 << 26
"""Memory limit for the values of a file: its size times _MOST_REPEATS, plus _SMALL_BYTES."""


class DamagedError(Exception):
    """The file is damaged, or it needs a class that is not allowed."""


def plain_dtype(text: Any) -> np.dtype[Any]:
    """Return a plain dtype by its code (`<f4`) or its name (`float32`)."""
    name = text if isinstance(text, str) else type(text).__name__  # str() of another value could be very long
    with suppress(TypeError, ValueError, SyntaxError, MemoryError):
        code = name if _PLAIN_DTYPE.fullmatch(name) else np.dtype(name).str
        if _PLAIN_DTYPE.fullmatch(code):
            return np.dtype(code)
    raise DamagedError(f"it contains an array of the kind {name[:40]!r}, which is not numeric")


def _count_values(shape: Any) -> int:
    known = isinstance(shape, (tuple, list)) and len(shape) <= _MOST_DIMENSIONS
    if not known or not all(isinstance(one, int) and 0 <= one < 1 << 62 for one in shape):
        raise DamagedError("it contains an array with an invalid shape")
    return math.prod(shape)


def array_from_bytes(data: Any, dtype: np.dtype[Any], shape: Any, order: str = "C") -> NDArray[Any]:
    """Convert bytes to an array. If the number of bytes does not fit the dtype and the shape, raise an error."""
    size = _count_values(shape)
    if isinstance(data, str):  # pickle protocols below 3 write bytes as strings
        data = data.encode("latin1")
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) != size * dtype.itemsize or dtype.hasobject:
        raise DamagedError(f"it contains an array whose number of bytes does not fit its shape {tuple(shape)}")
    if not dtype.itemsize:
        return np.zeros(shape, dtype)
    is_flags = dtype.kind == "b"  # numpy accepts only the bytes 0 and 1 as booleans
    flat = np.frombuffer(data, np.uint8 if is_flags else dtype)
    return (flat != 0 if is_flags else flat).reshape(shape, order="F" if order == "F" else "C")


class _PickledDtype:
    """A numpy dtype in a pickle. Only its code, such as `<f4`, and its byte order are read."""

    def __init__(self, code: Any, *rest: Any) -> None:
        self.value = plain_dtype(code)

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 8 or state[2:5] != (None, None, None):
            raise DamagedError("it contains an array of a structured dtype")
        if state[1] in ("<", ">"):
            self.value = self.value.newbyteorder("<" if state[1] == "<" else ">")


def _dtype_of(value: Any) -> np.dtype[Any]:
    if not isinstance(value, _PickledDtype):
        raise DamagedError("it contains an array without a dtype")
    return value.value


class _PickledArray:
    """A numpy array in a pickle. A pickle first creates an empty array, and later sets its contents (`build`)."""

    def __init__(self, *rest: Any) -> None:
        self.value: NDArray[Any] | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DamagedError("it contains an array without a state")
        _, shape, kind, is_fortran, data = state
        dtype, order = _dtype_of(kind), "F" if is_fortran else "C"
        if not dtype.hasobject:
            self.value = array_from_bytes(data, dtype, shape, order)
            return
        if not isinstance(data, list) or len(data) != _count_values(shape):
            raise DamagedError("it contains an array whose number of values does not fit its shape")
        flat = np.empty(len(data), object)
        for place, value in enumerate(data):
            flat[place] = value
        self.value = flat.reshape(shape, order="F" if is_fortran else "C")


def _build_scalar(kind: Any, data: Any = None) -> Any:
    dtype = _dtype_of(kind)
    return data if dtype.hasobject else array_from_bytes(data, dtype, ())[()]


@dataclass(frozen=True)
class UnreadValue:
    """A placeholder for a value of an unsupported type. It causes an error only if the value is needed."""

    kind: str


@dataclass
class _ByteBudget:
    """Limits for reading one file: how many bytes its values may still take, and a deadline."""

    left: int
    until: float

    @classmethod
    def of(cls, size: int) -> _ByteBudget:
        """Return limits for reading a file of `size` bytes. Tensors can share bytes, so they may need more memory."""
        return cls(_MOST_REPEATS * size + _SMALL_BYTES, time.monotonic() + _SECONDS + _SECONDS_PER_BYTE * size)

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DamagedError("it contains far more values than a file of its size can store")
        if time.monotonic() > self.until:
            raise DamagedError("reading the file takes too long")


@dataclass(frozen=True)
class _TensorStorage:
    """The bytes of torch tensors. For a class in the pickle, such as `torch.FloatStorage`, `data` is `None`."""

    kind: str
    data: memoryview | None = None
    order: Literal["<", ">"] = "<"
    room: _ByteBudget | None = None


_BFLOAT16 = "bfloat16"


def _build_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, kind: str | None = None) -> Any:
    """Return a tensor of the file as an array, without copying its bytes. bfloat16 is converted to float32."""
    if not isinstance(storage, _TensorStorage) or storage.data is None or storage.room is None:
        raise DamagedError("it contains a tensor without a storage")
    kind = kind or storage.kind
    dtype = np.dtype({_BFLOAT16: "u2", "bool": "u1"}.get(kind, kind)).newbyteorder(storage.order)
    whole = np.frombuffer(storage.data[: len(storage.data) // dtype.itemsize * dtype.itemsize], dtype)
    count = _count_values(size)
    if _count_values(stride) < 0 or len(stride) != len(size) or not isinstance(offset, int) or offset < 0:
        raise DamagedError("it contains a tensor whose strides do not fit its shape")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if count and last >= len(whole):
        raise DamagedError(f"it contains a tensor of the shape {tuple(size)} whose bytes are missing")
    storage.room.take(count * dtype.itemsize)
    strides = tuple(step * dtype.itemsize for step in stride)
    view = np.zeros(size, dtype.newbyteorder("="))
    if count:
        view = np.lib.stride_tricks.as_strided(whole[offset:], tuple(size), strides, writeable=False)
    if kind == _BFLOAT16:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view != 0 if kind == "bool" else view


def _build_typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, kind: Any, *rest: Any
) -> Any:
    return kind if isinstance(kind, UnreadValue) else _build_tensor(storage, offset, size, stride, kind=str(kind))


def _build_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (list, tuple)) else ()


def _build_bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str) or encoding not in ("latin1", "latin-1"):
        raise DamagedError("it contains bytes in an unknown encoding")
    return data.encode("latin1")


class _PlainDict(dict[Any, Any]):
    """A dict that only accepts strings and small integers as keys. Hash collisions of other keys could make it slow."""

    def __init__(self, pairs: Any = ()) -> None:
        super().__init__()
        for key, value in pairs:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        is_small = isinstance(key, int) and abs(key) < _MOST_INTEGER_KEY
        if not is_small and not isinstance(key, (str, bytes, type(None))):
            raise DamagedError("it contains a dict whose keys are not strings or small integers")
        super().__setitem__(key, value)


Names = Mapping[tuple[str, str], Any]
"""Maps an imported object of a pickle, as (module, name), to a safe replacement that the pickle may call."""
_NUMPY_NAMES: Names = {
    ("numpy", "dtype"): _PickledDtype,
    ("numpy", "ndarray"): UnreadValue("numpy.ndarray"),
    **{
        (f"numpy.{core}.{module}", name): made
        for core in ("core", "_core")
        for module, name, made in (
            ("multiarray", "_reconstruct", _PickledArray),
            ("multiarray", "scalar", _build_scalar),
            ("numeric", "_frombuffer", lambda data, kind, shape, order="C": array_from_bytes(
                data, _dtype_of(kind), shape, str(order)
            )),
        )
    },
    ("_codecs", "encode"): _build_bytes,
    **{(module, name): _build_bytes for module in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
    **{(module, "set"): _build_tuple for module in ("builtins", "__builtin__")},
    **{(module, "complex"): complex for module in ("builtins", "__builtin__")},
    ("collections", "OrderedDict"): _PlainDict,
    ("torch", "device"): lambda *parts: "device",
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": _BFLOAT16,
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
"""Class of a torch storage -> type of its elements."""
_TORCH_NAMES: Names = {
    **_NUMPY_NAMES,
    ("torch._utils", "_rebuild_tensor"): _build_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _build_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _build_typed_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *rest: data,
    ("torch", "Size"): _build_tuple,
    **{
        (module, name): _TensorStorage(kind)
        for name, kind in _STORAGES.items()
        for module in ("torch", "torch.storage")
    },
    **{("torch", name): name for name in (*_STORAGES.values(), "uint16", "uint32", "uint64")},
}
_REQUEST_PREFIX = "the pickle refers to "
_REFUSED_OPCODES = (
    *("PERSID", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET", "NEXT_BUFFER", "READONLY_BUFFER"),
)
"""Pickle instructions that raise an error, because they build objects of classes. Plain values do not need them."""

_LIBRARY_HANDLERS: Mapping[int, Callable[[Any], None]] = pickle._Unpickler.dispatch


class _Memo(dict[int, Any]):
    def __getitem__(self, index: int) -> Any:
        if index not in self:
            raise DamagedError("it refers to a value that it does not contain")
        value = super().__getitem__(index)
        return value.value if isinstance(value, _PickledArray) and value.value is not None else value


class _DataUnpickler(pickle._Unpickler):
    """An unpickler for plain values. Python's C unpickler would allocate as much memory as a bad file requests."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, stream: Any, names: Names, room: _ByteBudget, stored: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__(stream)
        self.memo = _Memo()
        self._names, self._stored, self._room = names, stored, room

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._names:
            return self._names[module, name]
        if module == "torch" and name.startswith(("float8", "float4", "quint", "qint", "bits")):
            return UnreadValue(f"torch.{name}")
        raise DamagedError(
            f"{_REQUEST_PREFIX}{module[:100]}.{name[:100]}, which mismatchctl does not load, because that executes code"
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._stored is None:
            raise DamagedError("it refers to data outside the file")
        return self._stored(pid)

    def _refuse(self) -> None:
        raise DamagedError("it contains objects of classes, which mismatchctl does not load because that executes code")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = value = self.stack[-1](*arguments)
        if isinstance(value, (bytes, dict, tuple)):  # these are copies, and a small pickle can ask for many copies
            self._room.take(len(value))

    def _build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, (_PickledArray, _PickledDtype)):
            built.build(state)
            if isinstance(built, _PickledArray) and built.value is not None:
                self.stack[-1] = built.value
                self._room.take(built.value.nbytes)
        elif not isinstance(built, dict):  # attributes of an ordered dict are ignored
            self._refuse()

    def _put_items(self) -> None:
        self._room.take(0)
        _LIBRARY_HANDLERS[pickle.SETITEMS[0]](self)

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append(_PlainDict(zip(items[::2], items[1::2], strict=True)))


_OPCODE_HANDLERS: dict[int, Callable[[Any], None]] = {
    **_LIBRARY_HANDLERS,
    **{getattr(pickle, name)[0]: _DataUnpickler._refuse for name in _REFUSED_OPCODES},
    pickle.REDUCE[0]: _DataUnpickler._reduce,
    pickle.BUILD[0]: _DataUnpickler._build,
    pickle.SETITEMS[0]: _DataUnpickler._put_items,
    pickle.EMPTY_DICT[0]: lambda self: self.stack.append(_PlainDict()),
    pickle.DICT[0]: _DataUnpickler._make_dict,
}
_DataUnpickler.dispatch = _OPCODE_HANDLERS

_LOCAL_HEADER = 30  # size of the fixed part of a zip entry's local header, in bytes


def load_pickle(path: Path, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
    own = {place: UnreadValue(place[1]) if made is None else made for place, made in known.items()}
    with _explain_refusals(path):
        return _DataUnpickler(_open_bytes(path), {**_NUMPY_NAMES, **own}, _ByteBudget.of(path.stat().st_size)).load()


def load_torch(path: Path, content: Any = None) -> Any:
    """Read a torch file that contains plain values and tensors. Tensors become numpy arrays."""
    with _explain_refusals(path):
        if not isinstance(content, (bytes, bytearray, memoryview, type(None))):
            raise DamagedError("it contains an invalid torch file")
        stream = _open_bytes(path) if content is None else BytesIO(content)
        data = memoryview(stream) if isinstance(stream, mmap.mmap) else stream.getbuffer()
        if bytes(data[:2]) != b"PK":
            raise DamagedError("it was not written by torch.save of torch 1.6 or newer")
        return _load_zip(stream, data, _ByteBudget.of(len(data)))


@contextmanager
def _explain_refusals(path: Path) -> Iterator[None]:
    """Turn errors of the pickle library into a DataError, because their messages may advise users to trust the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        message = f": {error}" if isinstance(error, DamagedError) else ""
        remedy = "the file is damaged or has another format, so save it again"
        if str(error).startswith(_REQUEST_PREFIX):
            raise DataError(str(error), file=str(path), remedy="save plain tensors, arrays and numbers") from error
        raise DataError(f"cannot be read{message}", file=str(path), remedy=remedy) from error


def _open_bytes(path: Path) -> BytesIO | mmap.mmap:
    with open_regular_file(path) as file:
        if os.fstat(file.fileno()).st_size <= _SMALL_BYTES:
            return BytesIO(file.read(_SMALL_BYTES))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _load_zip(stream: Any, data: memoryview, room: _ByteBudget) -> Any:
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries.values()):
        raise DamagedError("it is a compressed archive, which torch.save does not write; save the file again")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise DamagedError("it is shorter than its header states")
    found = [name for name in entries if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise DamagedError("it is an archive, but not one that torch.save wrote")
    prefix = found[0].removesuffix("data.pkl")

    def record(name: str) -> memoryview:
        entry = entries[prefix + name]
        header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
        begin = entry.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        if len(header) < _LOCAL_HEADER or begin + entry.file_size > len(data):
            raise DamagedError("it was cut off")
        return data[begin : begin + entry.file_size]

    order: Literal["<", ">"] = ">" if prefix + "byteorder" in entries and bytes(record("byteorder")) == b"big" else "<"

    def stored(pid: Any) -> _TensorStorage | UnreadValue:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or (len(pid) > 5 and pid[5] is not None):
            raise DamagedError("it refers to data outside the file")
        if isinstance(pid[1], UnreadValue):
            return pid[1]
        if not isinstance(pid[1], _TensorStorage) or not isinstance(pid[2], str):
            raise DamagedError("it contains a tensor without a storage")
        if f"{prefix}data/{pid[2]}" not in entries:
            raise DamagedError("it was cut off: the bytes of a tensor are missing")
        return _TensorStorage(pid[1].kind, record(f"data/{pid[2]}"), order, room)

    return _DataUnpickler(BytesIO(record("data.pkl")), _TORCH_NAMES, room, stored).load()
