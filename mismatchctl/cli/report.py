"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.figures import FigureFlags
from mismatchctl.cli.flags import Force, Html, Markdown, Open, Quiet, flat, output_option
from mismatchctl.cli.output import open_page, outputs, page_files, print_markdown, show, write
from mismatchctl.cli.places import check_places, or_printed

if TYPE_CHECKING:
    from mismatchctl.render.figures.figure import Figure


Output = Annotated[Path | None, output_option("--output", "-o", help="Write all of them as one Result (JSON).")]


@flat
def report(
    *,
    results: Annotated[
        list[Path],
        typer.Argument(help="What analyze, sweep, compare, advise or gate wrote as JSON.", show_default=False),
    ],
    output: Output = None,
    html: Html = None,
    markdown: Markdown = None,
    open_: Open = False,
    figures: FigureFlags,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Render results again, several on one page: the summary, a page, Markdown. The dumps are not needed.

    With -o, all of them as one Result: runs side by side, and what other verbs found as its sections.
    """
    markdown, printed = or_printed(markdown)
    check_places(output, html, markdown, force=force, inputs=results)
    figures.check()
    page = open_page(html, wanted=open_)
    from mismatchctl.render.pages.combined import document, gather

    made = document(results)
    with outputs(quiet):
        if output is not None:
            write([(output, gather(results).to_json().encode())])
        write(page_files(lambda: made, html, markdown))
        figures.write(lambda: _figures(results), force=force)
    page()
    if printed:
        print_markdown(made)
    elif not quiet:
        show(made)


def _figures(results: list[Path]) -> dict[str, Figure]:
    """The figures of one file, all of them; of several, those of their page."""
    from mismatchctl.render.figures.export import figures_of_page, figures_of_result
    from mismatchctl.render.pages.combined import document
    from mismatchctl.result import is_result, read_result

    if len(results) == 1 and is_result(str(results[0])) and not (alone := read_result(results[0])).sections:
        return figures_of_result(alone)
    return figures_of_page(document(results))
