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

from mismatchctl.diagnosis.layer_reports.formats import (
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
_MAX_TURN_SHARE, _MIN_CHANGES, _MIN_DESCENT = 0.5, 8, 3
"""Passes and ranks seldom turn. Fewer changes of layer do not show an order."""
_GRADIENT_PATTERN = re.compile(
    r"(?:^|[._/]|__)(?:backward|grads?|gradients?|d?grad_(?:in|out)put)(?=$|[._/\d])", re.IGNORECASE
)
_HEAD_PATTERN = re.compile(r"(?:^|[./])(?:lm_head|logits?|output_layer|ln_f|(?:final_?)?(?:layer_?)?norm)(?=$|[._/:])")
_FORWARD_PATTERN = re.compile(r"(?:^|[._/])forward(?=$|[._/\d])", re.IGNORECASE)


def sort_rows(rows: Sequence[LayerRow]) -> tuple[Sequence[LayerRow], str]:
    """Return the rows in order of execution, and a note if the order changed or is doubtful."""
    places = [(row.step, row.layer) for row in rows if row.layer is not None]
    changes = [b - a for (first, a), (second, b) in pairwise(places) if first == second and a != b]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(changes))
    if len(changes) >= _MIN_CHANGES and turns > _MAX_TURN_SHARE * (len(changes) - 1):
        return _sort_by_layer(rows), UNORDERED_NOTE
    if len(changes) + 1 < _MIN_DESCENT or max(changes) > 0:
        return rows, ""
    if any(_GRADIENT_PATTERN.search(row.name) for row in rows):
        return rows, BACKWARD_NOTE.format(why="its names say so")
    if any(_FORWARD_PATTERN.search(row.name) for row in rows):
        return _reverse_rows(rows), REVERSED_NOTE.format(why="its names say so")
    of_layers = [row for row in rows if row.layer is not None]
    of_layers = [row for row in of_layers if row.step == of_layers[0].step]
    top, bottom = ([row for row in of_layers if row.layer == end.layer] for end in (of_layers[0], of_layers[-1]))
    if _is_worse(top, bottom):
        return _reverse_rows(rows), REVERSED_NOTE.format(why="its last layer is bad and its first is good")
    if _is_worse(bottom, top):
        return rows, BACKWARD_NOTE.format(why="its first layer is bad and its last is good")
    return rows, AMBIGUOUS_NOTE if any(row.failed for row in rows) else ""


