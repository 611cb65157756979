"""Read layer reports of Miles, SGLang, slime and msprobe, and find the first layer that differs between the sides."""

from __future__ import annotations

import csv
import io
import math
import re
import stat
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.core.batch import Float64s
from mismatchctl.errors import DataError, describe_os_error
from mismatchctl.io.files import natural_key
from mismatchctl.io.stores import walk_files
from mismatchctl.io.yaml import TextError, parse_json

REPLAY_COMMAND = "mismatchctl score DUMPS --replay worst.jsonl --worst 8"
COMPARE_COMMAND = "python -m sglang.srt.debug_utils.comparator --baseline-path BASELINE --target-path TARGET"
_HOOK_VARIABLES = "DUMPER_ENABLE=1 DUMPER_NON_INTRUSIVE_MODE=all"
_FILTER_VARIABLE = r"""DUMPER_FILTER='layer_id in [{commas}] or search(r"layers\.{names}\.", name)'"""
SGLANG_SYNTAX = f"run both sides with `{_HOOK_VARIABLES} {_FILTER_VARIABLE}`, then `{COMPARE_COMMAND}`"
"""Instruction for SGLang. The filter selects layers by `layer_id` (manual dumps) or by module name (hooks)."""
SLIME_SYNTAX = (
    "dump these layers on each side, then `python tests/glm52_layerwise_comparator.py --megatron-dir MEGATRON "
    "--sglang-dir SGLANG --layers {layers} --output-json layerwise.json`"
)
_MSPROBE = "msprobe compare -tp TARGET/stepN -gp GOLDEN/stepN -o OUT"
MSPROBE_SYNTAX = (
    f'dump both sides with `"task": "tensor"` and `"list": [{{quoted}}]` in msprobe\'s config.json, then `{_MSPROBE}`'
)
EVERY_LAYER_COMMAND = f"run both sides with `{_HOOK_VARIABLES}`, then `{COMPARE_COMMAND}`"


class NextStep(BaseModel):
    """One step of the instructions for a layer comparison. `commands` are the parts of `text` in backticks."""

    model_config = ConfigDict(extra="forbid")

    name: str
    text: str
    commands: list[str]

    @classmethod
    def of(cls, name: str, text: str) -> NextStep:
        return cls(name=name, text=text, commands=text.split("`")[1::2])


def describe_rerun(syntax: str, layers: Sequence[int]) -> str:
    """Describe how to compare only the given layers. `syntax` is the instruction for a tool, such as SGLANG_SYNTAX."""
    texts = [str(layer) for layer in layers]
    names = texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"
    said = syntax.format(
        layers=" ".join(texts), commas=", ".join(texts), names=names,
        quoted=", ".join(f'"layers.{text}."' for text in texts),
    )  # fmt: skip
    return f"{said}. The worst sequences are enough: `{REPLAY_COMMAND}`"


def plan_first_comparison(wrong: str | None, *, in_layers: bool) -> list[NextStep]:
    if wrong == "none" or not (wrong or in_layers):
        return []
    one = {"rollout": "the engine", "trainer": "the trainer"}.get(wrong or "")
    against = f"{one}, and the checkpoint in float32," if one else "the engine and the trainer"
    steps = {
        "replay": f"`{REPLAY_COMMAND}` writes the worst sequences to a file. The dump must contain prompt_token_ids",
        "hook": f"score these sequences in one prefill with {against}, each with `{_HOOK_VARIABLES} "
        "DUMPER_DIR=DIR`. Each run writes all layers to its folder",
        "compare": f"`{COMPARE_COMMAND}` writes TARGET/comparator_report.jsonl",
        "msprobe": 'with msprobe instead of hook and compare: dump each side with "task": "tensor" in its config.json, '
        f"then `{_MSPROBE}`",
        "read": "`mismatchctl diagnose DUMPS --layers TARGET` names the first bad tensor. For msprobe, pass OUT "
        "instead of TARGET",
    }
    return [NextStep.of(name, text) for name, text in steps.items()]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="null")


