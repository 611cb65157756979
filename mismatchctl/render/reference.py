"""What `metrics`, `presets` and `schema` print: definitions, corrections, the contract, and the check of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import yaml
from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.contract import COLUMNS
from mismatchctl.correction import Correction, Gate
from mismatchctl.correction.presets import Preset
from mismatchctl.dumps.check import FileCheck
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.metrics import MISMATCH_METRICS, Metric, correction_metrics, drift_metrics
from mismatchctl.render.numbers import bytes_size
from mismatchctl.render.text import clean, label

_EXAMPLE = Correction(name="example", gates=(Gate(level="min", keep=(1e-4, None)),))


def _sections() -> dict[str, tuple[Metric, ...]]:
    return {
        "Mismatch": MISMATCH_METRICS,
        "Second drift, train to current": drift_metrics(),
        "Of each correction (gate0 stands for any gate)": correction_metrics(_EXAMPLE),
    }


def render_metrics(console: Console) -> None:
    """List every metric: key, unit, definition."""
    for title, metrics in _sections().items():
        table = _table(console, title, "key", "unit", "definition")
        for metric in metrics:
            table.add_row(metric.key, metric.unit, Text(metric.definition))
        console.print(table)


def render_metric(name: str, console: Console) -> None:
    """Everything about the metrics of one key.

    Raises:
        ConfigError: no metric has that key.
    """
    found = [(title, metric) for title, metrics in _sections().items() for metric in metrics if metric.key == name]
    if not found:
        known = [metric.key for metrics in _sections().values() for metric in metrics]
        raise ConfigError(f"no metric is called {name!r}{suggestion(name, known)}; `mismatchctl metrics` lists them")
    for title, metric in found:
        console.print(Text.assemble((metric.key, "bold"), f"  {metric.title}  [{title}]"))
        rows = Table.grid(padding=(0, 2))
        for heading in ("unit", "definition", "meaning", "source"):
            rows.add_row(Text(heading, style="dim"), Text(str(getattr(metric, heading))))
        console.print(rows, "")


def render_presets(presets: Mapping[str, Preset], console: Console) -> None:
    """List every preset with what it does."""
    table = _table(console, "Presets", "name", "from", "what it does")
    for name, preset in presets.items():
        origin = f"{preset.framework} {preset.version}".strip()
        what = f"another name of {preset.alias_of}" if preset.alias_of else preset.correction.about
        table.add_row(name, origin or "-", Text(what))
    console.print(table)


def preset_yaml(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    head = [f"# {text}" for text in (f"{preset.framework} {preset.version}".strip(), preset.source) if text]
    body = yaml.safe_dump(preset.correction.to_mapping(), sort_keys=False, allow_unicode=True, width=100)
    return "\n".join([*head, body])


def render_contract(aliases: Mapping[str, str], console: Console) -> None:
    """The dump contract, with the other names under which columns are known."""
    table = _table(console, "The dump contract (* required)", "column", "holds", "meaning", "also known as")
    for column in COLUMNS:
        others = ", ".join(sorted(alias for alias, canonical in aliases.items() if canonical == column.name))
        name = f"{column.name}{' *' if column.required else ''}"
        table.add_row(name, Text(column.kind.value), Text(column.meaning), Text(others))
    console.print(table)
    console.print(
        "One row per sequence, or one row per token with sequence_id and position. "
        "Any other scalar column can be named with --by."
    )


def render_checks(checks: Iterable[FileCheck], console: Console) -> bool:
    """Explain files; says whether all of them can be used as they are."""
    sound = True
    for check in checks:
        sound &= check.sound
        _render_check(check, console)
    return sound


def _render_check(check: FileCheck, console: Console) -> None:
    verdict = Text("fine", style="green") if check.sound else Text("not usable as it is", style="red")
    size = f"{bytes_size(check.size)}, {check.rows:,} rows"
    console.print(Text.assemble((clean(check.path), "bold"), f" ({size}): ", verdict))
    if check.error is not None:
        console.print(Text(f"  {clean(check.error)}"))
        return
    console.print(
        f"  {check.layout} layout, {check.sequences:,} sequences, {check.tokens:,} valid tokens, run ", end=""
    )
    console.print(Text(clean(check.run)))
    rows = Table.grid(padding=(0, 2), pad_edge=True)
    for column in check.recognized:
        origin = "" if column.actual == column.name else f"from {clean(column.actual)}"
        rows.add_row("", column.name, Text(column.dtype), Text(origin))
    for name, value in check.partition.items():
        rows.add_row("", name, Text(clean(label(value))), "from the folder")
    console.print(rows)
    for heading, names in (
        ("absent", check.absent),
        ("cannot be used", [f"{name}: {why}" for name, why in check.ignored.items()]),
        ("not in the contract", [f"{column.name} ({column.dtype}){column.hint}" for column in check.unknown]),
    ):
        if names:
            console.print(Text(f"  {heading}: {clean(', '.join(names))}", style="dim"))
    for bad in check.bad:
        text = f"  {bad.column}: {bad.reason} in {bad.sequences:,} sequences; first in row {bad.row}: {bad.problem}"
        console.print(Text(clean(text), style="yellow"))


def _table(console: Console, title: str, *headings: str) -> Table:
    box = ASCII if console.options.ascii_only else SIMPLE_HEAD
    table = Table(title=title, title_justify="left", title_style="bold", box=box, pad_edge=False, padding=(0, 1))
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    return table
