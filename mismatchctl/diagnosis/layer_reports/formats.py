"""Formats of layer reports: Miles, SGLang, slime and msprobe."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mismatchctl.diagnosis.layer_reports.model import (
    EVERY_LAYER_COMMAND,
    MSPROBE_SYNTAX,
    SLIME_SYNTAX,
    LayerRow,
    LayerTable,
    NoteCounts,
    parse_layer,
    parse_number,
    to_finite,
)

MILES_TOOL = "Miles log-prob comparison"
_MILES_VERDICT = re.compile(r"Logprob Comparison:\s*(PASSED|FAILED)", re.IGNORECASE)
_MILES_FIGURE = re.compile(
    r"(Positions compared|Threshold \(mean\)|Mean abs diff|Max abs diff)\s*:\s*(\S+)", re.IGNORECASE
)


def is_miles_text(text: str) -> bool:
    return _MILES_VERDICT.search(text) is not None


def read_miles_text(text: str) -> LayerTable:
    verdict = _MILES_VERDICT.search(text)
    figures = {name.lower(): parse_number(value.replace(",", "")) for name, value in _MILES_FIGURE.findall(text)}
    mean, limit = figures.get("mean abs diff"), figures.get("threshold (mean)")
    failed = verdict is not None and verdict[1].upper() == "FAILED"
    why = f"mean above the limit of {limit:g}" if failed and limit is not None else "failed" if failed else ""
    notes = ["this report does not contain layers: it only shows whether a layer-wise comparison is useful"]
    if not figures.get("positions compared"):
        notes.insert(0, "no position was compared, which passes there")
    row = LayerRow("log-probs", value=mean, failed=failed, why=why)
    return LayerTable(
        MILES_TOOL,
        "mean absolute difference of the log-probs, nats",
        [row],
        notes,
        unlayered=EVERY_LAYER_COMMAND if failed else "",
    )


SGLANG_TOOL = "SGLang comparator"
SGLANG_RECORD_TYPES = (
    *("config", "rank_info", "input_ids", "log", "summary"),
    *("comparison_tensor", "comparison_non_tensor", "comparison_skip", "comparison_error"),
)
SGLANG_MEASURE = "relative L2 error (sqrt of 2 rel_diff), failed by the comparator's own predicate"
SGLANG_ONE_SIDED_NOTE = "tensors that only the baseline has leave no record in such a report"
_SGLANG_KNOWN_SHARE = 0.5
_SGLANG_LAYER_TAG = re.compile(r"(?:^|___)layer_id=(\d{1,6})(?=___|\.|$)")


def is_sglang_records(records: Sequence[Any]) -> bool:
    """Return True if most lines have known record types. Later versions may have more."""
    typed = [record.get("type") for record in records if isinstance(record, Mapping)]
    known = sum(isinstance(kind, str) and kind in SGLANG_RECORD_TYPES for kind in typed)
    return len(typed) == len(records) and known > _SGLANG_KNOWN_SHARE * len(records)


def read_sglang_records(records: Sequence[Mapping[str, Any]], beside: int = 0) -> LayerTable:
    notes, rows = NoteCounts(), []
    for record in records:
        kind = record.get("type")
        if not isinstance(kind, str) or kind not in SGLANG_RECORD_TYPES:
            notes.add("is a type of record that is not known here, and was passed over", f"{kind!r}")
        elif kind == "comparison_error":
            notes.add(f"could not be compared ({record.get('exception_type')})", str(record.get("name")))
        elif kind == "comparison_skip":
            side, reason = record.get("available_side"), record.get("reason")
            notes.add(f"was not compared ({reason}; the {side} has it)", _sglang_name(record))
            if record.get("errors"):
                rows.append(_make_sglang_row(record, None, f"skipped with errors: {reason}"))
        elif kind == "comparison_non_tensor":
            if record.get("values_equal") is False or record.get("errors"):
                notes.add("differs and is not a tensor", _sglang_name(record))
        elif kind == "comparison_tensor":
            rows.append(_read_sglang_tensor(record))
    said = [*notes.sentences(), SGLANG_ONE_SIDED_NOTE]
    if beside:
        said.insert(0, f"{beside:,} lines are not records and were skipped")
    if not any(record.get("type") == "summary" for record in records):
        said.insert(0, "the report is truncated: the summary line is missing")
    return LayerTable(SGLANG_TOOL, SGLANG_MEASURE, rows, said)


def _read_sglang_tensor(record: Mapping[str, Any]) -> LayerRow:
    diff = record.get("diff")
    if record.get("shape_mismatch") or not isinstance(diff, Mapping):
        shapes = [
            side.get("shape") for side in (record.get("baseline"), record.get("target")) if isinstance(side, Mapping)
        ]
        return _make_sglang_row(record, None, "shapes differ: " + " and ".join(map(str, shapes)))
    squared = to_finite(diff.get("rel_diff"))
    value = None if squared is None else math.sqrt(2 * max(squared, 0.0))
    if squared is None and "rel_diff" in diff:
        return _make_sglang_row(record, None, "not finite on one side")
    if record.get("errors"):
        return _make_sglang_row(record, value, "the comparator noted an error")
    if diff.get("passed") is not True:
        return _make_sglang_row(record, value, f"outside of {diff.get('predicate')}")
    copies = record.get("replicated_checks")
    if isinstance(copies, Iterable) and any(
        isinstance(check, Mapping) and check.get("passed") is not True for check in copies
    ):
        return _make_sglang_row(record, value, "copies on ranks that should be equal differ")
    return _make_sglang_row(record, value, "")


def _make_sglang_row(record: Mapping[str, Any], value: float | None, why: str) -> LayerRow:
    location = record.get("location")
    step = location.get("step") if isinstance(location, Mapping) else None
    name = str(record.get("name"))
    layer = parse_layer(name)
    return LayerRow(
        name,
        layer=_parse_sglang_layer(record) if layer is None else layer,
        step=step if isinstance(step, int) else None,
        value=value,
        failed=bool(why),
        why=why,
    )


def _sglang_name(record: Mapping[str, Any]) -> str:
    layer = _parse_sglang_layer(record)
    return f"{record.get('name')}" if layer is None else f"{record.get('name')} of layer {layer}"


def _parse_sglang_layer(record: Mapping[str, Any]) -> int | None:
    """Return the layer of a dump placed by hand, which only its file names have."""
    for key in ("raw_bundle_info", "available_bundle_info"):
        bundle = record.get(key)
        if not isinstance(bundle, Mapping):
            continue
        for side in (bundle.get("x"), bundle.get("y"), bundle):
            files = side.get("files") if isinstance(side, Mapping) else None
            for file in files if isinstance(files, list) else []:
                found = _SGLANG_LAYER_TAG.search(str(file.get("filename"))) if isinstance(file, Mapping) else None
                if found:
                    return int(found[1])
    return None


SLIME_TOOL = "slime layer-wise comparator"
SLIME_TENSOR_NAME = "residual stream after the layer"
_SLIME_NUMBER = r"([^\s=]+)"
_SLIME_LINE = re.compile(r"(?:^|[\s\]:])layer=\d{1,6}\s[^\n]*max_abs=[^\n]*$", re.MULTILINE)
_SLIME_FACT = re.compile(r"(?<![\w-])(layer|tokens|max_abs|mean_abs)=([^\s,]+)")


_SLIME_KEY = re.compile(r"(?:.*\D)?(\d{1,6})")


def is_slime_document(document: Any) -> bool:
    layers = document.get("layers") if isinstance(document, Mapping) else None
    if not isinstance(layers, Mapping):
        return False
    return "max_hidden_diff" in document or any(
        isinstance(found, Mapping) and "max_abs" in found for found in layers.values()
    )


def read_slime_document(document: Mapping[str, Any]) -> LayerTable:
    layers = {
        int(number[1]): found
        for key, found in document["layers"].items()
        if (number := _SLIME_KEY.fullmatch(key)) and isinstance(found, Mapping)
    }
    limit = to_finite(document.get("max_hidden_diff"))
    facts = (
        (layer, found.get("tokens"), found.get("max_abs"), found.get("mean_abs")) for layer, found in layers.items()
    )
    return _make_slime_table(facts, limit)


def is_slime_text(text: str) -> bool:
    return _SLIME_LINE.search(text) is not None


def read_slime_text(text: str) -> LayerTable:
    lines = [
        dict(reversed(_SLIME_FACT.findall(line))) for line in _SLIME_LINE.findall(text)
    ]  # of a fact said twice, the first
    facts = (
        (
            int(line["layer"]),
            parse_number(line.get("tokens", "")),
            *(parse_number(line.get(f"{of}_abs", "")) for of in ("max", "mean")),
        )
        for line in lines
    )
    limit = re.search(rf'"max_hidden_diff": {_SLIME_NUMBER}', text)
    return _make_slime_table(facts, parse_number(limit[1].rstrip(",")) if limit else None)


def _make_slime_table(facts: Iterable[tuple[Any, ...]], limit: float | None) -> LayerTable:
    rows = []
    for layer, tokens, largest, mean in sorted(facts, key=lambda fact: fact[0]):
        value = to_finite(largest)
        why = ""
        if tokens == 0:
            why = "no token was compared"
        elif value is None or to_finite(mean) is None:
            value, why = None, "not finite (slime's own comparator lets it pass)"
        elif value > (0.0 if limit is None else limit):
            why = "differs" if limit is None else f"above the limit of {limit:g}"
        rows.append(LayerRow(SLIME_TENSOR_NAME, layer=layer, value=value, failed=bool(why), why=why))
    said = "no limit in the report: any difference counts" if limit is None else f"failed above {limit:g}"
    chosen = [row.layer for row in rows if row.layer is not None]
    left = sorted(set(range(chosen[-1] + 1)) - set(chosen)) if chosen else []
    notes = ["the last position of a sequence is never compared"]
    if left:
        named = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        notes.insert(0, f"only chosen layers were compared, not {named}: a fault there shows at the next one")
    measure = f"largest absolute difference of the residual stream, {said}"
    return LayerTable(SLIME_TOOL, measure, rows, notes, again=SLIME_SYNTAX)


MSPROBE_TOOL = "msprobe compare"
TARGET_COLUMN, GOLDEN_COLUMN = "NPU Name", "Bench Name"
_SIDE_SPELLINGS = {
    "target": "npu",
    "test": "npu",
    "device": "npu",
    "golden": "bench",
    "benchmark": "bench",
    "gpu": "bench",
}
_MSPROBE_COLUMNS = (
    *("Name", "Dtype", "max", "min", "mean", "l2norm"),
    *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr", "MinRelativeErr", "MeanRelativeErr", "NormRelativeErr"),
    *("MD5", "Result", "Err_message", "Accuracy Reached or Not"),
)
_CANONICAL_COLUMNS = {
    re.sub(r"[^a-z0-9]", "", f"{side} {fact}".lower()): f"{side}{' ' if side else ''}{fact}"
    for side in ("", "NPU", "Bench")
    for fact in _MSPROBE_COLUMNS
} | {"npumd5": "NPU MD5", "benchmd5": "BENCH MD5"}
MSPROBE_ONE_SIDED_NOTE = "modules that only the golden side has leave no row in such a report"
_RANK_PATTERN = re.compile(r"rank_?(\d+)")

CsvCells = Mapping[str, Any]


def is_msprobe_header(columns: Sequence[str]) -> bool:
    return {TARGET_COLUMN, GOLDEN_COLUMN} <= {_canonical_column(column) for column in columns}


def is_msprobe_rows(document: Any) -> bool:
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(row, Mapping) for row in document)
        and is_msprobe_header([*document[0]])
    )


def _canonical_column(column: Any) -> str:
    words = re.findall(r"[a-z0-9]+", str(column).lower())
    return _CANONICAL_COLUMNS.get(
        "".join([_SIDE_SPELLINGS.get(words[0], words[0]), *words[1:]] if words else []), str(column)
    )


def is_msprobe_rank(document: Any) -> bool:
    return (
        isinstance(document, Mapping)
        and bool(document)
        and all(isinstance(call, Mapping) and {"is_same", "op_items"} <= call.keys() for call in document.values())
    )


def is_msprobe_first(document: Any) -> bool:
    return (
        isinstance(document, Mapping)
        and bool(document)
        and all(
            _RANK_PATTERN.fullmatch(str(rank))
            and isinstance(calls, list)
            and all(isinstance(call, Mapping) and "op_name" in call for call in calls)
            for rank, calls in document.items()
        )
    )


def read_msprobe_rows(cells: Sequence[CsvCells], file: str) -> LayerTable:
    cells = [{_canonical_column(name): value for name, value in cell.items()} for cell in cells]
    value, measure = _choose_measure(cells[0].keys() if cells else ())
    notes = NoteCounts()
    rows = list(_iterate_msprobe_rows(cells, value, notes, _parse_flag))
    return LayerTable(
        MSPROBE_TOOL,
        f"{measure}; failed if Result is error or warning",
        rows,
        [*notes.sentences(), MSPROBE_ONE_SIDED_NOTE],
        _parse_rank(file),
        MSPROBE_SYNTAX,
    )


def read_msprobe_rank(document: Mapping[str, Any], file: str) -> LayerTable:
    notes, rows = NoteCounts(), []
    measure = "relative"
    for call in document.values():
        given = call["op_items"] if isinstance(call["op_items"], list) else []
        items = [item for item in given if isinstance(item, Mapping)]
        value, measure = _choose_measure(items[0].keys() if items else ())
        found = list(_iterate_msprobe_rows(items, value, notes, lambda _: ""))
        if call["is_same"] is False and found:
            last = found[-1]
            found[-1] = LayerRow(
                last.name, last.layer, None, last.value, True, "the call is not the same (is_same false)"
            )
        rows += found
    return LayerTable(
        MSPROBE_TOOL,
        f"{measure}; failed where is_same is false",
        rows,
        [*notes.sentences(), MSPROBE_ONE_SIDED_NOTE],
        _parse_rank(file),
        MSPROBE_SYNTAX,
    )


def read_msprobe_first(document: Mapping[str, Any]) -> list[LayerTable]:
    why = "the first call that is not the same"
    return [
        LayerTable(
            MSPROBE_TOOL,
            "no values: the first differing calls alone",
            [LayerRow(str(call["op_name"]), parse_layer(str(call["op_name"])), failed=True, why=why) for call in calls],
            [MSPROBE_ONE_SIDED_NOTE],
            _parse_rank(rank),
            MSPROBE_SYNTAX,
        )
        for rank, calls in document.items()
    ]


def _iterate_msprobe_rows(
    cells: Sequence[CsvCells],
    value: Callable[[CsvCells], float | None],
    notes: NoteCounts,
    flagged: Callable[[CsvCells], str],
) -> Iterator[LayerRow]:
    for cell in cells:
        name = str(cell.get(TARGET_COLUMN))
        if cell.get(GOLDEN_COLUMN) in (None, "", "N/A"):
            notes.add("is missing on the golden side, and Result passes", name)
            continue
        why = flagged(cell)
        yield LayerRow(name, parse_layer(name), None, value(cell), bool(why), why)


def _parse_flag(cell: CsvCells) -> str:
    result = str(cell.get("Result", "")).strip().lower()
    missed = str(cell.get("Accuracy Reached or Not", "")).strip().lower() == "no"  # of versions without Result
    if result not in ("error", "warning") and not missed:
        return ""
    message = str(cell.get("Err_message") or "").strip("[]\"' ")
    return message.partition('", "')[0] or ("accuracy not reached" if missed else result)


def _choose_measure(columns: Any) -> tuple[Callable[[CsvCells], float | None], str]:
    if "NormRelativeErr" in columns:
        return _statistics_difference, "relative error of the norm, or of the extrema if the norm agrees"
    if "MaxAbsErr" in columns:
        return _tensor_difference, "largest absolute difference over the largest magnitude"
    return _checksum_difference, "checksums: 0 equal, 1 different"


def _statistics_difference(cell: CsvCells) -> float | None:
    norm = _parse_cell(cell.get("NormRelativeErr"))
    if norm != 0.0:
        return norm
    others = (_parse_cell(cell.get(name)) for name in ("MaxRelativeErr", "MinRelativeErr"))
    return max((other for other in others if other is not None), default=0.0)


def _tensor_difference(cell: CsvCells) -> float | None:
    difference = _parse_cell(cell.get("MaxAbsErr"))
    bounds = [_parse_cell(cell.get(name)) for name in ("Bench max", "Bench min")]
    size = max((abs(bound) for bound in bounds if bound is not None), default=0.0)
    return difference if difference is None or size == 0 else difference / size


def _checksum_difference(cell: CsvCells) -> float | None:
    return float(cell.get("NPU MD5") != cell.get("BENCH MD5")) if "NPU MD5" in cell else None


def _parse_cell(cell: Any) -> float | None:
    """Parse a number or a percentage. Other text, such as `N/A` or `unsupported`, is None."""
    if not isinstance(cell, str):
        return to_finite(cell)
    text = cell.strip()
    number = parse_number(text.removesuffix("%"))
    return None if number is None else abs(number) / (100 if text.endswith("%") else 1)


def _parse_rank(name: str) -> str | None:
    found = _RANK_PATTERN.search(name)
    return found[1] if found else None