class Tensor(_Model):
    """A tensor that a tool compared on the two sides.

    `layer` counts from 0 and is null for a tensor outside the layers. `value` is the difference between the sides, as
    `measure` of the report describes. `why` is the tool's reason to reject the tensor, or empty if the tool accepts it.
    """

    name: str
    layer: int | None
    step: int | None = None
    value: float | None = None
    why: str = ""


@dataclass(frozen=True)
class LayerTable:
    """The tensors of one report, in order of execution."""

    tool: str
    measure: str
    rows: Sequence[Tensor]
    notes: Sequence[str] = ()
    rank: str | None = None
    again: str = SGLANG_SYNTAX  # instruction for comparing some of the layers again
    unlayered: str = ""  # instruction if the bad tensor does not belong to a layer


class LayerReport(_Model):
    """The conclusions from a report of a layer comparator.

    `first_bad` is the first tensor that the comparator rejects. `first_apart` is the first tensor that differs far more
    than all layers before it, or a weight that differs while most weights agree. The earlier of the two is the fault.
    `last_good` is the last layer before the fault, and `before` is the largest difference (`measure`) before the fault.
    `growth` contains pairs (layer, largest difference). `next` describes the next comparison.
    """

    file: str
    tool: str
    measure: str
    tensors: int
    failed: int
    first_bad: Tensor | None
    first_apart: Tensor | None
    before: float | None
    last_good: int | None
    growth: list[tuple[int, float | None]]
    notes: list[str]
    rank: str | None = None
    next: str | None = None


_LAYER_PATTERN = re.compile(
    r"(?:^|[._/])(?:(?:layers?|h|blocks?|blk|decoder_layers?)[._\[]|layer)(\d{1,6})(?=$|[._/\]])"
)


def parse_layer(name: str) -> int | None:
    """Return the layer number in a module path, for example 3 in `model.layers.3.mlp.output`."""
    found = _LAYER_PATTERN.search(name)
    return int(found[1]) if found else None


def to_finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def parse_number(text: str) -> float | None:
    try:
        return to_finite(float(text))
    except ValueError:
        return None


Notes = dict[str, list[str]]  # note about a report -> names of the tensors or records that the note describes


def _format_notes(notes: Notes) -> list[str]:
    """Return one sentence per note, with the first name and the number of others: "x is missing, like 3 more"."""
    return [
        f"{names[0]} {what}" + (f", like {len(names) - 1:,} more" if len(names) > 1 else "")
        for what, names in notes.items()
    ]


_MILES_VERDICT = re.compile(r"Logprob Comparison:\s*(PASSED|FAILED)", re.IGNORECASE)
_MILES_FIGURE = re.compile(
    r"(Positions compared|Threshold \(mean\)|Mean abs diff|Max abs diff)\s*:\s*(\S+)", re.IGNORECASE
)


def read_miles_text(text: str) -> LayerTable | None:
    verdict = _MILES_VERDICT.search(text)
    if verdict is None:
        return None
    figures = {name.lower(): parse_number(value.replace(",", "")) for name, value in _MILES_FIGURE.findall(text)}
    limit, failed = figures.get("threshold (mean)"), verdict[1].upper() == "FAILED"
    why = f"mean above the limit of {limit:g}" if failed and limit is not None else "failed" if failed else ""
    notes = ["this report does not contain layers. It only shows whether a layer-wise comparison is useful"]
    if not figures.get("positions compared"):
        notes.insert(0, "no position was compared, but the comparator counts this as passed")
    return LayerTable(
        "Miles log-prob comparison",
        "mean absolute difference of the log-probs, nats",
        [Tensor(name="log-probs", layer=None, value=figures.get("mean abs diff"), why=why)],
        notes,
        unlayered=EVERY_LAYER_COMMAND if failed else "",
    )


_SGLANG_TYPES = (
    *("config", "rank_info", "input_ids", "log", "summary"),
    *("comparison_tensor", "comparison_non_tensor", "comparison_skip", "comparison_error"),
)
_SGLANG_LAYER_TAG = re.compile(r"(?:'|___)layer_id=(\d{1,6})(?=___|\.|')")


