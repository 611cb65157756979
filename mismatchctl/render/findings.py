"""Findings in the terminal: all of each for `diagnose`, a line of each in the summary of `analyze`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.numbers import DASH, number
from mismatchctl.result import Example, Fact, Finding

STYLES = {"high": "bold red", "medium": "yellow", "low": "dim"}
CALM = {"identical": "green", "numerical_noise": "green"}
"""Causes that are no reason to worry."""


def render_diagnosis(runs: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """Explain the findings of each run, strongest first."""
    for name, findings in runs.items():
        glyphs = Glyphs(console)
        count = f"{len(findings)} finding{'s' * (len(findings) != 1)}, strongest first" if findings else "nothing found"
        console.print(Text.assemble((glyphs.text(name), "bold"), f": {count}"))
        for place, finding in enumerate(findings, start=1):
            console.print()
            _print_finding(place, finding, console)
        console.print()


def render_findings(findings: Sequence[Finding], title: str, console: Console) -> None:
    """One line or two per finding: how sure, what, and the figures."""
    if not findings:
        return
    glyphs = Glyphs(console)
    console.print(Text(glyphs.text(title), style="bold"))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for finding in findings:
        text = Text.assemble((finding.title, "bold"), f": {glyphs.text(finding.summary)}")
        rows.add_row(Text(finding.confidence, style=_style(finding)), text)
    console.print(rows, "")


def render_first_findings(runs: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """The strongest finding of each of many runs."""
    if not any(runs.values()):
        return
    glyphs = Glyphs(console)
    console.print(Text("Strongest finding of each run", style="bold"))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(overflow="fold", max_width=max(console.width // 3, 8))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, findings in runs.items():
        first = findings[0] if findings else None
        said = (Text(first.confidence, style=_style(first)), first.title) if first else (Text(DASH), "none")
        rows.add_row(glyphs.text(name), *said)
    console.print(rows, "")


def _print_finding(place: int, finding: Finding, console: Console) -> None:
    glyphs = Glyphs(console)
    heading = f"{place}. {finding.title}"
    console.print(
        Text.assemble((heading, "bold"), f"  {finding.cause}  ", (f"{finding.confidence} confidence", _style(finding)))
    )
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for heading, text in _facts(finding):
        rows.add_row(f"   {heading}", Text(glyphs.text(text)))
    console.print(rows)


def _facts(finding: Finding) -> Iterable[tuple[str, str]]:
    yield "found", finding.summary
    for heading, supports in (("for", True), ("against", False)):
        for fact in finding.evidence:
            if fact.supports == supports:
                yield heading, f"{fact.name} {fact_text(fact)}: {fact.meaning}"
                heading = ""
    if finding.where:
        yield "where", "; ".join(f"{key} {value}" for key, value in finding.where.items())
    heading = "see"
    for example in finding.examples:
        yield heading, example_text(example)
        heading = ""
    yield "do", finding.advice
    if finding.pointless:
        yield "pointless", f"until then, {finding.pointless}"
    for rival in finding.rivals:
        yield "or is it", f"{rival.cause}? To tell: {rival.tell}"


def fact_text(fact: Fact) -> str:
    """The value of a fact, with its interval."""
    shown = fact.value if isinstance(fact.value, str) else _plain(fact.value)
    if fact.interval is None:
        return shown
    return f"{shown} ({_plain(fact.interval[0])} to {_plain(fact.interval[1])})"


def _plain(value: float | None) -> str:
    """Whole numbers as they are: steps, shifts and counts are among them."""
    return number(value, "rows") if value is not None and float(value).is_integer() else number(value)


def example_text(example: Example) -> str:
    """Where an example is."""
    parts = [f"row {example.row}"]
    parts += [f"position {example.position}"] if example.position is not None else []
    parts += [f"sequence {example.sequence_id}"] if example.sequence_id is not None else []
    parts += [f"step {example.step}"] if example.step is not None else []
    return f"{example.file}: {', '.join(parts)}"


def _style(finding: Finding) -> str:
    return CALM.get(finding.cause, STYLES[finding.confidence])
