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
    from mismatchctl.render.pages.analyze import document
    from mismatchctl.result import read_result

    found = read_result(result)
    if html is not None:
        from mismatchctl.render.to import html as page

        with outputs(quiet):
            write([(html, page.html(document(found)).encode())])
    if not quiet:
        from mismatchctl.render.to.terminal import show

        show(document(found, whole=False), console())
