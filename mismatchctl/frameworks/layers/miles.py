"""Miles' log-prob comparison: a text without layers, which only says whether a layer-wise one is worth while."""

from __future__ import annotations

import re

from mismatchctl.frameworks.layers.model import LayerRow, LayerTable, number_in
from mismatchctl.frameworks.layers.next import EVERY_LAYER

TOOL = "Miles log-prob comparison"
_VERDICT = re.compile(r"Logprob Comparison:\s*(PASSED|FAILED)", re.IGNORECASE)
_FIGURE = re.compile(r"(Positions compared|Threshold \(mean\)|Mean abs diff|Max abs diff)\s*:\s*(\S+)", re.IGNORECASE)


def recognizes(text: str) -> bool:
    """Whether a text is such a report."""
    return _VERDICT.search(text) is not None


def table(text: str) -> LayerTable:
    """One row: the log-probs themselves."""
    verdict = _VERDICT.search(text)
    figures = {name.lower(): number_in(value.replace(",", "")) for name, value in _FIGURE.findall(text)}
    mean, limit = figures.get("mean abs diff"), figures.get("threshold (mean)")
    failed = verdict is not None and verdict[1].upper() == "FAILED"
    why = f"mean above the limit of {limit:g}" if failed and limit is not None else "failed" if failed else ""
    notes = ["this report has no layers: it only says whether a layer-wise comparison is worth while"]
    if not figures.get("positions compared"):
        notes.insert(0, "no position was compared, which passes there")
    row = LayerRow("log-probs", value=mean, failed=failed, why=why)
    return LayerTable(
        TOOL, "mean absolute difference of the log-probs, nats", [row], notes, unlayered=EVERY_LAYER if failed else ""
    )
