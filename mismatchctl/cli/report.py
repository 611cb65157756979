"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.flags import Quiet
from mismatchctl.cli.output import check_places, console, outputs, write


def report(
    result: Annotated[Path, typer.Argument(help="A Result, as written by `analyze -o`.", show_default=False)],
    html: Annotated[Path | None, typer.Option(help="Write the report.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the report.")] = False,
    quiet: Quiet = False,
) -> None:
    """Render a Result again: the summary, and the report with --html. The dump is not needed."""
    check_places(html, force=force, inputs=[result])
    from mismatchctl.result import read_result

    found = read_result(result)
    if html is not None:
        from mismatchctl.render.report import render_report

        with outputs(quiet):
            write([(html, render_report(found).encode())])
    if not quiet:
        from mismatchctl.render.terminal import render_summary

        render_summary(found, console())
