"""What `schema --check` prints: per kind of file what was recognized, what is missing, what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.dumps.check import FileCheck
from mismatchctl.numbers import bytes_size
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.text import label


def render_checks(checks: Iterable[FileCheck], console: Console) -> bool:
    """Explain files, those that are alike together; says whether all of them can be used as they are."""
    kinds: dict[object, list[FileCheck]] = {}
    checks = list(checks)
    for check in checks:
        kinds.setdefault(_kind(check), []).append(check)
    for alike in kinds.values():
        _render_kind(alike, console)
    sound = sum(check.sound for check in checks)
    if len(checks) > 1:
        console.print(f"{sound} of {len(checks)} files can be used as they are")
    return sound == len(checks)


def _kind(check: FileCheck) -> object:
    """What files must share to be explained together; a file with something wrong stands alone."""
    if not check.sound:
        return check.path
    columns = (check.recognized, tuple(check.partition), check.absent, tuple(check.ignored.items()), check.unknown)
    return check.run, check.layout, columns


def _render_kind(alike: Sequence[FileCheck], console: Console) -> None:
    first, glyphs = alike[0], Glyphs(console)
    verdict = Text("fine", style="green") if first.sound else Text("cannot be used as it is", style="red")
    more = f" and {len(alike) - 1} more like it" if len(alike) > 1 else ""
    console.print(Text.assemble((glyphs.text(first.path), "bold"), more, ": ", verdict))
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for heading, text in _facts(alike):
        rows.add_row(f"  {heading}", Text(glyphs.text(text)))
    for heading, text in _faults(first):
        rows.add_row(Text(f"  {heading}", style="yellow"), Text(glyphs.text(text)))
    console.print(rows, "")


def _facts(alike: Sequence[FileCheck]) -> Iterable[tuple[str, str]]:
    first = alike[0]
    size, rows, sequences, tokens = (
        sum(getattr(check, name) for check in alike) for name in ("size", "rows", "sequences", "tokens")
    )
    if rows:
        counts = [(rows, "row"), (sequences, "sound sequence"), (tokens, "valid token")]
        yield (
            "holds",
            ", ".join([bytes_size(size), *(f"{count:,} {name}{'s' * (count != 1)}" for count, name in counts)]),
        )
    yield "run", first.run
    if first.layout is not None:
        meaning = "one row per sequence" if first.layout == "wide" else "one row per token"
        yield "layout", f"{first.layout}: {meaning}"
    heading = "columns"
    for column in first.recognized:
        origin = "" if column.actual == column.name else f", called {column.actual} there"
        yield heading, f"{column.name}: {column.dtype}{origin}"
        heading = ""
    for name, value in first.partition.items():
        yield heading, f"{name}: from the folders' names" + ("" if len(alike) > 1 else f" ({label(value)})")
        heading = ""
    if first.absent:
        yield "absent", ", ".join(first.absent)
    if first.unknown:
        yield "unknown", ", ".join(f"{column.name}: {column.dtype}{column.hint}" for column in first.unknown)


def _faults(check: FileCheck) -> Iterable[tuple[str, str]]:
    if check.error is not None:
        yield "problem", check.error
    for name, why in check.ignored.items():
        yield "left out", f"{name}: {why}"
    for bad in check.bad:
        count = f"{bad.sequences:,} sequence{'s' * (bad.sequences != 1)}"
        yield "bad data", f"{bad.reason} in {count}; first in row {bad.row}: {bad.problem}"
