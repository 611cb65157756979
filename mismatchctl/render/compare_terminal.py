"""A Comparison in the terminal: the sentence first, then where, then the numbers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.compare.model import Change, Comparison, Contrast, Decomposition, Matrix, Part
from mismatchctl.numbers import DASH, estimate, number
from mismatchctl.render.compare_words import (
    MATRIX,
    correction_rows,
    details,
    headline,
    k3_change,
    main_metrics,
    method,
    part_name,
    signed,
    signed_percent,
    verdict,
)
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, broken, print_grid, print_matrix
from mismatchctl.render.tables import known_metric

DETAILED = 3
"""Up to so many comparisons, each has its tables."""
MOST_ROWS = 24
CORRECTION_COLUMNS = (
    ("rejected tokens", "rejected_tokens", 0),
    ("ESS of tokens", "ess_token", 0),
    ("ESS of sequences", "ess_sequence", 1),
)
"""(heading, key, how early it goes where there is little room)."""
PARTS = 3
"""Contributions that are shown of each quantity."""


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print a Comparison."""
    glyphs = Glyphs(console)
    if comparison.matrix is not None:
        _print_matrix(comparison.matrix, console)
    if len(comparison.contrasts) > 1:
        _print_runs(comparison, console)
    for contrast in comparison.contrasts:
        _print_sentences(comparison, contrast, console)
        if len(comparison.contrasts) <= DETAILED:
            _print_changes(comparison, contrast, console)
            _print_corrections(contrast, console)
            _print_parts(contrast, console)
    console.print(Text(glyphs.text(method(comparison)), style="dim"))
    for warning in comparison.warnings:
        console.print(Text(glyphs.text(f"! {warning}"), style="yellow"))


def _print_sentences(comparison: Comparison, contrast: Contrast, console: Console) -> None:
    """Two names, then a line per question."""
    glyphs = Glyphs(console)
    title = f"{glyphs.text(contrast.other)} against {glyphs.text(comparison.reference.name)}"
    console.print(Text(title, style="bold"))
    console.print(Text(glyphs.text(headline(contrast, comparison.confidence) + "."), style="bold"))
    rows = Table.grid(padding=(0, 1, 0, 0))
    rows.add_column(style="dim", width=1)
    rows.add_column(overflow="fold")
    for line in details(contrast):
        rows.add_row("-", Text(glyphs.text(line)))
    console.print(rows, "")


def _print_runs(comparison: Comparison, console: Console) -> None:
    """One row per run, the reference first."""
    sides = comparison.sides
    changes = [None, *(k3_change(contrast) for contrast in comparison.contrasts)]
    k3 = [side.metrics["k3"] for side in sides]
    tokens = [number(side.metrics["tokens"].value, "tokens") for side in sides]
    columns = [
        Column("tokens", tokens, drop=3),
        Column("K3", [estimate(v.value, v.se) for v in k3], brief=[number(v.value) for v in k3]),
        Column("change", [DASH if c is None else signed_percent(c.relative) for c in changes]),
        Column("interval", [DASH if c is None else _relative_interval(c) for c in changes], drop=1),
        Column("", ["reference" if c is None else verdict(c) for c in changes], right=False),
    ]
    print_grid(console, f"{len(sides)} runs, each against the first", Column("run", [s.name for s in sides]), columns)


def _relative_interval(change: Change) -> str:
    ends = change.relative_interval
    return DASH if ends is None else " to ".join(signed_percent(end) for end in ends)


def _print_changes(comparison: Comparison, contrast: Contrast, console: Console) -> None:
    """The main metrics, and what else changed significantly."""
    keys = main_metrics(contrast)[:MOST_ROWS]
    changes = [contrast.changes[key] for key in keys]
    units = [known_metric(key).unit for key in keys]
    both = list(zip(changes, units, strict=True))
    columns = [
        Column("reference", [number(c.reference.value, unit) for c, unit in both]),
        Column("other", [number(c.other.value, unit) for c, unit in both]),
        Column("difference", [signed(c.difference) for c in changes], drop=2),
        Column("interval", [_interval(c) for c in changes], drop=3),
        Column("relative", [signed_percent(c.relative) for c in changes], drop=1),
        Column("", [verdict(c) for c in changes], right=False),
    ]
    rest = len(contrast.changes) - len(keys)
    names = Column("metric", keys)
    print_grid(console, f"Metrics ({rest} more in --json and --html)", names, columns)


def _print_corrections(contrast: Contrast, console: Console) -> None:
    """What each correction takes, before and after."""
    rows = dict(correction_rows(contrast))
    if not rows:
        return
    columns = [
        Column(heading, [_moved(changes.get(key)) for changes in rows.values()], drop=drop)
        for heading, key, drop in CORRECTION_COLUMNS
    ]
    title = "Corrections: reference → other (* significant)"
    print_grid(console, title, Column("correction", list(rows)), columns)


def _moved(change: Change | None) -> str:
    if change is None:
        return DASH
    mark = " *" if change.significant else ""
    return f"{number(change.reference.value, 'fraction')} → {number(change.other.value, 'fraction')}{mark}"


def _interval(change: Change) -> str:
    return DASH if change.interval is None else " to ".join(signed(end) for end in change.interval)


def _print_parts(contrast: Contrast, console: Console) -> None:
    """The largest contributions to the change of K3, by every quantity."""
    if k3_change(contrast).difference in (None, 0):
        return
    rows = [(decomposition, part) for decomposition in contrast.decompositions for part in decomposition.parts[:PARTS]]
    columns = [
        Column("contribution", [_contribution(part) for _, part in rows]),
        Column("of change", [_share(decomposition, part) for decomposition, part in rows], drop=1),
        Column("level", [signed(part.level) for _, part in rows], drop=4),
        Column("mix", [signed(part.mix) for _, part in rows], drop=4),
        Column("K3 there", [" → ".join(map(number, part.k3)) for _, part in rows], drop=2),
        Column("tokens there", [" → ".join(number(t, "fraction") for t in part.tokens) for _, part in rows], drop=5),
    ]
    title = "What the change of K3 is made of: the largest contributions"
    print_grid(console, title, Column("part", [part_name(*row) for row in rows]), columns)


def _contribution(part: Part) -> str:
    sign = "+" if part.total > 0 else ""
    return sign + estimate(part.total, part.se) if part.total else number(0.0)


def _share(decomposition: Decomposition, part: Part) -> str:
    if not decomposition.difference:
        return DASH
    return f"{100 * part.total / decomposition.difference:.0f} %"


def _print_matrix(matrix: Matrix, console: Console) -> None:
    """One small table per figure, rollout engines down, trainers across; a pair without a dump is missing."""
    for title, field, unit in MATRIX:
        columns = [
            Column(broken(trainer, 14), [_cell(row[index], field, unit) for row in matrix.cells])
            for index, trainer in enumerate(matrix.trainers)
        ]
        print_matrix(console, f"{title}, by rollout engine and trainer", Column("rollout", matrix.rollouts), columns)


def _cell(cell: object | None, field: str, unit: str) -> str:
    return "missing" if cell is None else number(getattr(cell, field).value, unit)
