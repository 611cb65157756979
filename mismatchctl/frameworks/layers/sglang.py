"""SGLang's comparator: JSON lines, a record a tensor in the order of execution. Miles starts the same tool.

Its rel_diff is 1 - 2<x,y> / (|x|^2 + |y|^2), about half the square of the relative L2 error; values here are that
error, sqrt(2 rel_diff), so that they compare with those of other tools. NaN and infinities are written as null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mismatchctl.frameworks.layers.model import LayerRow, LayerTable, Notes, finite, layer_in

TOOL = "SGLang comparator"
TYPES = (
    *("config", "rank_info", "input_ids", "log", "summary"),
    *("comparison_tensor", "comparison_non_tensor", "comparison_skip", "comparison_error"),
)
"""Of its records; no set, as a stranger's type may be a list."""
MEASURE = "relative L2 error (sqrt of 2 rel_diff), failed by the comparator's own predicate"
ONE_SIDED = "tensors that only the baseline has leave no record in such a report"
_MOST = 0.5
_TAG = re.compile(r"(?:^|___)layer_id=(\d{1,6})(?=___|\.|$)")


def recognizes(records: Sequence[Any]) -> bool:
    """Whether lines of JSON are such a report: most have a type that it has, as a later version may have more."""
    typed = [record.get("type") for record in records if isinstance(record, Mapping)]
    known = sum(isinstance(kind, str) and kind in TYPES for kind in typed)
    return len(typed) == len(records) and known > _MOST * len(records)


def table(records: Sequence[Mapping[str, Any]], beside: int = 0) -> LayerTable:
    """The rows of a report; `beside` lines of its file were no records."""
    notes, rows = Notes(), []
    for record in records:
        kind = record.get("type")
        if not isinstance(kind, str) or kind not in TYPES:
            notes.add("is a type of record that is not known here, and was passed over", f"{kind!r}")
        elif kind == "comparison_error":
            notes.add(f"could not be compared ({record.get('exception_type')})", str(record.get("name")))
        elif kind == "comparison_skip":
            side, reason = record.get("available_side"), record.get("reason")
            notes.add(f"was not compared ({reason}; the {side} has it)", _name(record))
            if record.get("errors"):
                rows.append(_row(record, None, f"skipped with errors: {reason}"))
        elif kind == "comparison_non_tensor":
            if record.get("values_equal") is False or record.get("errors"):
                notes.add("differs, which is no tensor", _name(record))
        elif kind == "comparison_tensor":
            rows.append(_tensor(record))
    said = [*notes.sentences(), ONE_SIDED]
    if beside:
        said.insert(0, f"{beside:,} lines are no records, and were passed over")
    if not any(record.get("type") == "summary" for record in records):
        said.insert(0, "the report is cut short: it has no summary line")
    return LayerTable(TOOL, MEASURE, rows, said)


def _tensor(record: Mapping[str, Any]) -> LayerRow:
    diff = record.get("diff")
    if record.get("shape_mismatch") or not isinstance(diff, Mapping):
        shapes = [
            side.get("shape") for side in (record.get("baseline"), record.get("target")) if isinstance(side, Mapping)
        ]
        return _row(record, None, "shapes differ: " + " and ".join(map(str, shapes)))
    squared = finite(diff.get("rel_diff"))
    value = None if squared is None else math.sqrt(2 * max(squared, 0.0))
    if squared is None and "rel_diff" in diff:
        return _row(record, None, "not finite on one side")
    if record.get("errors"):
        return _row(record, value, "the comparator noted an error")
    if diff.get("passed") is not True:
        return _row(record, value, f"outside of {diff.get('predicate')}")
    copies = record.get("replicated_checks")
    if isinstance(copies, Iterable) and any(
        isinstance(check, Mapping) and check.get("passed") is not True for check in copies
    ):
        return _row(record, value, "copies on ranks that should be equal differ")
    return _row(record, value, "")


def _row(record: Mapping[str, Any], value: float | None, why: str) -> LayerRow:
    location = record.get("location")
    step = location.get("step") if isinstance(location, Mapping) else None
    name = str(record.get("name"))
    layer = layer_in(name)
    return LayerRow(
        name,
        layer=_tagged(record) if layer is None else layer,
        step=step if isinstance(step, int) else None,
        value=value,
        failed=bool(why),
        why=why,
    )


def _name(record: Mapping[str, Any]) -> str:
    layer = _tagged(record)
    return f"{record.get('name')}" if layer is None else f"{record.get('name')} of layer {layer}"


def _tagged(record: Mapping[str, Any]) -> int | None:
    """The layer of a hand-placed dump, which survives in the names of the files alone."""
    for key in ("raw_bundle_info", "available_bundle_info"):
        bundle = record.get(key)
        if not isinstance(bundle, Mapping):
            continue
        for side in (bundle.get("x"), bundle.get("y"), bundle):
            files = side.get("files") if isinstance(side, Mapping) else None
            for file in files if isinstance(files, list) else []:
                found = _TAG.search(str(file.get("filename"))) if isinstance(file, Mapping) else None
                if found:
                    return int(found[1])
    return None