def read_sglang_records(records: Sequence[Any], other_lines: int = 0) -> LayerTable | None:
    if not all(isinstance(record, Mapping) for record in records):
        return None
    # later versions of SGLang may write more types of records
    if sum(record.get("type") in _SGLANG_TYPES for record in records) <= 0.5 * len(records):
        return None
    notes: Notes = {}
    rows = []
    for record in records:
        kind, name = record.get("type"), str(record.get("name"))
        layer = _parse_sglang_layer(record)
        where = name if layer is None else f"{name} of layer {layer}"
        if kind not in _SGLANG_TYPES:
            notes.setdefault("is an unknown type of record and was skipped", []).append(f"{kind!r}")
        elif kind == "comparison_error":
            notes.setdefault(f"could not be compared ({record.get('exception_type')})", []).append(name)
        elif kind == "comparison_skip":
            side, reason = record.get("available_side"), record.get("reason")
            notes.setdefault(f"was not compared ({reason}; only the {side} has it)", []).append(where)
            if record.get("errors"):
                rows.append(_make_sglang_row(record, None, f"skipped with errors: {reason}"))
        elif kind == "comparison_non_tensor" and (record.get("values_equal") is False or record.get("errors")):
            notes.setdefault("differs, but is not a tensor", []).append(where)
        elif kind == "comparison_tensor":
            rows.append(_make_sglang_row(record, *_judge_sglang_tensor(record)))
    sentences = [*_format_notes(notes), "the report does not list tensors that only the baseline has"]
    if other_lines:
        sentences.insert(0, f"{other_lines:,} lines are not records and were skipped")
    if not any(record.get("type") == "summary" for record in records):
        sentences.insert(0, "the report is truncated: the summary line is missing")
    measure = "relative L2 error (sqrt of 2 rel_diff). The comparator decides which tensors fail"
    return LayerTable("SGLang comparator", measure, rows, sentences)


