"""Which tool wrote a report is told by what is in it; files that are none are refused in a sentence."""

from __future__ import annotations

import csv
import io
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mismatchctl.errors import DataError
from mismatchctl.files import natural_key
from mismatchctl.frameworks.layers import miles, msprobe, sglang, slime
from mismatchctl.frameworks.layers.judge import judge
from mismatchctl.frameworks.layers.model import LayerReport, LayerTable
from mismatchctl.texts import TextError, parse_json

LARGEST = 256 * 1024 * 1024
"""Bytes of a report that are read: those of a model of a hundred layers and a thousand steps stay far below."""

KNOWN = "known are comparator_report.jsonl of SGLang and Miles, slime's JSON and text, and msprobe's CSV and JSON"
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".log", ".out")
SPREADSHEETS = (".xlsx", ".xls")
SPREADSHEET = "save the table as CSV, or run msprobe compare without --xlsx"
_PART = re.compile(r"_part_?\d+$")
_MOST_ECHOED = 0.5
"""Lines beside the records, of all, where what a comparator printed was kept with a log."""


def read_layers(path: str) -> list[LayerReport]:
    """The reports at a path: a file, or a folder of the reports of several ranks or steps.

    Raises:
        DataError: it cannot be read, or is no report of a known comparator.
    """
    place = Path(path)
    if not place.is_dir():
        return _reports(place)
    files = sorted(place.rglob("*"), key=lambda file: natural_key(str(file)))
    tables = [(file, table) for file in files if file.suffix.lower() in SUFFIXES for table in _passing_over(file)]
    if not tables:
        remedy = SPREADSHEET if any(file.suffix.lower() in SPREADSHEETS for file in files) else KNOWN
        raise DataError("no file below this folder is a report of a comparator", file=path, remedy=remedy)
    return [judge(table, str(file)) for file, table in _joined(tables)]


def _joined(tables: Sequence[tuple[Path, LayerTable]]) -> list[tuple[Path, LayerTable]]:
    """Parts of one report as one: msprobe splits a CSV of more than a million rows."""
    found: dict[tuple[Path, str | None], tuple[Path, LayerTable]] = {}
    for number, (file, table) in enumerate(tables):
        part = _PART.search(file.stem)
        key = (file.with_name(_PART.sub("", file.stem) + file.suffix) if part else Path(str(number)), table.rank)
        known = found.get(key)
        found[key] = (
            (file, table)
            if known is None
            else (known[0], replace(known[1], rows=[*known[1].rows, *table.rows],
                                    notes=[*dict.fromkeys((*known[1].notes, *table.notes))]))
        )  # fmt: skip
    return list(found.values())


def _reports(file: Path) -> list[LayerReport]:
    tables = _tables(file)
    if tables is None:
        raise DataError("this is no report of a known comparator", file=str(file), remedy=KNOWN)
    reports = [judge(table, str(file)) for table in tables]
    if not any(report.tensors for report in reports):
        raise DataError(
            "the report compares no tensor", file=str(file), remedy="run the comparison again; see what it logs"
        )
    return reports


class _NoTextError(DataError):
    """What is named .out or .log is not always a text."""


def _passing_over(file: Path) -> Sequence[LayerTable]:
    """The tables of one of the files in a folder, none of one that is no report."""
    try:
        return _tables(file) or ()
    except _NoTextError:
        return ()


def _tables(file: Path) -> list[LayerTable] | None:
    if file.suffix.lower() in SPREADSHEETS:
        raise DataError("a spreadsheet is not read", file=str(file), remedy=SPREADSHEET)
    text = _text(file)
    if file.suffix.lower() in (".csv", ".tsv"):
        return _csv(text, file)
    if miles.recognizes(text):
        return [miles.table(text)]
    try:
        return _document(parse_json(text, as_python_writes=True), file)
    except TextError:
        pass
    if slime.recognizes_text(text):
        return [slime.text_table(text)]
    records, beside = _lines(text)
    if msprobe.is_rows(records):
        return [msprobe.table(records, file.name)]
    return [sglang.table(records, beside)] if sglang.recognizes(records) else None


def _document(document: Any, file: Path) -> list[LayerTable] | None:
    if slime.recognizes(document):
        return [slime.table(document)]
    if msprobe.recognizes_ranks(document):
        return [msprobe.ranks_table(document, file.name)]
    if msprobe.recognizes_first(document):
        return msprobe.first_tables(document)
    records = document if isinstance(document, list) else [document]
    if msprobe.is_rows(records):
        return [msprobe.table(records, file.name)]
    return [sglang.table(records)] if sglang.recognizes(records) else None


def _csv(text: str, file: Path) -> list[LayerTable] | None:
    try:
        heads = text.partition("\n")[0]
        separator = max(",;\t", key=heads.count)  # spreadsheets write others in some countries
        reader = csv.DictReader(io.StringIO(text), delimiter=separator)
        if not msprobe.recognizes(reader.fieldnames or ()):
            return None
        return [msprobe.table(list(reader), file.name)]
    except csv.Error as error:
        raise DataError(f"not a readable CSV: {error}", file=str(file)) from None


def _lines(text: str) -> tuple[list[Any], int]:
    """The records of JSON lines, and how many lines beside them are none: a last one that was cut off, or of a log."""
    records: list[Any] = []
    lines = [line for line in text.splitlines() if line.strip()]
    beside = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line, as_python_writes=True))
        except TextError:
            beside += number < len(lines)
    return (records, beside) if beside <= _MOST_ECHOED * len(lines) else ([], beside)


def _text(file: Path) -> str:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError("not a regular file", file=str(file))
        if found.st_size > LARGEST:
            raise DataError(f"larger than the {LARGEST >> 20} MiB that are read of a report", file=str(file))
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file)) from None
    except UnicodeDecodeError:
        raise _NoTextError("not a text: its bytes are no UTF-8", file=str(file), remedy=KNOWN) from None
