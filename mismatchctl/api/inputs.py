"""Types of arguments of the Python API, and functions that check and convert arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, Union

from mismatchctl.errors import ConfigError, kind_of, suggestion

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    import pyarrow as pa
    from numpy.typing import NDArray

    from mismatchctl.corrections.model import Correction
    from mismatchctl.data.formats import MemoryTable
    from mismatchctl.data.paths import DumpSource
    from mismatchctl.results.model import Result


P = ParamSpec("P")
Returned = TypeVar("Returned")


def public_function(function: Callable[P, Returned]) -> Callable[P, Returned]:
    """Decorate a public function: an unknown keyword raises an error with a suggestion, and BLAS uses one thread."""
    names = [name for name, one in signature(function).parameters.items() if one.kind != one.VAR_POSITIONAL]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Returned:
        for name in kwargs:
            if name not in names:
                near = suggestion(name, names)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{near}")
        from mismatchctl.io.process import limit_to_one_thread

        with limit_to_one_thread():
            return function(*args, **kwargs)

    return call


class ArrowTable(Protocol):
    """A table with the Arrow stream interface, such as a table of polars, pandas, pyarrow or DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class PandasTable(Protocol):
    """A pandas DataFrame, also of an old pandas version without the Arrow stream interface."""

    @property
    def iloc(self) -> object: ...


class FormattedDataset(Protocol):
    """A `Dataset` of the Hugging Face package `datasets`."""

    def with_format(self, type: str) -> object: ...


class TorchTensor(Protocol):
    """A torch tensor. Nested tensors, whose rows have different lengths, are allowed too."""

    def detach(self) -> object: ...


StrPath: TypeAlias = Union[str, "os.PathLike[str]"]
"""A path: a string or a path object such as `pathlib.Path`."""
Values: TypeAlias = Union["NDArray[np.generic]", TorchTensor, ArrowTable, Sequence[object]]
"""One number per token: an array or tensor [sequences, tokens], a nested tensor, a list of rows, or a list column."""
Columns: TypeAlias = Mapping[str, Values]
"""Column name -> values. The short names `rollout`, `train`, `mask` and `current` are allowed (SHORT_NAMES)."""
Table: TypeAlias = Union[ArrowTable, PandasTable, "pl.LazyFrame", FormattedDataset, Columns]
"""A table with one row per sequence."""
Source: TypeAlias = StrPath | Table
"""A path (file, folder or glob) or a table in memory. Each source is one run."""
Sources: TypeAlias = Source | Iterable[Source]
"""One or several sources."""
CorrectionLike: TypeAlias = Union[str, "os.PathLike[str]", "Correction", Mapping[str, object]]
"""A correction: a preset, a YAML or TOML file, a Correction, or a mapping such as {"weight": {"truncate": 2}}."""
Corrections: TypeAlias = CorrectionLike | Iterable[CorrectionLike]
"""One or several corrections."""
Texts: TypeAlias = str | Iterable[str]
"""One string or several strings."""
Progress: TypeAlias = Callable[[int, int], None]
"""A function that is called while data is read, with (number of tokens read so far, expected number of tokens)."""

SHORT_NAMES = {"rollout": "rollout_log_probs", "train": "train_log_probs", "mask": "response_mask"}
SHORT_NAMES |= {"current": "current_log_probs"}


def list_sources(given: object) -> list[DumpSource]:
    from mismatchctl.data.formats import MemoryTable

    found: list[DumpSource] = []
    for source in list_inputs(given):
        if not isinstance(source, (str, MemoryTable)):
            raise ConfigError("a Result does not contain tokens; pass the dumps instead")
        found.append(source)
    return found


def list_inputs(given: object) -> list[DumpSource | Result]:
    from mismatchctl.results.model import Result

    flat = list(_flatten(given))
    in_memory = sum(not isinstance(source, str) for source in flat)
    found: list[DumpSource | Result] = []
    number = 0
    for source in flat:
        number += not isinstance(source, str)
        title = "the table in memory" if in_memory == 1 else f"table {number} in memory"
        found.append(source if isinstance(source, (str, Result)) else make_memory_table(source, title, number))
    return found


def _flatten(given: object) -> Iterator[object]:
    is_one = isinstance(given, bytes) or not isinstance(given, (Sequence, Set, MappingView, Iterator))
    if isinstance(given, (str, os.PathLike)):
        yield os.fspath(given)
    elif is_one or not isinstance(given, Iterable):
        yield given
    else:
        for source in list_in_order(given):
            yield from _flatten(source)


