"""`mismatchctl convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.flags import Json, Quiet
from mismatchctl.cli.output import check_places, print_json, progress_bar, say


def convert(
    source: Annotated[Path, typer.Argument(help="A file or folder that a framework wrote.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The Parquet file to write.", show_default=False)],
    framework: Annotated[
        str, typer.Option("--from", help="Whose files these are; default: as they are recognized.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Convert what a framework wrote to Parquet that every verb reads; nothing in a file is executed."""
    from mismatchctl.convert import convert as run

    check_places(None, out, force=force)
    with progress_bar(quiet) as progress:
        sequences, tokens = run(source, out, framework, progress)
    if json:
        print_json({"out": str(out), "sequences": sequences, "tokens": tokens})
    else:
        say(f"wrote {out}: {sequences:,} sequences, {tokens:,} valid tokens", quiet)