def _judge_sglang_tensor(record: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return how much a tensor differs between the two sides, and why the comparison failed ("" if it passed)."""
    diff = record.get("diff")
    if record.get("shape_mismatch") or not isinstance(diff, Mapping):
        sides = [side for side in (record.get("baseline"), record.get("target")) if isinstance(side, Mapping)]
        return None, "shapes differ: " + " and ".join(str(side.get("shape")) for side in sides)
    squared = to_finite(diff.get("rel_diff"))
    if squared is None and "rel_diff" in diff:
        return None, "not finite on one side"
    value = None if squared is None else math.sqrt(2 * max(squared, 0.0))
    if record.get("errors"):
        return value, "the comparator noted an error"
    if diff.get("passed") is not True:
        return value, f"outside of {diff.get('predicate')}"
    copies = record.get("replicated_checks")
    checks = [check for check in copies if isinstance(check, Mapping)] if isinstance(copies, Iterable) else []
    same = all(check.get("passed") is True for check in checks)
    return value, "" if same else "the copies on several ranks differ, but should be equal"


def _make_sglang_row(record: Mapping[str, Any], value: float | None, why: str) -> Tensor:
    location, name = record.get("location"), str(record.get("name"))
    step = location.get("step") if isinstance(location, Mapping) else None
    named = parse_layer(name)
    layer = _parse_sglang_layer(record) if named is None else named
    return Tensor(name=name, layer=layer, step=step if isinstance(step, int) else None, value=value, why=why)


def _parse_sglang_layer(record: Mapping[str, Any]) -> int | None:
    """Find the layer in the file names of the tensors, because records lack a field for it."""
    texts = str([record.get(key) for key in ("raw_bundle_info", "available_bundle_info")])
    found = _SGLANG_LAYER_TAG.search(texts)
    return int(found[1]) if found else None


_SLIME_LINE = re.compile(r"(?:^|[\s\]:])layer=\d{1,6}\s[^\n]*max_abs=[^\n]*$", re.MULTILINE)
_SLIME_FACT = re.compile(r"(?<![\w-])(layer|tokens|max_abs|mean_abs)=([^\s,]+)")
_SLIME_KEY = re.compile(r"(?:.*\D)?(\d{1,6})")


def read_slime_document(document: Any) -> LayerTable | None:
    layers = document.get("layers") if isinstance(document, Mapping) else None
    if not isinstance(layers, Mapping):
        return None
    found = {key: facts for key, facts in layers.items() if isinstance(facts, Mapping)}
    if "max_hidden_diff" not in document and not any("max_abs" in facts for facts in found.values()):
        return None
    numbered = {int(number[1]): facts for key, facts in found.items() if (number := _SLIME_KEY.fullmatch(key))}
    return _make_slime_table(numbered.items(), to_finite(document.get("max_hidden_diff")))


def read_slime_text(text: str) -> LayerTable | None:
    lines = [dict(reversed(_SLIME_FACT.findall(line))) for line in _SLIME_LINE.findall(text)]  # keeps the first value
    if not lines:
        return None
    facts = ((int(line["layer"]), {name: parse_number(value) for name, value in line.items()}) for line in lines)
    limit = re.search(r'"max_hidden_diff": ([^\s=]+)', text)
    return _make_slime_table(facts, parse_number(limit[1].rstrip(",")) if limit else None)


def _make_slime_table(layers: Iterable[tuple[int, Mapping[str, Any]]], limit: float | None) -> LayerTable:
    rows = []
    for layer, facts in sorted(layers, key=lambda item: item[0]):
        value, why = to_finite(facts.get("max_abs")), ""
        if facts.get("tokens") == 0:
            why = "no token was compared"
        elif value is None or to_finite(facts.get("mean_abs")) is None:
            value, why = None, "not finite (slime's comparator accepts this)"
        elif value > (0.0 if limit is None else limit):
            why = "differs" if limit is None else f"above the limit of {limit:g}"
        rows.append(Tensor(name="residual stream after the layer", layer=layer, value=value, why=why))
    notes = ["slime's comparator does not compare the last position of a sequence"]
    chosen = {row.layer or 0 for row in rows}
    left = [layer for layer in range(max(chosen, default=0)) if layer not in chosen]
    if left:
        named = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        notes.insert(0, f"layers {named} were not compared. A fault in these layers appears at the next compared layer")
    rule = (
        "the report has no limit, so each difference counts as a failure"
        if limit is None
        else f"failed above {limit:g}"
    )
    measure = f"largest absolute difference of the residual stream, {rule}"
    return LayerTable("slime layer-wise comparator", measure, rows, notes, again=SLIME_SYNTAX)


_SIDE_SPELLINGS = {
    **dict.fromkeys(("target", "test", "device"), "npu"),
    **dict.fromkeys(("golden", "benchmark", "gpu"), "bench"),
}
_RANK_PATTERN = re.compile(r"rank_?(\d+)")

CsvCells = Mapping[str, Any]  # A row of an msprobe table: column name (from `_column_key`) -> cell


def _column_key(column: Any) -> str:
    """Return one name for a column that versions of msprobe name differently, such as `npuname` for `Target Name`."""
    words = re.findall(r"[a-z0-9]+", str(column).lower())
    return "".join([_SIDE_SPELLINGS.get(words[0], words[0]), *words[1:]] if words else [])


def read_msprobe_rows(cells: Sequence[Any], file: str, columns: Iterable[str] = ()) -> LayerTable | None:
    if not all(isinstance(cell, Mapping) for cell in cells):
        return None
    if not {"npuname", "benchname"} <= {_column_key(name) for name in [*columns, *(cells[0] if cells else ())]}:
        return None
    notes: Notes = {}
    rows, measure = _read_msprobe_cells(cells, notes)
    return _make_msprobe_table(f"{measure}; failed if the column Result is error or warning", rows, file, notes)


def read_msprobe_rank(document: Any, file: str) -> LayerTable | None:
    """Read the JSON file that `msprobe -da` writes for one rank. A call with `is_same` false differs between sides."""
    calls = [*document.values()] if isinstance(document, Mapping) else []
    if not calls or not all(isinstance(call, Mapping) and {"is_same", "op_items"} <= call.keys() for call in calls):
        return None
    notes: Notes = {}
    rows, measure = [], ""
    for call in calls:
        given = call["op_items"] if isinstance(call["op_items"], list) else []
        found, measure = _read_msprobe_cells([item for item in given if isinstance(item, Mapping)], notes)
        found = [row.model_copy(update={"why": ""}) for row in found]
        if call["is_same"] is False and found:
            found[-1] = found[-1].model_copy(update={"why": "the call differs (is_same is false)"})
        rows += found
    return _make_msprobe_table(f"{measure}; failed if the column is_same is false", rows, file, notes)


def read_msprobe_first(document: Any) -> list[LayerTable] | None:
    """Read the JSON file of `msprobe -da` that lists the first differing calls of each rank."""
    if not isinstance(document, Mapping) or not document:
        return None
    for rank, calls in document.items():
        if not _RANK_PATTERN.fullmatch(str(rank)) or not isinstance(calls, list):
            return None
        if not all(isinstance(call, Mapping) and "op_name" in call for call in calls):
            return None
    measure, why = (
        "no values, because the report only lists the first differing calls",
        "the first call that differs",
    )
    named = {rank: [str(call["op_name"]) for call in calls] for rank, calls in document.items()}
    return [
        _make_msprobe_table(measure, [Tensor(name=name, layer=parse_layer(name), why=why) for name in names], rank, {})
        for rank, names in named.items()
    ]


def _make_msprobe_table(measure: str, rows: Sequence[Tensor], file: str, notes: Notes) -> LayerTable:
    rank = _RANK_PATTERN.search(file)
    sentences = [*_format_notes(notes), "the report does not list modules that only the golden side has"]
    return LayerTable("msprobe compare", measure, rows, sentences, rank[1] if rank else None, MSPROBE_SYNTAX)


def _read_msprobe_cells(given: Sequence[Mapping[str, Any]], notes: Notes) -> tuple[list[Tensor], str]:
    cells = [{_column_key(name): value for name, value in cell.items()} for cell in given]
    mode = next((name for name in _MSPROBE_MEASURES if cells and name in cells[0]), "npumd5")
    rows = []
    for cell in cells:
        name = str(cell.get("npuname"))
        if cell.get("benchname") in (None, "", "N/A"):
            notes.setdefault("is missing on the golden side, but column Result counts it as passed", []).append(name)
        else:
            rows.append(
                Tensor(name=name, layer=parse_layer(name), value=_msprobe_value(cell, mode), why=_parse_flag(cell))
            )
    return rows, _MSPROBE_MEASURES[mode]


def _parse_flag(cell: CsvCells) -> str:
    result = str(cell.get("result", "")).strip().lower()
    missed = str(cell.get("accuracyreachedornot", "")).strip().lower() == "no"  # older versions have no Result
    if result not in ("error", "warning") and not missed:
        return ""
    message = str(cell.get("errmessage") or "").strip("[]\"' ")
    return message.partition('", "')[0] or ("accuracy not reached" if missed else result)


_MSPROBE_MEASURES = {
    "normrelativeerr": "relative error of the norm, or of the extrema if the norm agrees",
    "maxabserr": "largest absolute difference divided by the largest magnitude",
    "npumd5": "checksums: 0 equal, 1 different",
}
"""The column that each of msprobe's three modes writes, and the meaning of its values."""


def _msprobe_value(cell: CsvCells, mode: str) -> float | None:
    if mode == "npumd5":
        return float(cell.get("npumd5") != cell.get("benchmd5")) if "npumd5" in cell else None
    value = _parse_cell(cell.get(mode))
    names = ("maxrelativeerr", "minrelativeerr") if mode == "normrelativeerr" else ("benchmax", "benchmin")
    others = [other for name in names if (other := _parse_cell(cell.get(name))) is not None]
    if mode == "normrelativeerr":
        return max(others, default=0.0) if value == 0.0 else value
    size = max(map(abs, others), default=0.0)
    return value if value is None or size == 0 else value / size


def _parse_cell(cell: Any) -> float | None:
    """Return the number in a cell, or `None` for `N/A`. Numbers in text lose their sign (0.05 for `-5%`)."""
    if not isinstance(cell, str):
        return to_finite(cell)
    text = cell.strip()
    number = parse_number(text.removesuffix("%"))
    return None if number is None else abs(number) / (100 if text.endswith("%") else 1)


JUMP_FACTOR = 30.0
"""A layer diverges if its value is this many times larger than in earlier layers. bfloat16 noise grew at most 4x."""
_GRADIENT_PATTERN = re.compile(
    r"(?:^|[._/]|__)(?:backward|grads?|gradients?|d?grad_(?:in|out)put)(?=$|[._/\d])", re.IGNORECASE
)
_HEAD_PATTERN = re.compile(r"(?:^|[./])(?:lm_head|logits?|output_layer|ln_f|(?:final_?)?(?:layer_?)?norm)(?=$|[._/:])")


def sort_rows(rows: Sequence[Tensor]) -> tuple[Sequence[Tensor], str]:
    """Return the rows in the order of execution, with a note if the order is doubtful."""
    places = [(row.step, row.layer) for row in rows if row.layer is not None]
    changes = [b - a for (first, a), (second, b) in pairwise(places) if first == second and a != b]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(changes))
    # A new pass or rank reverses the direction of the layers only sometimes. A few changes of layer prove nothing.
    if len(changes) >= 8 and turns > 0.5 * (len(changes) - 1):
        note = "the tensors of the report are not in order of execution, so they were sorted by layer"
        return _sort_by_layer(rows, rows), note
    if len(changes) + 1 < 3 or max(changes) > 0:
        return rows, ""
    if any(_GRADIENT_PATTERN.search(row.name) for row in rows):
        return rows, "the layers of the report descend, because it shows a backward pass (its names contain gradients)"
    note = "the layers of the report descend, but no name contains a gradient, so the report was read from its end"
    return _sort_by_layer(rows, rows[::-1]), note


