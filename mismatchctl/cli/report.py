"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.figures import FigureFolder, FigureFormat, Picture, check_folder, write_figures
from mismatchctl.cli.flags import OUTPUTS, Force, Html, Markdown, Open, Quiet
from mismatchctl.cli.output import check_places, console, open_page, outputs, write

if TYPE_CHECKING:
    from mismatchctl.render.figures.figure import Figure


Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write all of them as one Result (JSON).", rich_help_panel=OUTPUTS)
]


def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What analyze, sweep, compare, advise or gate wrote as JSON.", show_default=False),
    ],
    output: Output = None,
    html: Html = None,
    markdown: Markdown = None,
    open_: Open = False,
    figures: FigureFolder = None,
    figure_format: FigureFormat = Picture.svg,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Render results again, several on one page: the summary, a page, Markdown. The dumps are not needed.

    With -o, all of them as one Result: runs side by side, and what other verbs found as its sections.
    """
    to_stdout = str(markdown) == "-"
    check_places(output, html, None if to_stdout else markdown, force=force, inputs=results)
    check_folder(figures)
    page = open_page(html, wanted=open_)
    from mismatchctl.render.pages.combined import document, gather
    from mismatchctl.render.to.markdown import markdown as as_markdown

    made = document(results)
    files: list[tuple[Path, bytes]] = [] if output is None else [(output, gather(results).to_json().encode())]
    if html is not None:
        from mismatchctl.render.to import html as to

        files.append((html, to.html(made).encode()))
    if markdown is not None and not to_stdout:
        files.append((markdown, as_markdown(made).encode()))
    with outputs(quiet):
        write(files)
        if figures is not None:
            write_figures(_figures(results), figures, figure_format, force=force)
    page()
    if to_stdout:
        typer.echo(as_markdown(made), nl=False)
    elif not quiet:
        from mismatchctl.render.to.terminal import show

        show(made, console())


def _figures(results: list[Path]) -> dict[str, Figure]:
    """The figures of one file, all of them; of several, those of their page."""
    from mismatchctl.render.figures.export import figures_of_page, figures_of_result
    from mismatchctl.render.pages.combined import document
    from mismatchctl.result import is_result, read_result

    if len(results) == 1 and is_result(str(results[0])) and not (alone := read_result(results[0])).sections:
        return figures_of_result(alone)
    return figures_of_page(document(results))