def make_memory_table(source: object, title: str = "the table in memory", number: int = 1) -> MemoryTable:
    """Convert a table of any supported library to a MemoryTable. The table has one row per sequence."""
    import pyarrow as pa
    from polars.exceptions import PolarsError

    from mismatchctl.data.formats import MemoryTable

    try:
        table = _convert_to_arrow(source)
        if table is not None:
            return MemoryTable.of(table, title, number)
    except (NotImplementedError, OverflowError, TypeError, ValueError, pa.ArrowException, PolarsError) as error:
        # a streamed dataset of Hugging Face raises NotImplementedError when its rows are read
        message = error.args[-1] if error.args else type(error).__name__  # pyarrow's last argument names the column
        why = str(message).partition("\n")[0]
        raise ConfigError(f"cannot convert {kind_of(source)} to a table: {why}") from None
    wanted = "a path, a table (polars, pandas or Arrow) or a mapping of columns"
    raise ConfigError(f"a dump must be {wanted}, found {kind_of(source)}")


def _convert_to_arrow(source: object) -> pa.Table | None:
    import polars as pl
    import pyarrow as pa

    if isinstance(source, pl.LazyFrame):
        source = source.collect()
    if isinstance(source, pl.DataFrame):
        odd = next((name for name, kind in source.schema.items() if kind == pl.Object), None)
        if odd is not None:
            raise ConfigError(f"column {odd}: expected numbers, strings or lists, found Python objects")
        for name, dtype in source.schema.items():
            if "Int128" in str(dtype):  # or UInt128, which older versions of polars lack
                if dtype.is_nested():
                    raise ConfigError(f"column {name}: expected integers of at most 64 bits, found {dtype}")
                source = source.with_columns(pl.col(name).cast(pl.String))
        return source.to_arrow(compat_level=pl.CompatLevel.oldest())
    if isinstance(source, pa.Table):
        return source
    if isinstance(source, (pl.Series, pa.Array, pa.ChunkedArray)):
        return None
    kind = type(source).__module__.partition(".")[0]
    if kind == "pandas" and hasattr(source, "columns"):
        frame: Any = source
        _check_names(frame.columns)
        levels = [name for name in frame.index.names if name is not None and name not in frame.columns]
        frame = frame.reset_index(levels)
        try:
            return pa.Table.from_pandas(frame, preserve_index=False)
        except (OverflowError, TypeError, ValueError, pa.ArrowException):
            for name in frame.columns if frame.columns.is_unique else ():
                _check_pandas_column(frame[name], name)
            raise
    if kind == "pyarrow":
        return pa.table(source)
    if isinstance(source, Mapping):
        return _convert_columns(source)
    if hasattr(source, "with_format"):
        return pa.table(source.with_format("arrow")[:])
    return pa.table(source) if hasattr(source, "__arrow_c_stream__") else None


_MIXED_TYPES = "expected only numbers, only lists of numbers or only text, found values of several types"


def _check_pandas_column(values: Any, name: str) -> None:
    import pyarrow as pa

    try:
        pa.array(values, from_pandas=True)
    except OverflowError:
        raise ConfigError(f"column {name} contains integers above 64 bits; store ids as text") from None
    except (TypeError, ValueError, pa.ArrowException):
        raise ConfigError(f"column {name}: {_MIXED_TYPES}") from None


def _convert_columns(columns: Mapping[object, object]) -> pa.Table:
    import pyarrow as pa

    names = _check_names(columns)
    if twice := [name for name in names if SHORT_NAMES.get(name, name) != name and SHORT_NAMES[name] in columns]:
        raise ConfigError(f"{twice[0]} and {SHORT_NAMES[twice[0]]} are the same column; pass only one of them")
    arrays = {SHORT_NAMES.get(name, name): _convert_column(columns[name], name) for name in names}
    rows = {name: len(array) for name, array in arrays.items()}
    if len(set(rows.values())) > 1:
        raise ConfigError(f"the numbers of rows differ: {', '.join(f'{n} has {k}' for n, k in rows.items())}")
    return pa.table(arrays)


def _check_names(columns: Iterable[object]) -> list[str]:
    names = list(columns)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"column names must be strings, found {kind_of(odd[0])}")
    return [str(name) for name in names]