def _sort_by_layer(given: Sequence[Tensor], rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Sort by step, then by layer. Tensors outside the layers come first, but `lm_head` and similar ones come last."""
    steps = {step: place for place, step in enumerate(dict.fromkeys(row.step for row in given))}
    last = 1 + max((row.layer for row in rows if row.layer is not None), default=0)

    def place(row: Tensor) -> int:
        return row.layer if row.layer is not None else last if _HEAD_PATTERN.search(row.name) else -1

    return sorted(rows, key=lambda row: (steps[row.step], place(row)))


_WEIGHT_PATTERN, _MIN_WEIGHTS = re.compile(r"\.parameters\.\w+$"), 3


def analyze_table(table: LayerTable, file: str) -> LayerReport:
    rows, order = sort_rows(table.rows)
    bad = next((index for index, row in enumerate(rows) if row.why), None)
    weight, jump = _find_other_weight(rows), _find_divergence(rows)
    apart = min((index for index in (weight, jump) if index is not None), default=None)
    why = "differs, while most weights agree" if apart == weight else "parts from all layers before it"
    first = min((index for index in (bad, apart) if index is not None), default=None)
    earlier = [row for row in rows[:first] if row.layer is not None]
    good = [row.layer for row in earlier if first is None or row.layer != rows[first].layer]
    return LayerReport(
        file=file,
        tool=table.tool,
        measure=table.measure,
        tensors=len(rows),
        failed=sum(bool(row.why) for row in rows),
        first_bad=None if bad is None else rows[bad],
        first_apart=None if apart is None else rows[apart].model_copy(update={"why": why}),
        before=max((row.value for row in earlier if row.value is not None), default=None),
        last_good=good[-1] if first is not None and good else None,
        growth=_layer_growth(rows),
        notes=[*([order] if order else ()), *table.notes],
        rank=table.rank,
        next=None if first is None else _suggest_next(table, rows[first].layer, good[-1] if good else None),
    )


def _suggest_next(table: LayerTable, layer: int | None, last_good: int | None) -> str | None:
    if layer is None:
        return describe_rerun(table.unlayered, []) if table.unlayered else None
    first = layer if last_good is None else min(last_good, layer)
    return describe_rerun(table.again, range(first, layer + 1)[-8:])  # eight layers at most


def _find_other_weight(rows: Sequence[Tensor]) -> int | None:
    """Return the index of the first weight tensor that differs far more between the sides than the median weight."""
    found = {at: row.value for at, row in enumerate(rows) if row.value is not None and _WEIGHT_PATTERN.search(row.name)}
    if len(found) < _MIN_WEIGHTS:
        return None
    limit = JUMP_FACTOR * statistics.median(found.values())
    return next((at for at, value in found.items() if value > limit), None)


def _find_divergence(rows: Sequence[Tensor]) -> int | None:
    """Return the index of the first row whose value is above JUMP_FACTOR times all earlier layers of its step."""
    before: float | None = None  # largest value of the earlier layers of this step
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


def _layer_growth(rows: Sequence[Tensor]) -> list[tuple[int, float | None]]:
    """Return each layer with the largest value of its tensors, or with `None` if a tensor lacks a value."""
    found: dict[int, float | None] = {}
    for row in rows:
        if row.layer is not None:
            known = found.get(row.layer, 0.0)
            found[row.layer] = None if known is None or row.value is None else max(known, row.value)
    return sorted(found.items())


MAX_REPORT_BYTES = 256 * 1024 * 1024
KNOWN_FORMATS = (
    "supported reports are comparator_report.jsonl of SGLang and Miles, slime's JSON and text, and msprobe's "
    "CSV and JSON"
)
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".log", ".out")
SPREADSHEET_SUFFIXES = (".xlsx", ".xls")
SPREADSHEET_REMEDY = "save the table as CSV, or run msprobe compare without --xlsx"
_PART_SUFFIX = re.compile(r"_part_?\d+$")


def read_layers(path: str) -> list[LayerReport]:
    """Read the report in a file, or the reports of several ranks or steps in a folder.

    Raises:
        DataError: The path cannot be read, or is not a report of a supported layer comparator.
    """
    place = Path(path)
    if not place.is_dir():
        try:
            tables = _read_tables(place)
        except UnicodeDecodeError:
            raise DataError("this is not a text file in UTF-8", file=path, remedy=KNOWN_FORMATS) from None
        if not tables:
            problem = "this file is not a report of a supported layer comparator"
            raise DataError(problem, file=path, remedy=KNOWN_FORMATS)
        if not any(table.rows for table in tables):
            remedy = "run the comparison again and check its log"
            raise DataError("this report does not compare any tensor", file=path, remedy=remedy)
        return [analyze_table(table, path) for table in tables]
    files = sorted(walk_files(place), key=natural_key)
    found: dict[tuple[Path, str | None, int], tuple[Path, LayerTable]] = {}
    for file in files:
        try:
            tables = _read_tables(file) if file.suffix.lower() in SUFFIXES else ()
        except UnicodeDecodeError:
            continue
        for table in tables:
            part = _PART_SUFFIX.search(file.stem)  # msprobe splits large CSV files
            whole = file.with_name(_PART_SUFFIX.sub("", file.stem) + file.suffix)
            key = whole, table.rank, 0 if part else len(found) + 1
            first, known = found.get(key, (file, replace(table, rows=(), notes=())))
            notes = [*dict.fromkeys((*known.notes, *table.notes))]
            found[key] = first, replace(known, rows=[*known.rows, *table.rows], notes=notes)
    if not found:
        sheets = any(file.suffix.lower() in SPREADSHEET_SUFFIXES for file in files)
        remedy = SPREADSHEET_REMEDY if sheets else KNOWN_FORMATS
        raise DataError("this folder does not contain the report of a layer comparator", file=path, remedy=remedy)
    return [analyze_table(table, str(file)) for file, table in found.values()]


def _read_tables(file: Path) -> Sequence[LayerTable]:
    if file.suffix.lower() in SPREADSHEET_SUFFIXES:
        raise DataError("spreadsheets are not supported", file=str(file), remedy=SPREADSHEET_REMEDY)
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
    return [table for table in tables if table is not None][:1]


def _read_csv(text: str, file: Path) -> LayerTable | None:
    head = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    try:
        columns = reader.fieldnames or ()
        return read_msprobe_rows(list(reader), file.name, columns)
    except csv.Error as error:
        raise DataError(f"this file is not a valid CSV file: {error}", file=str(file)) from None


def _read_lines(text: str) -> tuple[list[object], int]:
    """Return the JSON records of a file, and the number of other lines. Ignore an incomplete last line."""
    records: list[object] = []
    lines = [line for line in text.splitlines() if line.strip()]
    others = 0
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line, as_python_writes=True))
        except TextError:
            others += number < len(lines)
    return (records, others) if others <= 0.5 * len(lines) else ([], others)  # a log file has other lines too


def _read_text(file: Path) -> str:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DataError("this is not a regular file", file=str(file))
        if found.st_size > MAX_REPORT_BYTES:
            raise DataError(f"this report is larger than the limit of {MAX_REPORT_BYTES >> 20} MiB", file=str(file))
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(describe_os_error(error), file=str(file), remedy="check the path") from None


USUAL_LOGIT_SPREAD = (0.3, 30.0)
"""Range of the standard deviation of a token's logits in language models, in nats."""


class LogitNoise(BaseModel):
    """The root mean square of the log ratios, and how much logit noise would cause it (low, high), in nats."""

    model_config = ConfigDict(extra="forbid")

    log_ratio_rms: float
    logit_noise: tuple[float, float]


def estimate_logit_noise(rollout: Float64s, train: Float64s) -> LogitNoise | None:
    with np.errstate(over="ignore"):
        squares = float(np.square(train - rollout).sum())
    doubt = float(np.square(-np.expm1(np.minimum(rollout, 0.0))).sum())
    if not rollout.size or doubt <= 0 or not np.isfinite(squares):
        return None
    high = float(np.sqrt(squares / doubt))
    return LogitNoise(log_ratio_rms=float(np.sqrt(squares / rollout.size)), logit_noise=(high / np.sqrt(2), high))


def compare_with_noise(report: LayerReport, noise: LogitNoise) -> str:
    low, high = noise.logit_noise
    asked = (
        f"a noise of {low:.2g} to {high:.2g} in each logit would cause log ratios as large as in the dump (root mean "
        f"square {noise.log_ratio_rms:.2g})"
    )
    last = next((value for _, value in reversed(report.growth) if value is not None), None)
    if "elative" not in report.measure or last is None:
        return f"{asked}. The values of this report are not relative, so they cannot be compared with the dump"
    if last == 0:
        after = "look for a fault after the layers (logits, sampling parameters, masks, weights)"
        return asked if high == 0 else f"{asked}. The layers do not differ and cannot cause this noise, so {after}"
    needed = high / last
    said = (
        f"{asked}. The last layers differ by {last:.2g}, which causes this noise if the logits of a token "
        f"have a standard deviation of {needed:.2g}"
    )
    if needed > USUAL_LOGIT_SPREAD[1]:
        return (
            f"{said}. In language models, this deviation is smaller, so the layers explain only part of the noise. "
            "Look for a second cause"
        )
    if needed < USUAL_LOGIT_SPREAD[0]:
        return (
            f"{said}. In language models, this deviation is larger, so the compared runs differ more than the two "
            "sides of the dump"
        )
    return f"{said}. This deviation is usual in language models, so the layers explain the noise of the dump"
