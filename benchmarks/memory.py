"""Measure the peak memory of each command that reads tokens, for dumps of several sizes and shapes.

    python benchmarks/memory.py --write benchmarks/results.md
    python benchmarks/memory.py --shapes --write benchmarks/results.md    # section "Odd shapes" only

Each command runs in a fresh process with one thread. Larger dumps are links to the files of the smallest dump. Dumps of
odd shapes have two sizes, so that quadratic memory or time shows. Writes the sections "Memory" and "Odd shapes".
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from measure import Cost, make_dump, measure, publish, report_cost, table, write_lists  # noqa: E402

COMMANDS = {
    "analyze, five corrections and the report": ["analyze", "DUMP", "--html", "OUT/page.html"],
    "diagnose": ["diagnose", "DUMP"],
    "gate": ["gate", "DUMP", "--rule", "k3:max=1"],
    "convert": ["convert", "DUMP", "OUT/converted"],
    "sweep": ["sweep", "DUMP"],
    "compare, with itself": ["compare", "DUMP", "DUMP"],
}
GOAL = 600
SHAPES: dict[str, tuple[int, Callable[[int], NDArray[np.int64]]]] = {
    "one sequence of {:,} tokens": (1_000_000, lambda size: np.array([size])),
    "{:,} sequences of one token": (125_000, lambda size: np.ones(size, np.int64)),
    "{:,} sequences of 1 to 15 tokens": (125_000, lambda size: np.random.default_rng(0).integers(1, 16, size)),
}
"""Number of items in the smaller dump, and a function that returns the lengths of the sequences."""


def case(*words: str) -> None:
    """Run one command in this process and print its cost."""
    from mismatchctl.cli.main import main as run_command

    sys.argv = ["mismatchctl", *words]
    with report_cost(), contextlib.redirect_stdout(io.StringIO()):
        try:
            run_command()
        except SystemExit as end:
            assert end.code in (None, 0, 4), f"{words}: exit code {end.code}"  # 4: undecided


def link_copies(folder: Path, times: int, target: Path) -> Path:
    """Link the files of a folder several times under other names."""
    target.mkdir()
    for number in range(times):
        for file in sorted(folder.iterdir()):
            os.link(file, target / f"{number:04d}_{file.name}")
    return target


def write_shape(target: Path, lengths: NDArray[np.int64]) -> Path:
    """Write a file with one step of sequences of the given lengths."""
    target.mkdir()
    write_lists(target / "dump.parquet", lengths, np.random.default_rng(0), 0, row_group_size=1 << 16)
    return target


def measure_commands(dump: Path) -> dict[str, Cost]:
    """Return the cost of each command on a dump."""
    costs = {}
    for name, words in COMMANDS.items():
        with tempfile.TemporaryDirectory(dir=dump.parent) as out:
            places = [word.replace("DUMP", str(dump)).replace("OUT", out) for word in words]
            options = [] if name == "convert" else ["--threads", "1"]
            costs[name] = measure(__file__, "case", *places, *options)
    return costs


def main(
    tokens: int = 10_000_000,
    times: Annotated[list[int] | None, typer.Option(help="Relative sizes of the dumps. [default: 1, 10, 100]")] = None,
    write: Path | None = None,
    scratch: Annotated[Path | None, typer.Option(help="Folder for the dumps. [default: a temporary folder]")] = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Measure odd shapes only.")] = False,
) -> None:
    """Measure, print, and write the tables."""
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        if not shapes:
            publish(_format_sizes(_measure_sizes(Path(made), tokens, times or [1, 10, 100])), write)
        publish(_format_shapes(_measure_shapes(Path(made))), write, "memory_shapes")


def _measure_sizes(made: Path, tokens: int, times: list[int]) -> dict[int, dict[str, Cost]]:
    smallest = made / "dump"
    smallest.mkdir()
    make_dump(smallest, tokens, 2500)
    return {count * tokens: measure_commands(link_copies(smallest, count, made / f"dump_{count}")) for count in times}


def _measure_shapes(made: Path) -> dict[str, dict[str, Cost]]:
    return {
        title.format(size): measure_commands(write_shape(made / f"{size}_{number}", lengths(size)))
        for number, (title, (half, lengths)) in enumerate(SHAPES.items())
        for size in (half, 2 * half)
    }


def _format_sizes(costs: dict[int, dict[str, Cost]]) -> str:
    most = max(cost.memory for found in costs.values() for cost in found.values())
    title = (
        "`benchmarks/memory.py`: peak memory in MB and wall time of each command in a fresh process with one thread. "
        f"The goal is at most {GOAL} MB: {'met' if most <= GOAL else 'missed'}. `compare` keeps about 400 bytes per "
        "sequence."
    )
    heads = "command", *(f"{tokens / 1e6:,.0f} M tokens" for tokens in costs)
    cells = {
        name: [f"{found[name].memory:,.0f} ({found[name].wall:,.0f} s)" for found in costs.values()]
        for name in COMMANDS
    }
    return f"## Memory\n\n{title}\n\n" + table(heads, ((name, *own) for name, own in cells.items()))


def _format_shapes(costs: dict[str, dict[str, Cost]]) -> str:
    title = (
        "Peak memory in MB and processor seconds of one step in row groups of 65,536 sequences. The largest row group "
        "determines the memory."
    )
    rows = (
        (name, *(f"{cost.memory:,.0f} ({cost.processor:,.1f} s)" for cost in found.values()))
        for name, found in costs.items()
    )
    return f"### Odd shapes\n\n{title}\n\n{table(('dump', *COMMANDS), rows)}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        case(*sys.argv[2:])
    else:
        typer.run(main)