def _sort_by_layer(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """Sort by step and layer, with the head after the layers and other tensors before them."""
    steps = {step: place for place, step in enumerate(dict.fromkeys(row.step for row in rows))}
    last = 1 + max((row.layer for row in rows if row.layer is not None), default=0)

    def place(row: LayerRow) -> int:
        return row.layer if row.layer is not None else last if _HEAD_PATTERN.search(row.name) else -1

    return sorted(rows, key=lambda row: (steps[row.step], place(row)))


def _is_worse(some: Sequence[LayerRow], others: Sequence[LayerRow]) -> bool:
    bad, other_bad = (any(row.failed for row in layer) for layer in (some, others))
    if bad != other_bad:
        return bad
    value, other = (max((row.value for row in layer if row.value is not None), default=0.0) for layer in (some, others))
    return value > JUMP_FACTOR * other


def _reverse_rows(rows: Sequence[LayerRow]) -> Sequence[LayerRow]:
    """Reverse the rows of each step, or sort them if each layer runs forward."""
    neighbors = [(a, b) for a, b in pairwise(rows) if a.layer is not None and a.layer == b.layer]
    inside = [(_layer_part(a.name), _layer_part(b.name)) for a, b in neighbors]
    if sum(a < b for a, b in inside) > sum(a > b for a, b in inside):
        return _sort_by_layer(rows)
    steps = dict.fromkeys(row.step for row in rows)
    return [row for step in steps for row in reversed([row for row in rows if row.step == step])]


def _layer_part(name: str) -> int:
    """Return the order of a tensor within its layer."""
    later = ("mlp", "moe", "ffn", "feed_forward", "experts", "post_attention")
    return 2 * any(word in name for word in later) + ("output" in name)


_MAX_SPAN = 8  # layers that are compared next, at most


def analyze_table(table: LayerTable, file: str) -> LayerReport:
    rows, order = sort_rows(table.rows)
    bad = next((index for index, row in enumerate(rows) if row.failed), None)
    apart = _find_divergence(rows)
    first = min((index for index in (bad, apart) if index is not None), default=None)
    earlier = [row for row in rows[:first] if row.layer is not None]
    good = [row.layer for row in earlier if first is None or row.layer != rows[first].layer]
    return LayerReport(
        file=file,
        tool=table.tool,
        measure=table.measure,
        tensors=len(rows),
        failed=sum(row.failed for row in rows),
        first_bad=None if bad is None else _make_tensor(rows[bad], rows[bad].why),
        first_apart=None if apart is None else _make_tensor(rows[apart], "parts from all layers before it"),
        before=max((row.value for row in earlier if row.value is not None), default=None),
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
    first = layer if last_good is None else min(last_good, layer)
    return describe_rerun(table.again, range(first, layer + 1)[-_MAX_SPAN:])


def _find_divergence(rows: Sequence[LayerRow]) -> int | None:
    """Return the first row far above every earlier layer, or different after layers that were equal to the bit."""
    before: float | None = None  # the largest of the earlier layers in this step
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
    """Return the largest value of each layer, or `None` if one of its tensors lacks a number."""
    found: dict[int, float | None] = {}
    for row in rows:
        if row.layer is not None:
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
_MAX_ECHOED_SHARE = 0.5  # of lines of a log among the records


def read_layers(path: str) -> list[LayerReport]:
    """Read the reports at a path: a file, or a folder with reports of several ranks or steps.

    Raises:
        DataError: it cannot be read, or is not a report of a known comparator.
    """
    place = Path(path)
    if not place.is_dir():
        tables = _read_tables(place)
        if not tables:
            raise DataError("not a report of a known comparator", file=path, remedy=KNOWN_FORMATS)
        if not any(table.rows for table in tables):
            remedy = "run the comparison again and check its log"
            raise DataError("the report compares no tensor", file=path, remedy=remedy)
        return [analyze_table(table, path) for table in tables]
    files = sorted(walk_files(place), key=lambda file: natural_key(str(file)))
    found = [(file, table) for file in files if file.suffix.lower() in SUFFIXES for table in _read_optional(file)]
    if not found:
        sheets = any(file.suffix.lower() in SPREADSHEET_SUFFIXES for file in files)
        remedy = SPREADSHEET_REMEDY if sheets else KNOWN_FORMATS
        raise DataError("no file below this folder is a report of a comparator", file=path, remedy=remedy)
    return [analyze_table(table, str(file)) for file, table in _join_parts(found)]


def _join_parts(tables: Sequence[tuple[Path, LayerTable]]) -> list[tuple[Path, LayerTable]]:
    """Join the parts of a CSV that msprobe split."""
    found: dict[tuple[Path, str | None], tuple[Path, LayerTable]] = {}
    for number, (file, table) in enumerate(tables):
        part = _PART_SUFFIX.search(file.stem)
        key = (file.with_name(_PART_SUFFIX.sub("", file.stem) + file.suffix) if part else Path(str(number)), table.rank)
        if key in found:
            first, known = found[key]
            notes = [*dict.fromkeys((*known.notes, *table.notes))]
            found[key] = first, replace(known, rows=[*known.rows, *table.rows], notes=notes)
        else:
            found[key] = file, table
    return list(found.values())


class _BinaryFileError(DataError): ...


def _read_optional(file: Path) -> Sequence[LayerTable]:
    try:
        return _read_tables(file)
    except _BinaryFileError:
        return ()


def _read_tables(file: Path) -> Sequence[LayerTable]:
    """Return the tables of a file, none if it is not a report."""
    if file.suffix.lower() in SPREADSHEET_SUFFIXES:
        raise DataError("a spreadsheet is not read", file=str(file), remedy=SPREADSHEET_REMEDY)
    text = _read_text(file)
    if file.suffix.lower() in (".csv", ".tsv"):
        return _filter_tables(_read_csv(text, file))
    if miles := read_miles_text(text):
        return [miles]
    try:
        document = parse_json(text, as_python_writes=True)
    except TextError:
        records, other_lines = _read_lines(text)
        tables = (read_slime_text(text), read_msprobe_rows(records, file.name))
        return _filter_tables(*tables, read_sglang_records(records, other_lines))
    records = document if isinstance(document, list) else [document]
    return read_msprobe_first(document) or _filter_tables(
        read_slime_document(document),
        read_msprobe_rank(document, file.name),
        read_msprobe_rows(records, file.name),
        read_sglang_records(records),
    )


def _filter_tables(*tables: LayerTable | None) -> list[LayerTable]:
    """Return the first table that was recognized."""
    return [table for table in tables if table is not None][:1]


def _read_csv(text: str, file: Path) -> LayerTable | None:
    head = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    try:
        columns = reader.fieldnames or ()
        return read_msprobe_rows(list(reader), file.name, columns)
    except csv.Error as error:
        raise DataError(f"not a readable CSV: {error}", file=str(file)) from None


def _read_lines(text: str) -> tuple[list[object], int]:
    """Parse JSON lines. Returns the records and the number of other lines, without a last incomplete one."""
    records: list[object] = []
    lines = [line for line in text.splitlines() if line.strip()]
    others = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line, as_python_writes=True))
        except TextError:
            others += number < len(lines)
    return (records, others) if others <= _MAX_ECHOED_SHARE * len(lines) else ([], others)


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
        raise _BinaryFileError("not a UTF-8 text file", file=str(file), remedy=KNOWN_FORMATS) from None
