"""Reading a Result back: whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.errors import ConfigError, DataError, kind_of
from mismatchctl.files import first_bytes
from mismatchctl.result.check import problems
from mismatchctl.result.model import FORMAT, Result
from mismatchctl.result.story import tell
from mismatchctl.stores import read_whole, remote
from mismatchctl.texts import TextError, decoded, parse_json
from mismatchctl.validation import explained

_REMEDY = "name a file written by analyze -o"


def is_result(path: str | Path) -> bool:
    """Whether a path is a Result rather than a dump: a file that begins with a brace, and is no JSON lines.

    One that is empty, cannot be read or lies in an object store goes by its suffix.
    """
    if Path(path).suffix == ".jsonl":
        return False
    if remote(str(path)):
        return str(path).endswith(".json")
    try:
        start = first_bytes(path, 64).lstrip()
    except OSError:
        return Path(path).suffix == ".json" and not Path(path).is_dir()
    return start.startswith(b"{") or (not start and Path(path).suffix == ".json")


def read_result(path: str | Path) -> Result:
    """Read a Result back; what comes of it need not be doubted.

    Raises:
        DataError: the file is missing, is no whole Result, or is of a format that this version does not know.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a result is read from a path, not from {kind_of(path)}")
    return result_of(read_json(path, _REMEDY), str(path))


def read_json(path: str | Path, remedy: str) -> Any:
    """The data of a JSON file, wherever it lies.

    Raises:
        DataError: it cannot be read, or is no JSON.
    """
    try:
        return parse_json(decoded(read_whole(path)))
    except OSError as error:
        raise DataError(error.strerror or str(error), file=str(path), remedy=remedy) from None
    except TextError as error:
        raise DataError(f"not JSON: {error}", file=str(path), remedy=remedy) from None


def result_of(data: Any, name: str) -> Result:
    """The Result that the file of this name holds as data.

    Raises:
        DataError: as of `read_result`.
    """
    if not isinstance(data, dict) or "format" not in data or "runs" not in data:
        raise DataError("not a mismatchctl result", file=name, remedy=_REMEDY)
    if data["format"] != FORMAT:
        newer = type(data["format"]) is int and data["format"] > FORMAT
        problem = f"result format {data['format']!r}, this version reads {FORMAT}"
        remedy = "analyze the dump again with this version"
        raise DataError(problem, file=name, remedy=f"install a newer mismatchctl, or {remedy}" if newer else remedy)
    try:
        result = Result.model_validate(data)
    except ValidationError as error:
        problem = f"damaged result: {explained(error, Result, most=1)}"
        raise DataError(problem, file=name, remedy="analyze the dump again") from None
    wrong = next(problems(result), None)
    if wrong is not None:
        raise DataError(f"damaged result: {wrong}", file=name, remedy="analyze the dump again")
    for run in result.runs.values():
        run.story = run.story or tell(run)  # those of earlier versions have none
    return result
