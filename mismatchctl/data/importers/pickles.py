"""Read pickles and torch files of plain values, arrays and tensors without running their code."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import re
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.errors import DataError
from mismatchctl.io.files import open_regular_file

_PLAIN_DTYPE = re.compile(r"[<>|=]?([biufc]\d{1,2}|[US]\d{1,6}|O8?|[?bBhHiIlLqQefd])")
"""Types of numpy that are numbers, strings or lists of values."""
MOST_DIMENSIONS = 32


_MOST_INTEGER_KEY = 1 << 24
"""Largest integer key. For larger integers it is easy to choose keys with equal hashes."""
_SECONDS, _SECONDS_PER_BYTE = 30.0, 2e-6
"""Time limit for reading a pickle, plus an allowance per byte of the file."""


class DamagedError(Exception):
    """The file is damaged, or needs a class that is not allowed."""


def plain_dtype(text: Any) -> np.dtype[Any]:
    """Return a plain dtype by its code (`<f4`) or its name (`float32`)."""
    try:
        code = text if isinstance(text, str) and _PLAIN_DTYPE.fullmatch(text) else np.dtype(str(text)).str
        found = np.dtype(code) if _PLAIN_DTYPE.fullmatch(code) else None
    except (TypeError, ValueError, SyntaxError, MemoryError):
        found = None
    if found is None:
        raise DamagedError(f"an array of the kind {str(text)[:40]!r}, which is not numeric")
    return found


def count_values(shape: Any) -> int:
    known = isinstance(shape, (tuple, list)) and len(shape) <= MOST_DIMENSIONS
    if not known or not all(isinstance(one, int) and 0 <= one < 1 << 62 for one in shape):
        raise DamagedError("an array with an invalid shape")
    return math.prod(shape)


def array_from_bytes(data: Any, dtype: np.dtype[Any], shape: Any, order: str = "C") -> NDArray[Any]:
    """Return an array over bytes, whose number must fit the shape."""
    size = count_values(shape)
    if isinstance(data, str):  # as protocols below 3 write bytes
        data = data.encode("latin1")
    if not isinstance(data, (bytes, bytearray, memoryview)) or len(data) != size * dtype.itemsize or dtype.hasobject:
        raise DamagedError(f"an array of the shape {tuple(shape)} with another number of bytes")
    if not dtype.itemsize:
        return np.zeros(shape, dtype)
    is_flags = dtype.kind == "b"  # a byte that is neither 0 nor 1 is no boolean to numpy
    flat = np.frombuffer(data, np.uint8 if is_flags else dtype)
    return (flat != 0 if is_flags else flat).reshape(shape, order="F" if order == "F" else "C")


class PickledDtype:
    """A numpy dtype: its code and byte order. The rest of its pickled state is ignored."""

    def __init__(self, code: Any) -> None:
        self._dtype = plain_dtype(code)

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 8 or state[2:5] != (None, None, None):
            raise DamagedError("an array of a structured dtype")
        if state[1] in ("<", ">"):
            self._dtype = self._dtype.newbyteorder("<" if state[1] == "<" else ">")

    @staticmethod
    def of(value: Any) -> np.dtype[Any]:
        if not isinstance(value, PickledDtype):
            raise DamagedError("an array without a kind")
        return value._dtype


class PickledArray:
    """A numpy array. A pickle first creates it empty and then sets its state."""

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None

    def build(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise DamagedError("an array without a state")
        _, shape, kind, is_fortran, data = state
        dtype = PickledDtype.of(kind)
        if not dtype.hasobject:
            self.value = array_from_bytes(data, dtype, shape, "F" if is_fortran else "C")
        elif isinstance(data, list) and len(data) == count_values(shape):
            flat = np.empty(len(data), object)
            for place, value in enumerate(data):
                flat[place] = value
            self.value = flat.reshape(shape, order="F" if is_fortran else "C")
        else:
            raise DamagedError("an array of values whose shape is another")


def build_scalar(kind: Any, data: Any = None) -> Any:
    dtype = PickledDtype.of(kind)
    return data if dtype.hasobject else array_from_bytes(data, dtype, ())[()]


def build_from_buffer(data: Any, kind: Any, shape: Any, order: Any = "C") -> NDArray[Any]:
    return array_from_bytes(data, PickledDtype.of(kind), shape, str(order))


@dataclass(frozen=True)
class UnreadValue:
    """A value of an unsupported type. It only causes an error if the value is needed."""

    kind: str


BFLOAT16 = "bfloat16"
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "f8", "FloatStorage": "f4", "HalfStorage": "f2", "BFloat16Storage": BFLOAT16, "LongStorage": "i8",
    "IntStorage": "i4", "ShortStorage": "i2", "CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "b1",
    "ComplexFloatStorage": "c8", "ComplexDoubleStorage": "c16", "UntypedStorage": "u1",
}  # fmt: skip
"""Type of the elements by the class of the storage."""
DTYPES: Mapping[str, str] = {
    "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": BFLOAT16, "int64": "i8", "int32": "i4",
    "int16": "i2", "int8": "i1", "uint8": "u1", "uint16": "u2", "uint32": "u4", "uint64": "u8", "bool": "b1",
    "complex64": "c8", "complex128": "c16",
}  # fmt: skip


@dataclass
class ByteBudget:
    """Limit on the bytes of all values of a file, and the time by which the file must be read."""

    left: int
    until: float = math.inf

    @classmethod
    def of(cls, size: int) -> ByteBudget:
        """Return the budget of a file of `size` bytes. Some tensors repeat theirs."""
        return cls(_MOST_REPEATS * size + _SMALL_BYTES, time.monotonic() + _SECONDS + _SECONDS_PER_BYTE * size)

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise DamagedError("values that are together far larger than the file")
        if time.monotonic() > self.until:
            raise DamagedError("it takes too long")


@dataclass(frozen=True)
class TensorStorage:
    """The class of a torch storage, or a storage with its bytes and the rest of the file's byte budget."""

    kind: str
    data: memoryview | None = None
    order: Literal["<", ">"] = "<"
    room: ByteBudget | None = None


