"""Reader of layer reports: recognize the tool, order the rows, find the first bad tensor and the first divergence."""

from __future__ import annotations

import csv
import io
import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from mismatchctl.diagnosis.layer_reports.formats import (
    is_miles_text,
    is_msprobe_first,
    is_msprobe_header,
    is_msprobe_rank,
    is_msprobe_rows,
    is_sglang_records,
    is_slime_document,
    is_slime_text,
    read_miles_text,
    read_msprobe_first,
    read_msprobe_rank,
    read_msprobe_rows,
    read_sglang_records,
    read_slime_document,
    read_slime_text,
)
from mismatchctl.diagnosis.layer_reports.model import LayerReport, LayerRow, LayerTable, Tensor, describe_rerun
from mismatchctl.errors import DataError
from mismatchctl.io.files import natural_key
from mismatchctl.io.stores import walk_files
from mismatchctl.io.yaml import TextError, parse_json

JUMP_FACTOR = 30.0
"""Noise grows by small factors from layer to layer, at most 4 in samples of bfloat16."""
UNORDERED_NOTE = "its tensors are in no order of execution: they were put in that of their layers"
REVERSED_NOTE = "its layers descend, and it is a forward pass ({why}): it was read from its end"
BACKWARD_NOTE = "its layers descend: a backward pass ({why})"
AMBIGUOUS_NOTE = (
    "its layers descend: it was read as a backward pass; a forward pass that was written from its end looks the same, "
    "and would be bad from its lowest layer on"
)
_MAX_TURN_SHARE = 0.5
"""Largest share of turns among the changes of layer. Passes and ranks turn seldom."""
_MIN_CHANGES = 8
_MIN_DESCENT = 3
_GRADIENT_PATTERN = re.compile(
    r"(?:^|[._/]|__)(?:backward|grads?|gradients?|d?grad_(?:in|out)put)(?=$|[._/\d])", re.IGNORECASE
)
_HEAD_PATTERN = re.compile(r"(?:^|[./])(?:lm_head|logits?|output_layer|ln_f|(?:final_?)?(?:layer_?)?norm)(?=$|[._/:])")
"""Tensors after all layers."""
_FORWARD_PATTERN = re.compile(r"(?:^|[._/])forward(?=$|[._/\d])", re.IGNORECASE)


def sort_rows(rows: Sequence[LayerRow]) -> tuple[Sequence[LayerRow], str]:
    """Return the rows in order of execution, and a note if the order changed."""
    places = [(row.step, row.layer) for row in rows if row.layer is not None]
    changes = [b - a for (first, a), (second, b) in pairwise(places) if first == second and a != b]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(changes))
    if len(changes) >= _MIN_CHANGES and turns > _MAX_TURN_SHARE * (len(changes) - 1):
        return _sort_by_layer(rows), UNORDERED_NOTE
    if len(changes) + 1 < _MIN_DESCENT or max(changes) > 0:
        return rows, ""
    return _resolve_descending(rows)


