"""A run's log beside the dump, in the terminal."""

from __future__ import annotations

from rich.console import Console

from mismatchctl.numbers import number
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, print_grid
from mismatchctl.render.text import clean
from mismatchctl.result import AgainstLog, AgainstMetrics, Result


def render_against(result: Result, console: Console) -> None:
    """Print, for each run and correction, where the run's log and the dump agree and where not."""
    told_by = result.provenance
    for name, run in result.runs.items():
        for correction, found in run.against.items():
            _render(f"{told_by.log} against {told_by.framework} on {name}, correction {correction}", found, console)
        told = run.against_metrics or AgainstMetrics()
        if told.names:
            called = {f"{clean(logged)} ({told.metrics[logged]})": found for logged, found in told.names.items()}
            _render(f"{told_by.log} against the metrics of {name}", AgainstLog(names=called), console)
        compared = {name for found in run.against.values() for name in found.names} | {*told.names}
        others = [
            name for name in run.log
            if name not in compared and name.removeprefix("train/").removeprefix("actor/") not in compared
        ]  # fmt: skip
        if others:
            console.print(Glyphs(console).text(f"kept from the log, not compared: {', '.join(map(clean, others))}"), "")
        for logged, lag in run.lags.items():
            if lag.steps is not None:
                console.print(Glyphs(console).text(f"{clean(logged)}: K3 {lag.text}"))


def _render(title: str, found: AgainstLog, console: Console) -> None:
    glyphs, names = Glyphs(console), found.names.values()
    title = f"{title}: {sum(name.agrees for name in names)} of {len(names)} names agree"
    if names:
        columns = [
            Column("", ["agrees" if name.agrees else "DIFFERS" for name in names], right=False),
            Column("largest\ndifference", [f"{name.difference:.1e}" for name in names]),
            Column("allowed", [f"{name.allowed:.1e}" for name in names], drop=4),
            Column("at\nstep", [name.step for name in names], drop=3),
            Column("dump", [number(name.dump) for name in names], drop=1),
            Column("log", [number(name.log) for name in names], drop=1),
            Column("steps", [str(name.steps) for name in names], drop=2),
        ]
        print_grid(console, glyphs.text(title), Column("name", list(found.names)), columns)
    else:
        console.print(glyphs.text(title), style="bold")
    if found.missing:
        console.print(glyphs.text(f"not in the log: {', '.join(found.missing)}"), "")
