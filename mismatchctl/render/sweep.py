"""A sweep in the terminal: for each correction a curve and the points worth a look, never all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.numbers import DASH, estimate, number
from mismatchctl.predict import Prediction
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, print_grid
from mismatchctl.render.notes import left_out_notes
from mismatchctl.render.predictions import render_predictions
from mismatchctl.sweep.model import Sweep, Target
from mismatchctl.sweep.study import Study

SHOWN, SHOWN_OF_FRONT = 8, 40
"""Points of a correction in its table; with the Pareto front asked for, points of it."""
MOST_PRESETS = 4
"""Presets named at one place."""
_CURVES = (("rejected tokens", "rejected_tokens"), ("ESS of tokens", "ess_token"))
FIGURES = (
    ("rejected\ntokens", "rejected_tokens", "fraction", 0),
    ("rejected\nsequences", "rejected_sequences", "fraction", 4),
    ("ESS\ntokens", "ess_token", "fraction", 0),
    ("ESS\nsequences", "ess_sequence", "fraction", 3),
    ("weight\nmean", "weight_mean", "ratio", 5),
    ("bias of\nthe bound", "weight_bias", "ratio", 2),
    ("K3\nkept", "k3_kept", "nats/token", 1),
)
"""What is told of a point: (heading, key, unit, how early it goes where there is little room)."""
WISHES = {
    "rejected_tokens": "of tokens rejected",
    "rejected_sequences": "of sequences rejected",
    "ess_token": "ESS of tokens",
}
_DIGITS = 6

Row = Mapping[str, Any]
Item = TypeVar("Item")


def render_sweep(sweep: Sweep, console: Console, *, front: bool = False) -> None:
    """Print a sweep.

    Args:
        sweep: what was found.
        console: where to.
        front: show the whole Pareto front of each correction, as far as there is room.
    """
    glyphs, runs = Glyphs(console), sweep.runs
    for run in runs:
        for study in sweep.studies:
            rows = sweep.rows(run, study.name).to_dicts()
            _print_headline(run, study, rows, console)
            if len(study.axes) == 1 and study.axes[0].is_numeric and len(rows) > 2:
                _print_curve(study, rows, console)
            _print_points(study, rows, console, front)
            _print_presets(sweep, study, console)
        targets = [target for target in sweep.targets if target.run == run]
        if targets:
            _print_targets(run if len(runs) > 1 else "", targets, console)
        if sweep.forecasts:
            render_predictions(predictions_of(sweep, run), console)
    print_notes([glyphs.text(text) for text in [*sweep.warnings, *left_out_notes(sweep.left_out)]], console)


def predictions_of(sweep: Sweep, run: str) -> dict[str, Sequence[Prediction]]:
    """The predictions of one run by correction and point."""
    found: dict[str, Sequence[Prediction]] = {}
    for forecast in sweep.forecasts:
        if forecast.run == run:
            place = sweep.place(forecast.correction, forecast.point)
            values = ", ".join(f"{path} {threshold(value)}" for path, value in place.items())
            found[f"{forecast.correction}: {values}"] = forecast.predictions
    return found


def threshold(value: Any) -> str:
    """A value of an axis: as many digits as tell thresholds apart."""
    if value is None:
        return DASH
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


def _print_headline(run: str, study: Study, rows: Sequence[Row], console: Console) -> None:
    glyphs = Glyphs(console)
    axes = [
        f"{axis.path} {threshold(axis.values[0])} to {threshold(axis.values[-1])}"
        if axis.is_numeric and len(axis.values) > 1
        else f"{axis.path} {', '.join(threshold(value) for value in axis.values)}"
        for axis in study.axes
    ]
    points = f"{len(rows):,} point{'s' * (len(rows) != 1)}"
    words = f" on {run}: {'; '.join(axes)} ({points})"
    console.print(Text.assemble((glyphs.text(study.name), "bold"), glyphs.text(words)))


def _print_curve(study: Study, rows: Sequence[Row], console: Console) -> None:
    """Rejection and effective sample size along the axis, from 0 to 1."""
    glyphs = Glyphs(console)
    table = Table.grid(padding=(0, 2, 0, 0))
    for heading, key in _CURVES:
        values = [row[key] for row in rows]
        if len(set(values)) > 1:
            ends = f"{number(values[0], 'fraction')} → {number(values[-1], 'fraction')}"
            table.add_row(Text(heading, style="dim"), Text(glyphs.shares(values)), Text(glyphs.text(ends)))
    if table.row_count:
        console.print(table)


def _print_points(study: Study, rows: Sequence[Row], console: Console, front: bool) -> None:
    best = [row for row in rows if row["pareto"]]
    if len(study.axes) > 1:
        best.sort(key=lambda row: (row["rejected_tokens"], -row["ess_token"]))
    chosen = thinned(best or rows, SHOWN_OF_FRONT if front else SHOWN)
    paths = [axis.path for axis in study.axes]
    columns = [Column(path.replace(".", ".\n", 1), [threshold(row[path]) for row in chosen]) for path in paths[1:]]
    for heading, key, unit, drop in telling(rows):
        cells = [estimate(row[key], row.get(f"{key}_se"), unit) for row in chosen]
        columns.append(Column(heading, cells, drop=drop, brief=[number(row[key], unit) for row in chosen]))
    title = f"{len(chosen)} of {len(best)} points that no other beats" if best else "no point has every figure"
    print_grid(console, title, Column(paths[0], [threshold(row[paths[0]]) for row in chosen]), columns)


def telling(rows: Sequence[Row]) -> list[tuple[str, str, str, int]]:
    """Those of FIGURES that differ among rows, and the two that always stand there."""
    always = ("rejected_tokens", "ess_token")
    return [
        figure for figure in FIGURES if figure[1] in always or any(row[figure[1]] != rows[0][figure[1]] for row in rows)
    ]


def by_wish(targets: Sequence[Target]) -> dict[tuple[str, float], list[Target]]:
    """Targets by what was asked for, in order."""
    found: dict[tuple[str, float], list[Target]] = {}
    for target in targets:
        found.setdefault((target.wish, target.wanted), []).append(target)
    return found


def thinned(rows: Sequence[Item], most: int) -> list[Item]:
    """At most so many of them, spread evenly."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _print_presets(sweep: Sweep, study: Study, console: Console) -> None:
    """Where the presets of frameworks stand on the axes."""
    glyphs, table = Glyphs(console), Table.grid(padding=(0, 2, 0, 0))
    for mark in sweep.marks:
        if mark.correction == study.name:
            first, more = mark.presets[:MOST_PRESETS], len(mark.presets) - MOST_PRESETS
            names = f"{', '.join(first)}{f' and {more} more' if more > 0 else ''}"
            where = f"{mark.path} {threshold(mark.value)}"
            table.add_row(Text(where, style="dim"), Text(glyphs.text(names)))
    if table.row_count:
        console.print(table, "")


