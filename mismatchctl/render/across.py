"""One method side by side as each framework has it, and what is known of each framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from mismatchctl.frameworks import SHELVES, presets
from mismatchctl.render.grid import Column, print_grid, ruled_table

_HEADINGS = {
    "preset": "preset",
    "framework": "framework",
    "rule": "rule",
    "source": "ratio of",
    "interval": "kept as it is",
    "outside": "outside it",
}


def render_across(
    method: str, rows: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]], console: Console
) -> None:
    """Print the presets of a method, then what each does on the dumps, run by run."""
    console.print(Text(f"{method} across frameworks", style="bold"))
    table = ruled_table(console)
    for index, heading in enumerate(_HEADINGS.values()):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(Text(str(row[key])) for key in _HEADINGS))
    console.print(table)
    for row in rows:
        console.print(Text(f"{row['preset']}: {', '.join(_flat(row['options'])) or 'of no framework'}"), soft_wrap=True)
    console.print()
    for run, measured in results.items():
        _render_run(run, measured, console)


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Options as `block.key=value`."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}={value}"


def _render_run(run: str, measured: Mapping[str, Any], console: Console) -> None:
    done = {name: values for name, values in measured.items() if not isinstance(values, str)}
    keys = list(dict.fromkeys(key for values in done.values() for key in values))
    columns = [Column(key, [_number(values.get(key)) for values in done.values()]) for key in keys]
    print_grid(console, f"{run}: what differs in the result", Column("preset", list(done)), columns)
    for name, why in measured.items():
        if isinstance(why, str):
            console.print(Text(f"{name}: not applied: {why}"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def frameworks_data() -> list[dict[str, Any]]:
    """Every framework: versions, presets, names that it logs, files of dumps."""
    named = [item.framework for item in presets().values()]
    return [
        {
            "name": shelf.name,
            "versions": list(shelf.versions),
            "presets": named.count(shelf.name),
            "logged_names": len({meaning.name for meaning in shelf.load("").meanings()}),
            "files": [layout.framework for layout in shelf.layouts],
        }
        for shelf in SHELVES
    ]


def render_frameworks(console: Console) -> None:
    """Print them."""
    table = ruled_table(console)
    for index, heading in enumerate(("framework", "versions, newest first", "presets", "logged names", "files")):
        table.add_column(heading, overflow="fold", no_wrap=index == 0)
    for row in frameworks_data():
        cells = (", ".join(row["versions"]), str(row["presets"]), str(row["logged_names"]), ", ".join(row["files"]))
        table.add_row(Text(row["name"]), *map(Text, cells))
    console.print(table)
