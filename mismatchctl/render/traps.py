"""What `lint` prints: each trap with its level, its place, what comes of it, and what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.frameworks.lint import LEVELS, Finding
from mismatchctl.render.glyphs import Glyphs

_STYLES = {"error": "bold red", "warning": "yellow", "advice": "green", "info": "cyan"}


def render_traps(findings: Sequence[Finding], title: str, console: Console) -> None:
    """Explain findings, in their order, and count them."""
    glyphs = Glyphs(console)
    console.print(Text(glyphs.text(f"{title}: {_counts(findings)}"), style="bold"))
    for finding in findings:
        heading = (finding.level, _STYLES[finding.level]), "  ", (glyphs.text(finding.place or "the whole"), "bold")
        console.print("", Text.assemble(*heading), sep="\n")
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        for name in ("consequence", "fix", "source"):
            rows.add_row(f"  {name}", Text(glyphs.text(getattr(finding, name))))
        if finding.change:
            rows.add_row("  on the dumps", Text(glyphs.text(finding.change)))
        console.print(rows)


def _counts(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    plural = {"error": "errors", "warning": "warnings", "advice": "pieces of advice", "info": "notes"}
    singular = {"error": "error", "warning": "warning", "advice": "piece of advice", "info": "note"}
    said = [f"{count} {(singular if count == 1 else plural)[level]}" for level, count in counts.items() if count]
    return ", ".join(said) or "nothing to say"
