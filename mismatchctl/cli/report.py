"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.output import check_places, console, wrote


def report(
    result: Annotated[Path, typer.Argument(help="A Result, as written by `analyze -o`.")],
    html: Annotated[Path | None, typer.Option(help="Write the report.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the report.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Errors only on stderr; no summary.")] = False,
) -> None:
    """Render a Result again: the summary, and the report with --html. The dump is not needed."""
    check_places(html, force=force)
    from mismatchctl.result import read_result

    found = read_result(result)
    if html is not None:
        from mismatchctl.files import write_atomically
        from mismatchctl.render.report import render_report

        write_atomically(html, render_report(found).encode())
        wrote(html, quiet)
    if not quiet:
        from mismatchctl.render.terminal import render_summary

        render_summary(found, console())
