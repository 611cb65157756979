"""Miles' log-prob comparison: a text without layers, which only says whether a layer-wise one is worth while."""

from __future__ import annotations

import re

from mismatchctl.frameworks.layers.model import Row, Table, finite

TOOL = "Miles log-prob comparison"
_VERDICT = re.compile(r"Logprob Comparison: (PASSED|FAILED)")
_FIGURE = re.compile(
    r"^\s*(Positions compared|Threshold \(mean\)|Mean abs diff|Max abs diff)\s*:\s*(\S+)", re.MULTILINE
)


def recognizes(text: str) -> bool:
    """Whether a text is such a report."""
    return _VERDICT.search(text) is not None


def table(text: str) -> Table:
    """One row: the log-probs themselves."""
    verdict = _VERDICT.search(text)
    figures = {name: _number(value) for name, value in _FIGURE.findall(text)}
    mean, limit = figures.get("Mean abs diff"), figures.get("Threshold (mean)")
    failed = verdict is not None and verdict[1] == "FAILED"
    why = f"mean above the limit of {limit:g}" if failed and limit is not None else "failed" if failed else ""
    notes = ["this report has no layers: it only says whether a layer-wise comparison is worth while"]
    if not figures.get("Positions compared"):
        notes.insert(0, "no position was compared, which passes there")
    row = Row("log-probs", value=mean, failed=failed, why=why)
    return Table(TOOL, "mean absolute difference of the log-probs, nats", [row], notes)


def _number(text: str) -> float | None:
    try:
        return finite(float(text))
    except ValueError:
        return None
