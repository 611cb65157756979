"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.flags import Force, Html, Markdown, Open, Quiet
from mismatchctl.cli.output import check_places, console, open_page, outputs, write


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What analyze, sweep, compare, advise or gate wrote as JSON.", show_default=False),
    ],
    html: Html = None,
    markdown: Markdown = None,
    open_: Open = False,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Render results again, several on one page: the summary, a page, Markdown. The dumps are not needed."""
    to_stdout = str(markdown) == "-"
    check_places(html, None if to_stdout else markdown, force=force, inputs=results)
    page = open_page(html, wanted=open_)
    from mismatchctl.render.pages.combined import document
    from mismatchctl.render.to.markdown import markdown as as_markdown

    brief = document(results, whole=False)
    files: list[tuple[Path, bytes]] = []
    if html is not None:
        from mismatchctl.render.to import html as to

        files.append((html, to.html(document(results)).encode()))
    if markdown is not None and not to_stdout:
        files.append((markdown, as_markdown(brief).encode()))
    with outputs(quiet):
        write(files)
    page()
    if to_stdout:
        typer.echo(as_markdown(brief), nl=False)
    elif not quiet:
        from mismatchctl.render.to.terminal import show

        show(brief, console())
