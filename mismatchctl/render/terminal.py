"""The summary in the terminal: what a person reads in ten seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.box import ASCII, SIMPLE_HEAD, Box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mismatchctl.render.notes import notes
from mismatchctl.render.numbers import DASH, estimate, number
from mismatchctl.render.series import lists
from mismatchctl.render.text import clean, short
from mismatchctl.render.trend import DENSE_RANGE, MOE_RANGE, standing, trend
from mismatchctl.result import Result, RunResult, Value

NARROW = 120
"""Below this width, tables leave their less important columns out."""
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_SCALE = (-6, 0)
"""Decades of the scale that K3 is drawn on."""
_MISSING = Value(value=None, status="not recorded")

CORRECTION_COLUMNS = (
    ("weight", "weight_mean", "ratio", False),
    ("std", "weight_std", "ratio", True),
    ("bounded", "weight_bounded_high", "fraction", True),
    ("rejected tokens", "rejected_tokens", "fraction", False),
    ("sequences", "rejected_sequences", "fraction", False),
    ("ESS tokens", "ess_token", "fraction", False),
    ("ESS sequences", "ess_sequence", "fraction", True),
    ("loss scale", "loss_scale", "ratio", False),
    ("K3 kept", "k3_kept", "nats/token", False),
)
"""(heading, key, unit, whether it is left out where there is little room)."""


def render_summary(result: Result, console: Console) -> None:
    """Print the summary of a Result."""
    runs = list(result.runs.items())
    if len(runs) > 1:
        console.print(_runs_table(result, console))
    for name, run in runs:
        if len(runs) == 1:
            console.print(_headline(name, run, console))
        if len(runs) <= 4 and run.overall.corrections:
            title = "Corrections" if len(runs) == 1 else f"Corrections on {short(name, 40)}"
            console.print(_corrections_table(title, run, console))
    if len(runs) > 4 and any(correction.gates for correction in result.corrections):
        console.print(_rejections_table(result, console))
    found = notes(result)
    for sentence in found:
        console.print(Text.assemble(("! ", "yellow"), clean(sentence)))


def sparkline(values: Sequence[float | None], *, plain: bool, width: int = 40) -> str:
    """A positive series as bars on a log scale; undefined values are blank, long series are thinned to `width`."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    positive = [math.log(value) for value in values if value is not None and value > 0]
    if not positive:
        return ""
    low, spread = min(positive), max(max(positive) - min(positive), 0.2)
    bars = _PLAIN_BARS if plain else _BARS

    def bar(value: float | None) -> str:
        if value is None:
            return " "
        height = 0.0 if value <= 0 else (math.log(value) - low) / spread
        return bars[min(int(height * len(bars)), len(bars) - 1)]

    return "".join(bar(value) for value in values)


def _headline(name: str, run: RunResult, console: Console) -> Group:
    metrics = run.overall.metrics
    plain = console.options.ascii_only
    k3 = metrics.get("k3", _MISSING)
    counts = ", ".join(
        f"{number(metrics.get(key, _MISSING).value, key)} {key}" for key in ("tokens", "sequences") if key in metrics
    )
    steps = f"{len(run.groups.labels)} steps" if len(run.groups.labels) > 1 else "1 step"
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("K3", Text.assemble((_shown(k3, "nats/token"), "bold"), " nats/token: ", standing(k3.value, k3.se)))
    if k3.value:
        rows.add_row("", _scale(k3.value, plain=plain, width=min(console.width - 16, 73)))
    if len(run.groups.labels) > 1:
        values, errors = lists(run.groups, "k3")
        line = sparkline(values, plain=plain)
        ends = f"{number(values[0])} {'->' if plain else '→'} {number(values[-1])}"
        rows.add_row("over steps", f"{line}  {ends}; {trend(run.groups.labels, values, errors).words}")
    difference = f"mean {_shown(metrics.get('abs_diff_mean', _MISSING), 'nats')}"
    difference += f", p99 {number(metrics.get('abs_diff_p99', _MISSING).value)}"
    difference += f", max {number(metrics.get('abs_diff_max', _MISSING).value)} nats"
    rows.add_row("|difference|", difference)
    z = metrics.get("ratio_mean_z", _MISSING).value
    ratio = _shown(metrics.get("ratio_mean", _MISSING), "ratio")
    rows.add_row("E[ratio]", f"{ratio} (z = {z:+.1f})" if z is not None else ratio)
    ess = ", ".join(f"{_shown(metrics.get(f'ess_{level}', _MISSING), 'fraction')} of {level}s" for level in _LEVELS)
    rows.add_row("raw ESS", ess)
    if "drift_k3" in metrics:
        drift = f"K3 {_shown(metrics['drift_k3'], 'nats/token')}, ois {_shown(metrics['ois'], 'ratio')}"
        rows.add_row("2nd drift", drift)
    return Group(Text.assemble((clean(name), "bold"), f": {counts}, {steps}"), rows, "")