def build_tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any, kind: str | None = None) -> Any:
    """Return a tensor as an array over the bytes of the file, bfloat16 as float32."""
    if not isinstance(storage, TensorStorage) or storage.data is None or storage.room is None:
        raise DamagedError("a tensor without a storage")
    kind = kind or storage.kind
    wide = kind == BFLOAT16
    dtype = np.dtype("u2" if wide else "u1" if kind == "b1" else kind).newbyteorder(storage.order)
    whole = np.frombuffer(storage.data[: len(storage.data) // dtype.itemsize * dtype.itemsize], dtype)
    count = count_values(size)
    if not count_values(stride) >= 0 or len(stride) != len(size) or not isinstance(offset, int) or offset < 0:
        raise DamagedError("a tensor whose strides do not fit its shape")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not count:
        return np.zeros(size, np.float32 if wide else np.bool_ if kind == "b1" else dtype.newbyteorder("="))
    if last >= len(whole):
        raise DamagedError(f"a tensor of the shape {tuple(size)} whose bytes are missing")
    storage.room.take(count * dtype.itemsize)
    strides = tuple(step * dtype.itemsize for step in stride)
    view = np.lib.stride_tricks.as_strided(whole[offset:], tuple(size), strides, writeable=False)
    if wide:
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view != 0 if kind == "b1" else view


def build_typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, kind: Any, *rest: Any
) -> Any:
    """Return a tensor whose dtype differs from its storage's."""
    return kind if isinstance(kind, UnreadValue) else build_tensor(storage, offset, size, stride, kind=str(kind))


def text_to_bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise DamagedError("bytes in an unknown encoding")
    return text.encode("latin1")


def _build_dict(*parts: Any) -> dict[Any, Any]:
    pairs = parts[0] if parts else []
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, (list, tuple)) for pair in pairs):
        raise DamagedError("an invalid dict")
    return {check_key(pair[0]): pair[1] for pair in pairs}


def check_key(key: Any) -> Any:
    """Return the key of a dict or set. The hashes of other keys could take forever or collide on purpose."""
    if isinstance(key, int) and abs(key) < _MOST_INTEGER_KEY:
        return int(key)
    if not isinstance(key, (str, bytes, type(None))):
        raise DamagedError("a dict whose keys are not strings or small integers")
    return key


def _build_set(values: Any = ()) -> set[Any]:
    if not isinstance(values, (list, tuple)):
        raise DamagedError("an invalid set")
    return {check_key(value) for value in values}


def _build_bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    return data if isinstance(data, bytes) else text_to_bytes(data, encoding)


def _build_shape(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, (list, tuple)) else ()