def _sort_by_layer(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """Sort by step and layer, with the head after the layers and other tensors before them."""
    steps = {step: place for place, step in enumerate(dict.fromkeys(row.step for row in rows))}
    last = 1 + max((row.layer for row in rows if row.layer is not None), default=0)

    def place(row: LayerRow) -> int:
        return row.layer if row.layer is not None else last if _HEAD_PATTERN.search(row.name) else -1

    return sorted(rows, key=lambda row: (steps[row.step], place(row)))


def _resolve_descending(rows: Sequence[LayerRow]) -> tuple[Sequence[LayerRow], str]:
    """Interpret descending layers by names or by the place of the error: gradients, or a reversed forward pass."""
    if any(_GRADIENT_PATTERN.search(row.name) for row in rows):
        return rows, BACKWARD_NOTE.format(why="from its names")
    if any(_FORWARD_PATTERN.search(row.name) for row in rows):
        return _reverse_rows(rows), REVERSED_NOTE.format(why="from its names")
    of_layers = [row for row in rows if row.layer is not None]
    of_layers = [row for row in of_layers if row.step == of_layers[0].step]
    top, bottom = ([row for row in of_layers if row.layer == end.layer] for end in (of_layers[0], of_layers[-1]))
    if _is_worse(top, bottom):
        return _reverse_rows(rows), REVERSED_NOTE.format(why="its last layer is bad and its first is good")
    if _is_worse(bottom, top):
        return rows, BACKWARD_NOTE.format(why="its first layer is bad and its last is good")
    bad = any(row.failed for row in rows)
    return rows, AMBIGUOUS_NOTE if bad else ""


def _is_worse(some: Sequence[LayerRow], others: Sequence[LayerRow]) -> bool:
    bad, other_bad = (any(row.failed for row in layer) for layer in (some, others))
    if bad != other_bad:
        return bad
    value, other = (max((row.value for row in layer if row.value is not None), default=0.0) for layer in (some, others))
    return value > JUMP_FACTOR * other


def _reverse_rows(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """Reverse the rows of each step, or sort them if each layer runs forward."""
    steps = dict.fromkeys(row.step for row in rows)
    inside = [
        (_layer_part(a.name), _layer_part(b.name))
        for a, b in pairwise(rows)
        if a.layer is not None and a.layer == b.layer
    ]
    forward = sum(a < b for a, b in inside) > sum(a > b for a, b in inside)
    if forward:
        return _sort_by_layer(rows)
    return [row for step in steps for row in reversed([row for row in rows if row.step == step])]


def _layer_part(name: str) -> int:
    """Return the order of a tensor within its layer."""
    later = ("mlp", "moe", "ffn", "feed_forward", "experts", "post_attention")
    return 2 * any(word in name for word in later) + ("output" in name)


_MAX_SPAN = 8


def analyze_table(table: LayerTable, file: str) -> LayerReport:
    rows, order = sort_rows(table.rows)
    bad = next((index for index, row in enumerate(rows) if row.failed), None)
    apart = _find_divergence(rows)
    first = min((index for index in (bad, apart) if index is not None), default=None)
    earlier = rows[:first] if first is not None else rows
    values = [row.value for row in earlier if row.value is not None and row.layer is not None]
    good = [row.layer for row in earlier if row.layer is not None]
    if first is not None:
        good = [layer for layer in good if layer != rows[first].layer]
    return LayerReport(
        file=file,
        tool=table.tool,
        measure=table.measure,
        tensors=len(rows),
        failed=sum(row.failed for row in rows),
        first_bad=None if bad is None else _make_tensor(rows[bad], rows[bad].why),
        first_apart=None if apart is None else _make_tensor(rows[apart], "parts from all layers before it"),
        before=max(values, default=None),
        last_good=good[-1] if first is not None and good else None,
        growth=_layer_growth(rows),
        notes=[*([order] if order else ()), *table.notes],
        rank=table.rank,
        next=None if first is None else _suggest_next(table, rows[first].layer, good[-1] if good else None),
    )


def _suggest_next(table: LayerTable, layer: int | None, last_good: int | None) -> str | None:
    """Suggest the layers from the last good one to the first bad one."""
    if layer is None:
        return describe_rerun(table.unlayered, []) if table.unlayered else None
    return describe_rerun(
        table.again, range(layer if last_good is None else min(last_good, layer), layer + 1)[-_MAX_SPAN:]
    )


def _find_divergence(rows: Sequence[LayerRow]) -> int | None:
    """Return the first row far above every earlier layer, or different after layers that were equal to the bit."""
    before: float | None = None  # the largest of the layers before, in this step
    here = 0.0
    place: tuple[int | None, int] | None = None
    for index, row in enumerate(rows):
        if row.layer is None or row.value is None:
            continue
        if place is None or row.step != place[0]:
            before, here = None, 0.0
        elif row.layer != place[1]:
            before, here = max(before or 0.0, here), 0.0
        place = (row.step, row.layer)
        if before is not None and row.value > JUMP_FACTOR * before:
            return index
        here = max(here, row.value)
    return None


def _layer_growth(rows: Sequence[LayerRow]) -> list[tuple[int, float | None]]:
    """Return the largest value of each layer, None if a tensor has none."""
    found: dict[int, float | None] = {}
    for row in rows:
        if row.layer is None:
            continue
        known = found.get(row.layer, 0.0)
        found[row.layer] = None if known is None or row.value is None else max(known, row.value)
    return sorted(found.items())


def _make_tensor(row: LayerRow, why: str) -> Tensor:
    return Tensor(name=row.name, layer=row.layer, step=row.step, value=row.value, why=why)


MAX_REPORT_BYTES = 256 * 1024 * 1024

KNOWN_FORMATS = (
    "known are comparator_report.jsonl of SGLang and Miles, slime's JSON and text, and msprobe's CSV and JSON"
)
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".log", ".out")
SPREADSHEET_SUFFIXES = (".xlsx", ".xls")
SPREADSHEET_REMEDY = "save the table as CSV, or run msprobe compare without --xlsx"
_PART_SUFFIX = re.compile(r"_part_?\d+$")
_MAX_ECHOED_SHARE = 0.5


def read_layers(path: str) -> list[LayerReport]:
    """Read the reports at a path: a file, or a folder with reports of several ranks or steps."""
    place = Path(path)
    if not place.is_dir():
        return _read_reports(place)
    files = sorted(walk_files(place), key=lambda file: natural_key(str(file)))
    tables = [
        (file, table) for file in files if file.suffix.lower() in SUFFIXES for table in _read_optional_tables(file)
    ]
    if not tables:
        remedy = (
            SPREADSHEET_REMEDY if any(file.suffix.lower() in SPREADSHEET_SUFFIXES for file in files) else KNOWN_FORMATS
        )
        raise DataError("no file below this folder is a report of a comparator", file=path, remedy=remedy)
    return [analyze_table(table, str(file)) for file, table in _join_parts(tables)]


def _join_parts(tables: Sequence[tuple[Path, LayerTable]]) -> list[tuple[Path, LayerTable]]:
    """Join the parts of a CSV that msprobe split."""
    found: dict[tuple[Path, str | None], tuple[Path, LayerTable]] = {}
    for number, (file, table) in enumerate(tables):
        part = _PART_SUFFIX.search(file.stem)
        key = (file.with_name(_PART_SUFFIX.sub("", file.stem) + file.suffix) if part else Path(str(number)), table.rank)
        known = found.get(key)
        found[key] = (
            (file, table)
            if known is None
            else (known[0], replace(known[1], rows=[*known[1].rows, *table.rows],
                                    notes=[*dict.fromkeys((*known[1].notes, *table.notes))]))
        )  # fmt: skip
    return list(found.values())


def _read_reports(file: Path) -> list[LayerReport]:
    tables = _read_tables(file)
    if tables is None:
        raise DataError("not a report of a known comparator", file=str(file), remedy=KNOWN_FORMATS)
    reports = [analyze_table(table, str(file)) for table in tables]
    if not any(report.tensors for report in reports):
        raise DataError(
            "the report compares no tensor", file=str(file), remedy="run the comparison again and check its log"
        )
    return reports


class _NoTextError(DataError):
    """A file of a folder is binary."""


def _read_optional_tables(file: Path) -> Sequence[LayerTable]:
    try:
        return _read_tables(file) or ()
    except _NoTextError:
        return ()


def _read_tables(file: Path) -> list[LayerTable] | None:
    if file.suffix.lower() in SPREADSHEET_SUFFIXES:
        raise DataError("a spreadsheet is not read", file=str(file), remedy=SPREADSHEET_REMEDY)
    text = _read_text(file)
    if file.suffix.lower() in (".csv", ".tsv"):
        return _read_csv(text, file)
    if is_miles_text(text):
        return [read_miles_text(text)]
    try:
        return _read_document(parse_json(text, as_python_writes=True), file)
    except TextError:
        pass
    if is_slime_text(text):
        return [read_slime_text(text)]
    records, beside = _read_lines(text)
    if is_msprobe_rows(records):
        return [read_msprobe_rows(records, file.name)]
    return [read_sglang_records(records, beside)] if is_sglang_records(records) else None


def _read_document(document: Any, file: Path) -> list[LayerTable] | None:
    if is_slime_document(document):
        return [read_slime_document(document)]
    if is_msprobe_rank(document):
        return [read_msprobe_rank(document, file.name)]
    if is_msprobe_first(document):
        return read_msprobe_first(document)
    records = document if isinstance(document, list) else [document]
    if is_msprobe_rows(records):
        return [read_msprobe_rows(records, file.name)]
    return [read_sglang_records(records)] if is_sglang_records(records) else None


def _read_csv(text: str, file: Path) -> list[LayerTable] | None:
    try:
        heads = text.partition("\n")[0]
        separator = max(",;\t", key=heads.count)  # spreadsheets write others in some countries
        reader = csv.DictReader(io.StringIO(text), delimiter=separator)
        if not is_msprobe_header(reader.fieldnames or ()):
            return None
        return [read_msprobe_rows(list(reader), file.name)]
    except csv.Error as error:
        raise DataError(f"not a readable CSV: {error}", file=str(file)) from None


def _read_lines(text: str) -> tuple[list[Any], int]:
    """Parse JSON lines. Returns the records and the number of other lines, without a last incomplete one."""
    records: list[Any] = []
    lines = [line for line in text.splitlines() if line.strip()]
    beside = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line, as_python_writes=True))
        except TextError:
            beside += number < len(lines)
    return (records, beside) if beside <= _MAX_ECHOED_SHARE * len(lines) else ([], beside)


def _read_text(file: Path) -> str:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError("not a regular file", file=str(file))
        if found.st_size > MAX_REPORT_BYTES:
            raise DataError(f"larger than the {MAX_REPORT_BYTES >> 20} MiB that are read of a report", file=str(file))
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", file=str(file)) from None
    except UnicodeDecodeError:
        raise _NoTextError("not a UTF-8 text file", file=str(file), remedy=KNOWN_FORMATS) from None
