"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli import options as opt

if TYPE_CHECKING:
    from mismatchctl.report.document import Document
    from mismatchctl.report.figures.figure import Figure


@opt.flatten_options
def report(
    *,
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="JSON files of analyze, sweep, compare, advise or gate."),
    ],
    outputs: opt.OutputOptions,
) -> None:
    """Show saved results again in the terminal, as HTML or as Markdown.

    The dumps are not needed. --html puts several results on one page, and -o merges several Results into one.
    """
    outputs.check(inputs=results)
    from mismatchctl.report.pages.saved import combine_results, combined_document

    doc = combined_document(results)
    outputs.finish(
        lambda: combine_results(results).to_json(),
        lambda: doc,
        lambda: doc if outputs.verbose else _build_screen(results, doc),
        figures=lambda: _report_figures(results, doc),
    )


def _build_screen(paths: list[Path], page: Document) -> Document:
    """Return the first screen for the Results, or the page of the other results."""
    from mismatchctl.core.formatting import format_command
    from mismatchctl.report.pages.analyze import analyze_screen
    from mismatchctl.report.pages.saved import combine_results, read_saved
    from mismatchctl.results.model import Result

    if not any(isinstance(kept, Result) for _, kept in read_saved(paths)):
        return page
    following = format_command("report", [str(path) for path in paths], "--html report.html")
    return analyze_screen(combine_results(paths), [], asked=False, following=following)


def _report_figures(results: list[Path], page: Document) -> dict[str, Figure]:
    """Return the figures of a single Result, or of the page for several results."""
    from mismatchctl.report.figures.files import figures_of_page, figures_of_result
    from mismatchctl.results.reader import is_result, read_result

    if len(results) == 1 and is_result(str(results[0])) and not (alone := read_result(results[0])).sections:
        return figures_of_result(alone)
    return figures_of_page(page)
