"""A run's log beside the dump, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from mismatchctl.analyze.against import Comparison
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, print_grid
from mismatchctl.render.numbers import number


def render_comparisons(log: str, framework: str, found: Sequence[Comparison], console: Console) -> None:
    """Print, for each run and correction, where dump and log agree and where not."""
    glyphs = Glyphs(console)
    for item in found:
        agreeing = sum(name.agrees for name in item.names)
        title = (
            f"{log} against {framework} on {item.run}, correction {item.correction}: "
            f"{agreeing} of {len(item.names)} names agree"
        )
        if item.names:
            columns = [
                Column("", ["agrees" if name.agrees else "DIFFERS" for name in item.names], right=False),
                Column("largest\ndifference", [f"{name.difference:.1e}" for name in item.names]),
                Column("at\nstep", [name.step for name in item.names], drop=3),
                Column("dump", [number(name.dump) for name in item.names], drop=1),
                Column("log", [number(name.log) for name in item.names], drop=1),
                Column("steps", [str(name.steps) for name in item.names], drop=2),
            ]
            print_grid(console, glyphs.text(title), Column("name", [name.name for name in item.names]), columns)
        else:
            console.print(glyphs.text(title), style="bold")
        if item.missing:
            console.print(glyphs.text(f"not in the log: {', '.join(item.missing)}"), "")