def _convert_column(values: object, name: str) -> pa.Array | pa.ChunkedArray:
    import numpy as np
    import pyarrow as pa

    from mismatchctl.corrections.tensors import TensorLayout
    from mismatchctl.data.formats import make_array

    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if hasattr(values, "__arrow_c_stream__"):
        return pa.chunked_array(values)
    shape = () if getattr(values, "is_nested", False) else getattr(values, "shape", ())
    if len(shape) == 1 and hasattr(values, "tolist"):
        return make_array(values.tolist())
    if isinstance(values, (list, tuple, range)) and (not values or np.ndim(values[0]) == 0):
        if odd := next((value for value in values if type(value) is object), None):
            raise ConfigError(f"column {name}: expected numbers, strings or lists, found {kind_of(odd)}")
        try:
            return make_array(list(values))
        except (TypeError, pa.ArrowException):
            raise ConfigError(f"column {name}: {_MIXED_TYPES}") from None
    layout = TensorLayout.from_values(values, name)
    flat = layout.flat()
    if flat.dtype.kind not in "fiub":
        return pa.array([row.tolist() for row in layout.rows])
    offsets = np.cumsum([0, *layout.lengths], dtype=np.int64)
    kind = np.result_type(*layout.rows) if layout.rows else flat.dtype
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(flat, kind)))


def parse_corrections(given: object) -> list[Correction]:
    from mismatchctl.corrections.model import Correction
    from mismatchctl.corrections.presets import parse_correction, read_corrections
    from mismatchctl.frameworks.registry import find_preset

    if isinstance(given, Correction):
        return [given]
    if isinstance(given, Mapping):
        return [parse_correction(given)]
    if isinstance(given, os.PathLike):
        return read_corrections(Path(given))
    if isinstance(given, str):
        return read_corrections(given) if Path(given).suffix in (".yaml", ".yml", ".toml") else [find_preset(given)]
    if isinstance(given, Iterable):
        return [correction for one in list_in_order(given) for correction in parse_corrections(one)]
    raise ConfigError(f"expected a correction (a name, a Correction, a mapping or a file), found {kind_of(given)}")


def single_correction(given: object) -> Correction:
    found = parse_corrections(given)
    if len(found) != 1:
        raise ConfigError(f"expected one correction, found {len(found)}")
    return found[0]


def list_in_order(given: Iterable[object]) -> list[object]:
    """Return the values as a list. A set is sorted, so that results do not depend on its random order."""
    return sorted(given, key=str) if isinstance(given, Set) and not isinstance(given, MappingView) else list(given)


def list_texts(given: object, wanted: str) -> list[str]:
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    several = isinstance(given, Iterable) and not isinstance(given, (bytes, Mapping))
    found = list_in_order(given) if several and isinstance(given, Iterable) else [given]
    if wrong := [text for text in found if not isinstance(text, str)]:
        raise ConfigError(f"{wanted}, not {kind_of(wrong[0])}")
    return [str(text) for text in found]


def check_columns(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"columns: expected a mapping such as {{'reward': 'score'}}, found {kind_of(given)}")
    list_texts([*given, *given.values()], "columns: pass names of columns")
    return {str(column): str(name) for column, name in given.items()}


def check_count(name: str, value: object) -> None:
    import numpy as np

    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and not (whole and int(str(value)) >= 1):
        raise ConfigError(f"{name}: expected an integer of at least 1, found {value!r}")


def check_number(name: str, value: object) -> None:
    import numpy as np

    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ConfigError(f"{name}: expected a number, found {value!r}")
    if np.isnan(value):
        raise ConfigError(f"{name}: expected a number, found NaN")


def check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        near = suggestion(value, known) if isinstance(value, str) else ""
        raise ConfigError(f"{name}: pass {' or '.join(map(repr, known))}, not {value!r}{near}")


@contextmanager
def config_file(config: StrPath | Mapping[str, object]) -> Iterator[Path | str]:
    """Yield the path of `config`. A mapping is written to a temporary file, which error messages call "the mapping"."""
    if not isinstance(config, Mapping):
        yield os.fspath(config)
        return
    import tempfile

    from yaml import YAMLError

    from mismatchctl.io.yaml import dump_yaml

    with tempfile.TemporaryDirectory(prefix="mismatchctl-") as folder:
        path = Path(folder) / "config.yaml"
        try:
            path.write_text(dump_yaml(dict(config)), encoding="utf-8")
        except YAMLError as error:
            held = type(error.args[-1]).__name__
            raise ConfigError(f"the mapping contains an object of type {held}, which YAML cannot store") from None
        try:
            yield path
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), "the mapping")) from None