@dataclass(frozen=True)
class PickleCall:
    """A function that a pickle may call."""

    function: Callable[..., Any]

    def __call__(self, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            raise DamagedError("a call without arguments")
        return self.function(*arguments)


def _pickle_names(modules: Sequence[str], **functions: Callable[..., Any]) -> dict[tuple[str, str], Any]:
    return {(module, name): PickleCall(function) for module in modules for name, function in functions.items()}


NUMPY_NAMES: dict[tuple[str, str], Any] = {
    **_pickle_names(("numpy",), dtype=lambda code, *rest: PickledDtype(code)),
    **_pickle_names(
        ("numpy.core.multiarray", "numpy._core.multiarray"),
        _reconstruct=lambda *rest: PickledArray(),
        scalar=build_scalar,
    ),
    **_pickle_names(("numpy.core.numeric", "numpy._core.numeric"), _frombuffer=build_from_buffer),
    ("numpy", "ndarray"): UnreadValue("numpy.ndarray"),
    **_pickle_names(("_codecs",), encode=text_to_bytes),
    **_pickle_names(
        ("builtins", "__builtin__"), set=_build_set, bytearray=_build_bytes, bytes=_build_bytes, complex=complex
    ),
    **_pickle_names(("collections",), OrderedDict=_build_dict),
}
TORCH_NAMES: dict[tuple[str, str], Any] = {
    **NUMPY_NAMES,
    **_pickle_names(
        ("torch._utils",),
        _rebuild_tensor=build_tensor,
        _rebuild_tensor_v2=build_tensor,
        _rebuild_tensor_v3=build_typed_tensor,
    ),
    **_pickle_names(("torch._utils",), _rebuild_parameter=lambda data, *rest: data),
    **_pickle_names(("torch",), Size=_build_shape, device=lambda *parts: ":".join(str(part)[:40] for part in parts)),
    **{("torch", name): TensorStorage(kind) for name, kind in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): TensorStorage("u1"),
    **{("torch", name): kind for name, kind in DTYPES.items()},
}


def list_allowed_names(known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> dict[tuple[str, str], Any]:
    """Return stand-ins for the names that a pickle may import: numpy arrays, and some known classes."""
    own = {place: UnreadValue(place[1]) if made is None else PickleCall(made) for place, made in known.items()}
    return {**NUMPY_NAMES, ("torch", "device"): TORCH_NAMES["torch", "device"], **own}


REQUEST_PREFIX = "it asks for "
_REFUSED_OPCODES = (
    *("PERSID", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET", "NEXT_BUFFER", "READONLY_BUFFER"),
)
"""Refused instructions: they build objects of classes, which numbers do not need."""


class _Memo(dict[int, Any]):
    def __getitem__(self, index: int) -> Any:
        if index not in self:
            raise DamagedError("refers to a value that it does not hold")
        return _finished_value(super().__getitem__(index))


class DataUnpickler(pickle._Unpickler):
    """Unpickler of plain values, numpy arrays and the stand-ins in `names`.

    It is Python's unpickler, because the one in C allocates memory for any memo index that a file contains.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        stream: Any,
        names: Mapping[tuple[str, str], Any],
        room: ByteBudget,
        stored: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(stream)
        self.memo = _Memo()
        self._names, self._stored, self._room = names, stored, room

    def find_class(self, module: str, name: str) -> Any:
        found = self._names.get((module, name))
        if found is None and module == "torch" and name.startswith(("float8", "float4", "quint", "qint", "bits")):
            return UnreadValue(f"torch.{name}")
        if found is None:
            raise DamagedError(
                f"{REQUEST_PREFIX}{module[:100]}.{name[:100]}, which is not loaded because that executes code"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._stored is None:
            raise DamagedError("refers to data outside the file")
        return self._stored(pid)

    def _refuse(self) -> None:
        raise DamagedError("contains objects of classes, which are not loaded because that executes code")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, PickleCall):
            raise DamagedError(f"calls an object that is not a function: {type(function).__name__}")
        self.stack[-1] = value = function(arguments)
        if isinstance(value, (bytes, bytearray, dict, set, tuple)):  # copies of values that may be referred to again
            self._room.take(len(value))

    def _build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, (PickledArray, PickledDtype)):
            built.build(state)
            self.stack[-1] = value = _finished_value(built)
            self._room.take(value.nbytes if isinstance(value, np.ndarray) else 0)
        elif not isinstance(built, dict):  # attributes of an ordered dict are ignored
            self._refuse()

    def _set_items(self, items: list[Any]) -> None:
        self._room.take(0)
        found = self.stack[-1]
        if not isinstance(found, dict):
            raise DamagedError("sets items of an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            found[check_key(key)] = value

    def _put_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _put_items(self) -> None:
        self._set_items(self.pop_mark())

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _extend(self, values: list[Any]) -> None:
        found = self.stack[-1]
        if not isinstance(found, list):
            raise DamagedError("appends to an object that is not a list")
        found.extend(values)

    def _append_one(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def _append_many(self) -> None:
        self._extend(self.pop_mark())


_OPCODE_HANDLERS: dict[int, Callable[[Any], None]] = {
    **pickle._Unpickler.dispatch,
    **{getattr(pickle, name)[0]: DataUnpickler._refuse for name in _REFUSED_OPCODES},
    pickle.REDUCE[0]: DataUnpickler._reduce,
    pickle.BUILD[0]: DataUnpickler._build,
    pickle.SETITEM[0]: DataUnpickler._put_item,
    pickle.SETITEMS[0]: DataUnpickler._put_items,
    pickle.DICT[0]: DataUnpickler._make_dict,
    pickle.APPEND[0]: DataUnpickler._append_one,
    pickle.APPENDS[0]: DataUnpickler._append_many,
}
DataUnpickler.dispatch = _OPCODE_HANDLERS


def _finished_value(value: Any) -> Any:
    """Return the array of a PickledArray that has its state, or any other value."""
    return value.value if isinstance(value, PickledArray) and value.value is not None else value


_LOCAL_HEADER = 30
"""Bytes of the local header of a zip entry before its name."""
_MOST_REPEATS, _SMALL_BYTES = 4, 1 << 26
"""Times that the tensors of a file may repeat its bytes, and bytes that are always allowed."""


def load_pickle(path: Path, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
    try:
        room = ByteBudget.of(path.stat().st_size)
        return DataUnpickler(_open_bytes(path), list_allowed_names(known), room).load()
    except OSError:
        raise
    except Exception as error:
        raise _refusal_error(path, error) from error


def load_torch(path: Path, content: Any = None) -> Any:
    """Read a torch file of plain values and tensors as arrays over its bytes, or `content`, a torch file inside it."""
    try:
        if not isinstance(content, (bytes, bytearray, memoryview, type(None))):
            raise DamagedError("contains an invalid torch file")
        stream = _open_bytes(path) if content is None else BytesIO(content)
        data = memoryview(stream) if isinstance(stream, mmap.mmap) else stream.getbuffer()
        if bytes(data[:2]) != b"PK":
            raise DamagedError("was not written by torch.save of torch 1.6 or newer")
        return _load_zip(stream, data, ByteBudget.of(len(data)))
    except OSError:
        raise
    except Exception as error:
        raise _refusal_error(path, error) from error


def _open_bytes(path: Path) -> BytesIO | mmap.mmap:
    """Return the bytes of a small file, or map a large one so that only the needed parts are read."""
    with open_regular_file(path) as file:
        if os.fstat(file.fileno()).st_size <= _SMALL_BYTES:
            return BytesIO(file.read(_SMALL_BYTES))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _load_zip(stream: Any, data: memoryview, room: ByteBudget) -> Any:
    """Read an archive of a pickle and the uncompressed bytes of each storage."""
    with zipfile.ZipFile(stream) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries.values()):
        raise DamagedError("is a compressed archive, which torch.save does not write; save the file again")
    if sum(entry.file_size for entry in entries.values()) > len(data):
        raise DamagedError("is shorter than its header states")
    found = [name for name in entries if name.endswith("/data.pkl")]
    if len(found) != 1:
        raise DamagedError("is an archive, but not one that torch.save wrote")
    prefix = found[0].removesuffix("data.pkl")

    def record(name: str) -> memoryview:
        entry = entries[prefix + name]
        header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER]
        begin = entry.header_offset + _LOCAL_HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        if len(header) < _LOCAL_HEADER or begin + entry.file_size > len(data):
            raise DamagedError("was cut off")
        return data[begin : begin + entry.file_size]

    order: Literal["<", ">"] = ">" if prefix + "byteorder" in entries and bytes(record("byteorder")) == b"big" else "<"

    def stored(pid: Any) -> TensorStorage | UnreadValue:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or (len(pid) > 5 and pid[5] is not None):
            raise DamagedError("refers to data outside the file")
        if isinstance(pid[1], UnreadValue):
            return pid[1]
        if not isinstance(pid[1], TensorStorage):
            raise DamagedError("a tensor without a storage")
        if f"{prefix}data/{pid[2]}" not in entries:
            raise DamagedError("was cut off: the bytes of a tensor are missing")
        return TensorStorage(pid[1].kind, record(f"data/{pid[2]}"), order, room)

    return DataUnpickler(BytesIO(record("data.pkl")), TORCH_NAMES, room, stored).load()


def _refusal_error(path: Path, error: Exception) -> DataError:
    """Return an error with our own text, because the library's may advise to trust the file."""
    message = str(error) if isinstance(error, DamagedError) else "it is damaged"
    if message.startswith(REQUEST_PREFIX):
        return DataError(message, file=str(path), remedy="save plain tensors, arrays and numbers")
    return DataError(
        f"cannot be read: {message}", file=str(path), remedy="it is damaged or of another kind: save it again"
    )
