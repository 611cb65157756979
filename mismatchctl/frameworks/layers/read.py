"""Which tool wrote a report is told by what is in it; files that are none are refused in a sentence."""

from __future__ import annotations

import csv
import io
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.files import natural_key
from mismatchctl.frameworks.layers import miles, msprobe, sglang, slime
from mismatchctl.frameworks.layers.judge import judge
from mismatchctl.frameworks.layers.model import LayerReport, Table
from mismatchctl.texts import TextError, parse_json

LARGEST = 256 * 1024 * 1024
"""Bytes of a report that are read: those of a model of a hundred layers and a thousand steps stay far below."""

KNOWN = "known are comparator_report.jsonl of SGLang and Miles, slime's JSON and text, and msprobe's CSV and JSON"
SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".log")


def read_layers(path: str) -> list[LayerReport]:
    """The reports at a path: a file, or a folder of the reports of several ranks or steps.

    Raises:
        DataError: it cannot be read, or is no report of a known comparator.
    """
    place = Path(path)
    if not place.is_dir():
        return _reports(place)
    files = sorted(
        (file for file in place.rglob("*") if file.suffix in SUFFIXES), key=lambda file: natural_key(str(file))
    )
    found = [report for file in files if (tables := _tables(file)) for report in _judged(tables, file)]
    if not found:
        raise DataError("no file below this folder is a report of a comparator", file=path, remedy=KNOWN)
    return found


def _reports(file: Path) -> list[LayerReport]:
    tables = _tables(file)
    if tables is None:
        raise DataError("this is no report of a known comparator", file=str(file), remedy=KNOWN)
    reports = _judged(tables, file)
    if not any(report.tensors for report in reports):
        raise DataError(
            "the report compares no tensor", file=str(file), remedy="run the comparison again; see what it logs"
        )
    return reports


def _judged(tables: Sequence[Table], file: Path) -> list[LayerReport]:
    return [judge(table, str(file)) for table in tables]


def _tables(file: Path) -> list[Table] | None:
    text = _text(file)
    if file.suffix == ".csv":
        return _csv(text, file)
    if miles.recognizes(text):
        return [miles.table(text)]
    try:
        return _document(parse_json(text, as_python_writes=True), file)
    except TextError:
        pass
    if slime.recognizes_text(text):
        return [slime.text_table(text)]
    records = _lines(text)
    return [sglang.table(records)] if sglang.recognizes(records) else None


def _document(document: Any, file: Path) -> list[Table] | None:
    if slime.recognizes(document):
        return [slime.table(document)]
    if msprobe.recognizes_ranks(document):
        return [msprobe.ranks_table(document, file.name)]
    if msprobe.recognizes_first(document):
        return msprobe.first_tables(document)
    return [sglang.table([document])] if sglang.recognizes([document]) else None


def _csv(text: str, file: Path) -> list[Table] | None:
    try:
        reader = csv.DictReader(io.StringIO(text))
        if not msprobe.recognizes(reader.fieldnames or ()):
            return None
        return [msprobe.table(list(reader), file.name)]
    except csv.Error as error:
        raise DataError(f"not a readable CSV: {error}", file=str(file)) from None


def _lines(text: str) -> list[Any]:
    """The records of JSON lines; a last line that was cut off is passed over, anything else makes it no report."""
    records: list[Any] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse_json(line, as_python_writes=True))
        except TextError:
            return records if number == len(lines) else []
    return records


def _text(file: Path) -> str:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError("not a regular file", file=str(file))
        if found.st_size > LARGEST:
            raise DataError(f"larger than the {LARGEST >> 20} MiB that are read of a report", file=str(file))
        return file.read_bytes().decode()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file)) from None
    except UnicodeDecodeError:
        raise DataError("not a text: its bytes are no UTF-8", file=str(file), remedy=KNOWN) from None
