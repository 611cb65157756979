"""A pickle read as data: of its instructions those that values are made of, and of its names the stand-ins."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from mismatchctl.dumps.foreign.standins import Array, DamagedError, Dtype, PickleCall, UnreadValue, plain_key

ASKS = "it asks for "
_REFUSED = (
    *("PERSID", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET", "NEXT_BUFFER", "READONLY_BUFFER"),
)
"""Instructions that build objects of classes, which no number needs."""


class Stream(Protocol):
    """Bytes that are read one after another, and are never more than there are."""

    def read(self, size: int = ...) -> bytes:
        """The next bytes."""

    def readline(self) -> bytes:
        """The next line."""


class Unpickler(pickle._Unpickler):
    """Python's own and not the one in C, which takes the memory that a made-up index of its memo asks for.

    The values that a pickle holds are plain ones, numpy arrays, and what else `names` stand for.
    """

    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]

    def __init__(
        self, stream: Stream, names: Mapping[tuple[str, str], Any], stored: Callable[[Any], Any] | None = None
    ) -> None:
        """Begin.

        Args:
            stream: the pickle, and whatever may follow it.
            names: what stands for a module's name; every other is refused.
            stored: what stands for an identity that lies outside of the pickle.
        """
        super().__init__(stream)
        self._names, self._stored = names, stored

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name.

        Raises:
            DamagedError: it has none.
        """
        found = self._names.get((module, name))
        if found is None and module == "torch" and name.startswith(("float8", "float4", "quint", "qint", "bits")):
            return UnreadValue(f"torch.{name}")
        if found is None:
            raise DamagedError(f"{ASKS}{module[:100]}.{name[:100]}, and nothing in a file is executed")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """What stands for something outside of the pickle."""
        if self._stored is None:
            raise DamagedError("refers to what lies outside of it")
        return self._stored(pid)

    def _refuse(self) -> None:
        raise DamagedError("holds objects of classes, and nothing in a file is executed")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(function, PickleCall):
            raise DamagedError(f"calls what is no function: {type(function).__name__}")
        self.stack[-1] = function(arguments)

    def _build(self) -> None:
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, (Array, Dtype)):
            built.build(state)
            self.stack[-1] = _whole(built)
        elif not isinstance(built, dict):  # an ordered dict may have attributes, which say nothing here
            self._refuse()

    def _get(self, index: int) -> None:
        if index not in self.memo:
            raise DamagedError("refers to a value that it does not hold")
        self.append(_whole(self.memo[index]))

    def _text_get(self) -> None:
        self._get(int(self.readline()[:-1]))

    def _short_get(self) -> None:
        self._get(self.read(1)[0])

    def _long_get(self) -> None:
        self._get(int.from_bytes(self.read(4), "little"))

    def _put_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._into()[plain_key(key)] = value

    def _put_items(self) -> None:
        items = self.pop_mark()
        into = self._into()
        for key, value in zip(items[::2], items[1::2], strict=True):
            into[plain_key(key)] = value

    def _make_dict(self) -> None:
        items = self.pop_mark()
        self.append({plain_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def _into(self) -> dict[Any, Any]:
        found = self.stack[-1]
        if not isinstance(found, dict):
            raise DamagedError("puts items into what is no dict")
        return found

    def _append_one(self) -> None:
        value = self.stack.pop()
        self._list().append(value)

    def _append_many(self) -> None:
        values = self.pop_mark()
        self._list().extend(values)

    def _list(self) -> list[Any]:
        found = self.stack[-1]
        if not isinstance(found, list):
            raise DamagedError("appends to what is no list")
        return found


_DISPATCH: dict[int, Callable[[Any], None]] = {
    **pickle._Unpickler.dispatch,
    **{getattr(pickle, name)[0]: Unpickler._refuse for name in _REFUSED},
    pickle.REDUCE[0]: Unpickler._reduce,
    pickle.BUILD[0]: Unpickler._build,
    pickle.GET[0]: Unpickler._text_get,
    pickle.BINGET[0]: Unpickler._short_get,
    pickle.LONG_BINGET[0]: Unpickler._long_get,
    pickle.SETITEM[0]: Unpickler._put_item,
    pickle.SETITEMS[0]: Unpickler._put_items,
    pickle.DICT[0]: Unpickler._make_dict,
    pickle.APPEND[0]: Unpickler._append_one,
    pickle.APPENDS[0]: Unpickler._append_many,
}
"""What each instruction does."""
Unpickler.dispatch = _DISPATCH


def _whole(value: Any) -> Any:
    """A value, of an array in the making what became of it."""
    return value.value if isinstance(value, Array) and value.value is not None else value
