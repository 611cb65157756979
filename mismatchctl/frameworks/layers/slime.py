"""slime's layer-wise comparator: absolute differences of the residual stream after each chosen layer, JSON or text.

It keeps the largest difference with Python's max, which passes over NaN: a layer of NaN reports max_abs 0 and exit code
0, and only mean_abs is NaN. Here such a layer has failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mismatchctl.frameworks.layers.model import LayerRow, LayerTable, finite, number_in
from mismatchctl.frameworks.layers.next import SLIME

TOOL = "slime layer-wise comparator"
NAME = "residual stream after the layer"
_NUMBER = r"([^\s=]+)"
_LINE = re.compile(r"(?:^|[\s\]:])layer=\d{1,6}\s[^\n]*max_abs=[^\n]*$", re.MULTILINE)
"""Whatever a logger writes before it, and in whatever order its facts are after the layer."""
_FACT = re.compile(r"(?<![\w-])(layer|tokens|max_abs|mean_abs)=([^\s,]+)")


_KEY = re.compile(r"(?:.*\D)?(\d{1,6})")


def recognizes(document: Any) -> bool:
    """Whether a JSON document is such a report."""
    layers = document.get("layers") if isinstance(document, Mapping) else None
    if not isinstance(layers, Mapping):
        return False
    return "max_hidden_diff" in document or any(
        isinstance(found, Mapping) and "max_abs" in found for found in layers.values()
    )


def table(document: Mapping[str, Any]) -> LayerTable:
    """The rows of a report in JSON."""
    layers = {
        int(number[1]): found
        for key, found in document["layers"].items()
        if (number := _KEY.fullmatch(key)) and isinstance(found, Mapping)
    }
    limit = finite(document.get("max_hidden_diff"))
    facts = (
        (layer, found.get("tokens"), found.get("max_abs"), found.get("mean_abs")) for layer, found in layers.items()
    )
    return _table(facts, limit)


def recognizes_text(text: str) -> bool:
    """Whether a text is what the comparator prints."""
    return _LINE.search(text) is not None


def text_table(text: str) -> LayerTable:
    """The rows of what the comparator prints, which does not say its limit: any difference counts."""
    lines = [dict(reversed(_FACT.findall(line))) for line in _LINE.findall(text)]  # of a fact said twice, the first
    facts = (
        (
            int(line["layer"]),
            number_in(line.get("tokens", "")),
            *(number_in(line.get(f"{of}_abs", "")) for of in ("max", "mean")),
        )
        for line in lines
    )
    limit = re.search(rf'"max_hidden_diff": {_NUMBER}', text)
    return _table(facts, number_in(limit[1].rstrip(",")) if limit else None)


def _table(facts: Iterable[tuple[Any, ...]], limit: float | None) -> LayerTable:
    rows = []
    for layer, tokens, largest, mean in sorted(facts, key=lambda fact: fact[0]):
        value = finite(largest)
        why = ""
        if tokens == 0:
            why = "no token was compared"
        elif value is None or finite(mean) is None:
            value, why = None, "not finite (slime's own comparator lets it pass)"
        elif value > (0.0 if limit is None else limit):
            why = "differs" if limit is None else f"above the limit of {limit:g}"
        rows.append(LayerRow(NAME, layer=layer, value=value, failed=bool(why), why=why))
    said = "no limit in the report: any difference counts" if limit is None else f"failed above {limit:g}"
    chosen = [row.layer for row in rows if row.layer is not None]
    left = sorted(set(range(chosen[-1] + 1)) - set(chosen)) if chosen else []
    notes = ["the last position of a sequence is never compared"]
    if left:
        named = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
        notes.insert(0, f"only chosen layers were compared, not {named}: a fault there shows at the next one")
    measure = f"largest absolute difference of the residual stream, {said}"
    return LayerTable(TOOL, measure, rows, notes, again=SLIME)