_LEVELS = ("token", "sequence")


def _scale(k3: float, *, plain: bool, width: int) -> Text:
    """A line over the decades with the two usual ranges, and a mark where K3 stands."""
    low, high = _SCALE

    def place(value: float) -> int:
        return round((min(max(math.log10(value), low), high) - low) / (high - low) * (width - 1))

    dash, dense, moe, mark = "-=#|" if plain else "─━═●"
    cells = [dash] * width
    for (start, end), fill in ((DENSE_RANGE, dense), (MOE_RANGE, moe)):
        for index in range(place(start), place(end)):
            cells[index] = fill
    cells[place(k3)] = mark
    line = Text("".join(cells), style="dim")
    line.stylize("not dim bold", place(k3), place(k3) + 1)
    names = [" "] * width
    for (start, _), name in ((DENSE_RANGE, "1e-5 dense"), (MOE_RANGE, "1e-3 MoE")):
        for offset, letter in enumerate(name):
            if place(start) + offset < width:
                names[place(start) + offset] = letter
    return Text.assemble(line, "\n", ("".join(names).rstrip(), "dim"))


def _runs_table(result: Result, console: Console) -> Table:
    """One row per run."""
    narrow, plain = console.width < NARROW, console.options.ascii_only
    table = _table(console, f"{len(result.runs)} runs")
    table.add_column("run", no_wrap=True)
    differences = () if narrow else ("mean |diff|", "max |diff|")
    for heading in ("tokens", "K3", *differences, "ESS seq.", "z"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("over steps", no_wrap=True)
    room = 20 if narrow else 44
    for name, run in result.runs.items():
        metrics = run.overall.metrics
        values, errors = lists(run.groups, "k3")
        words = trend(run.groups.labels, values, errors)
        line = sparkline(values, plain=plain, width=8 if narrow else 16)
        z = metrics.get("ratio_mean_z", _MISSING).value
        k3 = metrics.get("k3", _MISSING)
        cells = [number(metrics.get("tokens", _MISSING).value, "tokens")]
        cells.append(number(k3.value) if narrow else estimate(k3.value, k3.se))
        if not narrow:
            cells += [number(metrics.get(f"abs_diff_{which}", _MISSING).value) for which in ("mean", "max")]
        cells += [number(metrics.get("ess_sequence", _MISSING).value, "fraction"), DASH if z is None else f"{z:+.1f}"]
        steps = line if narrow else f"{line} {words.brief if len(values) > 1 else ''}"
        table.add_row(Text(short(name, room)), *(Text(cell) for cell in cells), Text(steps))
    return table


def _corrections_table(title: str, run: RunResult, console: Console) -> Table:
    """One row per correction."""
    narrow = console.width < NARROW
    table = _table(console, title)
    table.add_column("correction", no_wrap=True, overflow="ellipsis")
    columns = [column for column in CORRECTION_COLUMNS if not (narrow and column[3])]
    for heading, *_ in columns:
        table.add_column(heading, justify="right")
    for name, values in run.overall.corrections.items():
        cells = [number(values.get(key, _MISSING).value, unit) for _, key, unit, _ in columns]
        table.add_row(Text(short(name, 28)), *(Text(cell) for cell in cells))
    return table


def _rejections_table(result: Result, console: Console) -> Table:
    """Share of rejected tokens by run and by correction that has gates."""
    table = _table(console, "Rejected tokens by correction")
    rejecting = [correction.name for correction in result.corrections if correction.gates]
    table.add_column("run", no_wrap=True)
    for name in rejecting:
        table.add_column(short(name, 12), justify="right", no_wrap=True)
    room = max(12, min(44, console.width - 14 * len(rejecting)))
    for run_name, run in result.runs.items():
        shares = [run.overall.corrections[name]["rejected_tokens"].value for name in rejecting]
        table.add_row(Text(short(run_name, room)), *(Text(number(share, "fraction")) for share in shares))
    return table


def _table(console: Console, title: str) -> Table:
    box: Box = ASCII if console.options.ascii_only else SIMPLE_HEAD
    return Table(title=Text(clean(title), style="bold"), box=box, title_justify="left", pad_edge=False, padding=(0, 1))


def _shown(value: Value, unit: str) -> str:
    return estimate(value.value, value.se, unit) if value.value is not None else f"{DASH} ({value.status})"
