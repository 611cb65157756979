"""Findings in the terminal: all of each for `diagnose`, a line of each in the summary of `analyze`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.numbers import DASH, number
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.result import Example, Fact, Finding

STYLES = {"high": "bold red", "medium": "yellow", "low": "dim"}
CALM = {"identical": "green", "numerical_noise": "green"}
"""Causes that are no reason to worry."""
_MARGIN = 14
"""What stands left of a finding's text."""
_WORTH_SHORTENING = 8


def render_diagnosis(runs: Mapping[str, Sequence[Finding]], console: Console, *, verbose: bool = False) -> None:
    """Explain the findings of each run, strongest first; several runs have an overview before.

    A finding takes eight lines, one of low confidence a single one; `verbose` shows all of all, with the evidence.
    """
    glyphs = Glyphs(console)
    folder = _folder([example.file for findings in runs.values() for found in findings for example in found.examples])
    if len(runs) > 1:
        _overview(runs, console)
    if folder:
        console.print(Text(f"Files are in {glyphs.text(folder)}", style="dim"))
    for name, findings in runs.items():
        count = f"{len(findings)} finding{'s' * (len(findings) != 1)}, strongest first" if findings else "nothing found"
        console.print(Text.assemble((glyphs.text(name), "bold"), f": {count}{_explained(findings)}"))
        shown = [finding for finding in findings if verbose or finding.confidence != "low" or len(findings) == 1]
        for place, finding in enumerate(shown, start=1):
            console.print()
            _print_finding(place, finding, console, folder, verbose)
        rest = [finding for finding in findings if finding not in shown]
        if rest:
            console.print()
        for finding in rest:
            line = f"low  {finding.cause}{_part(finding)}: {finding.summary}"
            console.print(Text(_cut(glyphs.text(line), console.width, 1, glyphs)[0], style="dim"))
        console.print()


def _overview(runs: Mapping[str, Sequence[Finding]], console: Console) -> None:
    """A line for each run: the first finding, how sure, and how much of the K3 is explained."""
    glyphs = Glyphs(console)
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("run", "first finding", "confidence", "of the K3", "unexplained"):
        rows.add_column(heading, overflow="fold", justify="right" if "K3" in heading or heading[:2] == "un" else "left")
    for name, findings in runs.items():
        if not findings:
            rows.add_row(glyphs.text(name), "none", DASH, DASH, DASH)
            continue
        first = findings[0]
        confidence = Text(first.confidence, style=_style(first))
        rows.add_row(glyphs.text(name), first.title, confidence, _of_k3(first.share_k3), _of_k3(_unexplained(findings)))
    console.print(rows, "")


def _unexplained(findings: Sequence[Finding]) -> float:
    return sum(finding.share_k3 or 0.0 for finding in findings if finding.cause == "unexplained")


def _explained(findings: Sequence[Finding]) -> str:
    return f"; {_of_k3(1 - _unexplained(findings))} of the K3 explained" if findings else ""


def _of_k3(share: float | None) -> str:
    """A share of the K3 as text."""
    if share is None:
        return DASH
    return f"{100 * share:.3g} %" if share < 0.9995 else "100 %"


def _part(finding: Finding) -> str:
    return "" if finding.share_k3 is None else f", {_of_k3(finding.share_k3)} of the K3"


def _folder(files: Sequence[str]) -> str:
    """The folder that all of some files are in, if leaving it out makes them shorter."""
    folders = {file.rpartition("/")[0] for file in files}
    if not folders:
        return ""
    common = folders.pop()
    for folder in folders:
        while common and not f"{folder}/".startswith(f"{common}/"):
            common = common.rpartition("/")[0]
    return f"{common}/" if len(common) > _WORTH_SHORTENING else ""


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


def _print_finding(place: int, finding: Finding, console: Console, folder: str, verbose: bool) -> None:
    glyphs = Glyphs(console)
    heading = f"{place}. {finding.title}"
    console.print(
        Text.assemble(
            (heading, "bold"),
            f"  {finding.cause}  ",
            (f"{finding.confidence} confidence", _style(finding)),
            _part(finding),
        )
    )
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    facts = _facts(finding, folder) if verbose else _gist(finding, folder)
    for heading, text, lines in facts:
        whole = glyphs.text(text)
        shown = whole if verbose else "\n".join(_cut(whole, console.width - _MARGIN, lines, glyphs))
        rows.add_row(f"   {heading}", Text(shown))
    console.print(rows)


def _cut(text: str, width: int, lines: int, glyphs: Glyphs) -> list[str]:
    """A text as so many lines, the last with an ellipsis where that is not all."""
    return wrap(text, max(width, 20), max_lines=lines, placeholder=glyphs.text(" …")) or [""]


def _gist(finding: Finding, folder: str) -> Iterable[tuple[str, str, int]]:
    """What fits on seven lines: heading, text, lines."""
    yield "found", finding.summary, 3
    if finding.examples:
        yield "see", "; ".join(example_text(example, folder) for example in finding.examples[:2]), 1
    yield "do", finding.advice, 2
    if finding.rivals:
        yield "or is it", f"{', '.join(rival.cause for rival in finding.rivals)}? {finding.rivals[0].tell}", 1


def _facts(finding: Finding, folder: str) -> Iterable[tuple[str, str, int]]:
    """All of a finding: heading, text."""
    yield "found", finding.summary, 0
    for heading, supports in (("for", True), ("against", False)):
        for fact in finding.evidence:
            if fact.supports == supports:
                yield heading, f"{fact.meaning}: {fact.name} {fact_text(fact)}", 0
                heading = ""
    if finding.where:
        yield "where", "; ".join(f"{key}: {value}" for key, value in finding.where.items()), 0
    heading = "see"
    for example in finding.examples:
        yield heading, example_text(example, folder), 0
        heading = ""
    yield "do", finding.advice, 0
    if finding.pointless:
        yield "pointless", f"until then, {finding.pointless}", 0
    for rival in finding.rivals:
        yield "or is it", f"{rival.cause}? To tell: {rival.tell}", 0


def fact_text(fact: Fact) -> str:
    """The value of a fact, with its interval."""
    shown = fact.value if isinstance(fact.value, str) else _plain(fact.value)
    if fact.interval is None:
        return shown
    return f"{shown} ({_plain(fact.interval[0])} to {_plain(fact.interval[1])})"


def _plain(value: float | None) -> str:
    """Whole numbers as they are: steps, shifts and counts are among them."""
    return number(value, "rows") if value is not None and float(value).is_integer() else number(value)


def example_text(example: Example, folder: str = "") -> str:
    """Where an example is; `folder` has been named already."""
    parts = [f"row {example.row}"]
    parts += [f"position {example.position}"] if example.position is not None else []
    parts += [f"sequence {example.sequence_id}"] if example.sequence_id is not None else []
    parts += [f"step {example.step}"] if example.step is not None else []
    return f"{example.file.removeprefix(folder)}: {', '.join(parts)}"


def _style(finding: Finding) -> str:
    return CALM.get(finding.cause, STYLES[finding.confidence])
