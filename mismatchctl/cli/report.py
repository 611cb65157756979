"""`mismatchctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out

if TYPE_CHECKING:
    from mismatchctl.report.document import Document
    from mismatchctl.report.figures.figure import Figure


OutputOption = Annotated[
    Path | None, opt.output_option("--output", "-o", help="Write all results as one Result (JSON).")
]


@opt.flatten_options
def report(
    *,
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULTS...", help="JSON files of analyze, sweep, compare, advise or gate."),
    ],
    output: OutputOption = None,
    html: opt.HtmlOption = None,
    markdown: opt.MarkdownOption = None,
    open_: opt.OpenOption = False,
    figures: opt.FigureOptions,
    force: opt.ForceOption = False,
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Show saved results again in the terminal, as HTML or as Markdown.

    The dumps are not needed. --html puts several results on one page, and -o merges them into one Result.
    """
    markdown, printed = out.resolve_text_output(markdown)
    out.check_output_paths(output, html, markdown, force=force, inputs=results)
    figures.check()
    page = out.page_opener(html, wanted=open_)
    from mismatchctl.report.pages.saved import combine_results, combined_document

    doc = combined_document(results)
    with out.write_together(quiet):
        if output is not None:
            out.write_files([(output, combine_results(results).to_json().encode())])
        out.write_files(out.render_page_files(lambda: doc, html, markdown))
        figures.write(lambda: _report_figures(results), force=force)
    page()
    if printed:
        out.print_markdown(doc)
    elif not quiet:
        out.print_page(doc if verbose else _build_screen(results, doc), whole=verbose)


def _build_screen(paths: list[Path], page: Document) -> Document:
    """Return the first screen of the Results, or the page of another command's result."""
    from mismatchctl.core.formatting import format_command
    from mismatchctl.report.pages.analyze import analyze_screen
    from mismatchctl.report.pages.saved import combine_results, read_saved
    from mismatchctl.results.model import Result

    if not any(isinstance(kept, Result) for _, kept in read_saved(paths)):
        return page
    following = format_command("report", [str(path) for path in paths], "--html report.html")
    return analyze_screen(combine_results(paths), [], asked=False, following=following)


def _report_figures(results: list[Path]) -> dict[str, Figure]:
    """Return the figures of a single Result, or the figures of the page for several results."""
    from mismatchctl.report.figures.files import figures_of_page, figures_of_result
    from mismatchctl.report.pages.saved import combined_document
    from mismatchctl.results.reader import is_result, read_result

    if len(results) == 1 and is_result(str(results[0])) and not (alone := read_result(results[0])).sections:
        return figures_of_result(alone)
    return figures_of_page(combined_document(results))