def _print_targets(run: str, targets: Sequence[Target], console: Console) -> None:
    """One table per wish."""
    for (key, wanted), chosen in by_wish(targets).items():
        columns = [
            Column("x", [threshold(target.threshold) for target in chosen]),
            Column("90 % interval", [target_interval(target) for target in chosen], right=False, drop=1),
            Column("reached", [_reached(target) for target in chosen], right=False),
        ]
        title = f"Thresholds for {number(wanted, 'fraction')} {WISHES[key]}{f' on {run}' if run else ''}"
        print_grid(console, title, Column("rule", [target.rule for target in chosen]), columns)


def _reached(target: Target) -> str:
    return number(target.reached, "fraction") if target.status == "ok" else target.status


def target_interval(target: Target) -> str:
    """The interval of a solved threshold, a dash without one."""
    if target.interval is None:
        return DASH
    low, high = target.interval
    return f"{'below' if low is None else threshold(low)} to {'beyond' if high is None else threshold(high)}"


def print_notes(sentences: Sequence[str], console: Console) -> None:
    """Print what a reader should not overlook."""
    glyphs = Glyphs(console)
    rows = Table.grid(padding=(0, 1, 0, 0))
    rows.add_column(style="yellow", width=1)
    rows.add_column(overflow="fold")
    for sentence in sentences:
        rows.add_row("!", Text(glyphs.text(sentence)))
    if sentences:
        console.print(rows)
