"""The summary in the terminal: what a person reads in ten seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.measure.metrics.ranges import DENSE_RANGE, MOE_RANGE
from mismatchctl.numbers import DASH, estimate, estimate_or_reason, number
from mismatchctl.render.findings import render_findings, render_first_findings
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, broken, print_grid, print_matrix
from mismatchctl.render.notes import notes
from mismatchctl.render.series import lists
from mismatchctl.render.text import label
from mismatchctl.result import Groups, Growth, Result, RunResult, Value, story_of

DETAILED = 3
"""Up to so many runs, each has a table of its corrections; more share one."""
MOST_GROUPS = 12
"""Values of a `--by` column that are shown."""
MOST_CHANGES = 5
"""Runs of which is said how they changed, where the table has no room for it."""
_SCALE_WIDTH = 73
_CHANGE = "change"
_MISSING = Value(value=None, status="not recorded")

CORRECTION_COLUMNS = (
    ("weight\nmean", "weight_mean", "ratio", 5),
    ("rejected\ntokens", "rejected_tokens", "fraction", 0),
    ("rejected\nsequences", "rejected_sequences", "fraction", 4),
    ("ESS\ntokens", "ess_token", "fraction", 0),
    ("ESS\nsequences", "ess_sequence", "fraction", 3),
    ("loss\nscale", "loss_scale", "ratio", 2),
    ("K3\nkept", "k3_kept", "nats/token", 1),
)
"""(heading, key, unit, how early it goes where there is little room)."""


def render_summary(result: Result, console: Console) -> None:
    """Print the summary of a Result."""
    several = len(result.runs) > 1
    if several:
        _print_runs(result, console)
    for name, run in result.runs.items():
        if not several:
            _print_headline(name, run, console)
        if len(result.runs) <= DETAILED:
            render_findings(run.findings, f"Findings on {name}" if several else "Findings", console)
            _print_corrections(f"Corrections on {name}" if several else "Corrections", run, console)
            for column, groups in run.by.items():
                _print_groups(f"{name} by {column}" if several else f"By {column}", column, groups, console)
    if len(result.runs) > DETAILED:
        render_first_findings({name: run.findings for name, run in result.runs.items()}, console)
        _print_effects(result, console)
    print_notes(notes(result), console)


def _print_headline(name: str, run: RunResult, console: Console) -> None:
    """One run: its name and size, then a line per question."""
    glyphs, steps = Glyphs(console), len(run.groups.labels)
    sizes = {"token": _value(run, "tokens").value, "sequence": _value(run, "sequences").value, "step": steps}
    counts = [f"{number(size, 'rows')} {noun}{'s' * (size != 1)}" for noun, size in sizes.items()]
    console.print(Text.assemble((glyphs.text(name), "bold"), f": {', '.join(counts)}"))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    k3 = _value(run, "k3")
    rows.add_row("K3", Text.assemble((glyphs.text(_shown(k3, "nats/token")), "bold"), _standing(run)))
    if k3.value is not None:
        rows.add_row("", glyphs.scale(k3.value, max(min(console.width - 14, _SCALE_WIDTH), 1)))
    if steps > 1:
        rows.add_row("over steps", _over_steps(run, glyphs))
    for heading, text in _answers(run):
        rows.add_row(heading, Text(glyphs.text(text)))
    console.print(rows, "")


def _standing(run: RunResult) -> str:
    standing = story_of(run).standing
    return "" if standing.range == "undefined" else f" nats/token: {standing.text}"


def _over_steps(run: RunResult, glyphs: Glyphs) -> str:
    values, _ = lists(run.groups, "k3")
    change = story_of(run).growth.text
    ends = f"{number(values[0])} → {number(values[-1])}"
    return f"{glyphs.sparkline(values)}  {glyphs.text(f'{ends}; {change}')}"


def _answers(run: RunResult) -> list[tuple[str, str]]:
    """The other lines of the headline: (what, its figures)."""
    p99, largest = (number(_value(run, f"abs_diff_{which}").value) for which in ("p99", "max"))
    z = _value(run, "ratio_mean_z").value
    ess = ", ".join(f"{_shown(_value(run, f'ess_{level}'), 'fraction')} of {level}s" for level in ("token", "sequence"))
    rows = [
        ("|difference|", f"mean {_shown(_value(run, 'abs_diff_mean'), 'nats')}, p99 {p99}, max {largest} nats"),
        ("E[ratio]", f"{_shown(_value(run, 'ratio_mean'), 'ratio')}{'' if z is None else f' (z = {_z(z)})'}"),
        ("raw ESS", ess),
    ]
    if "drift_k3" in run.overall.metrics:
        drift = f"K3 {_shown(_value(run, 'drift_k3'), 'nats/token')}, E[ratio] {_shown(_value(run, 'ois'), 'ratio')}"
        rows.append(("2nd drift", f"{drift} (train to current)"))
    return rows


def _print_runs(result: Result, console: Console) -> None:
    """One row per run."""
    runs, glyphs = list(result.runs.values()), Glyphs(console)
    series = [lists(run.groups, "k3") for run in runs]
    k3 = [_value(run, "k3") for run in runs]
    columns = [
        _figures("tokens", runs, "tokens", "tokens", drop=7),
        Column("K3", [estimate(v.value, v.se) for v in k3], brief=[number(v.value) for v in k3]),
        Column("K3\nusual for", [_range(v.value) for v in k3], right=False, drop=6),
        _figures("mean\n|diff|", runs, "abs_diff_mean", "nats", drop=8),
        _figures("max\n|diff|", runs, "abs_diff_max", "nats", drop=9),
        _figures("ESS\nsequences", runs, "ess_sequence", "fraction", drop=1),
        Column("z of\nE[ratio]", [_z(_value(run, "ratio_mean_z").value) for run in runs]),
    ]
    changes = [story_of(run).growth for run in runs]
    if any(len(run.groups.labels) > 1 for run in runs):
        lines, brief = ([glyphs.sparkline(values, width) for values, _ in series] for width in (16, 8))
        columns.append(Column("K3 over\nsteps", lines, right=False, drop=4, brief=brief))
        columns.append(Column(_CHANGE, [change.brief for change in changes], right=False, drop=5))
    shown = print_grid(console, f"{len(runs)} runs", Column("run", list(result.runs)), columns)
    if _CHANGE not in shown:
        _print_changes(dict(zip(result.runs, changes, strict=True)), console)


def _print_changes(changes: Mapping[str, Growth], console: Console) -> None:
    """Which runs changed most and when, where the table had no room for it."""
    glyphs = Glyphs(console)
    changed = {name: change for name, change in changes.items() if change.factor}
    largest = sorted(changed, key=lambda name: -abs(math.log(changed[name].factor or 1)))[:MOST_CHANGES]
    for name in largest:
        console.print(Text.assemble((glyphs.text(name), "bold"), glyphs.text(f": K3 {changed[name].text}")))
    if len(changed) > len(largest):
        console.print(f"and {len(changed) - len(largest)} more runs changed")
    if changed:
        console.print()


def _range(k3: float | None) -> str:
    """The usual range that a K3 lies in, in a word."""
    if k3 is None:
        return DASH
    if k3 == 0:
        return "identical"
    if k3 < DENSE_RANGE[0]:
        return "< dense"
    return "dense" if k3 < DENSE_RANGE[1] else "MoE" if k3 < MOE_RANGE[1] else "> MoE"


def _print_corrections(title: str, run: RunResult, console: Console) -> None:
    """One row per correction of a run."""
    found = run.overall.corrections
    if not found:
        return
    columns = [
        Column(heading, [number(values.get(key, _MISSING).value, unit) for values in found.values()], drop=drop)
        for heading, key, unit, drop in CORRECTION_COLUMNS
    ]
    columns.insert(1, Column("weights\nbounded", [_bounded(values) for values in found.values()], drop=6))
    print_grid(console, title, Column("correction", list(found)), columns)


def _bounded(values: dict[str, Value]) -> str:
    low, high = (values.get(f"weight_bounded_{side}", _MISSING).value for side in ("low", "high"))
    return DASH if low is None or high is None else number(low + high, "fraction")


def _print_groups(title: str, column: str, groups: Groups, console: Console) -> None:
    """One row per value of a `--by` column, those with most tokens first where not all can be shown."""
    figures = {
        key: lists(groups, key) for key in ("tokens", "sequences", "k3", "abs_diff_mean", "ess_sequence", "ratio_mean")
    }
    order = sorted(range(len(groups.labels)), key=lambda index: -(figures["tokens"][0][index] or 0))
    chosen = sorted(order[:MOST_GROUPS])

    def cells(key: str, unit: str, *, errors: bool = False) -> list[str]:
        values, ses = figures[key]
        return [estimate(values[index], ses[index] if errors else None, unit) for index in chosen]

    columns = [
        Column("tokens", cells("tokens", "tokens"), drop=1),
        Column("sequences", cells("sequences", "sequences"), drop=2),
        Column("K3", cells("k3", "nats/token", errors=True), brief=cells("k3", "nats/token")),
        Column("mean\n|diff|", cells("abs_diff_mean", "nats"), drop=4),
        Column("E[ratio]", cells("ratio_mean", "ratio", errors=True), drop=5),
        Column("ESS\nsequences", cells("ess_sequence", "fraction"), drop=3),
    ]
    if len(chosen) < len(order):
        title += f" ({len(chosen)} of {len(order)} values, those with most tokens)"
    print_grid(console, title, Column(column, [label(groups.labels[index]) for index in chosen]), columns)


def _print_effects(result: Result, console: Console) -> None:
    """What each correction takes of each run, in two figures."""
    glyphs = Glyphs(console)
    acting = [correction.name for correction in result.corrections if correction.gates or correction.weight]
    columns = [
        Column(
            broken(glyphs.text(name), 12),
            [_effect(run.overall.corrections.get(name, {})) for run in result.runs.values()],
        )
        for name in acting
    ]
    title = "Corrections: tokens rejected | ESS of sequences left, in percent"
    print_matrix(console, title, Column("run", list(result.runs)), columns)


def _effect(values: dict[str, Value]) -> str:
    rejected, left = (_percent(values.get(key, _MISSING).value) for key in ("rejected_tokens", "ess_sequence"))
    return f"{rejected:>3} |{left:>4}"


def _percent(share: float | None) -> str:
    """A whole percentage that is 0 or 100 only where the share is."""
    if share is None:
        return DASH
    rounded = round(100 * share)
    if rounded == 0 and share > 0:
        return "<1"
    return ">99" if rounded == 100 and share < 1 else str(rounded)


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


def _figures(heading: str, runs: Sequence[RunResult], key: str, unit: str, drop: int) -> Column:
    return Column(heading, [number(_value(run, key).value, unit) for run in runs], drop=drop)


def _value(run: RunResult, key: str) -> Value:
    return run.overall.metrics.get(key, _MISSING)


def _z(value: float | None) -> str:
    return DASH if value is None else f"{round(value, 1) + 0.0:+.1f}"


def _shown(value: Value, unit: str) -> str:
    return estimate_or_reason(value.value, value.se, unit, value.status)
