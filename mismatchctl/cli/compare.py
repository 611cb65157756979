"""`mismatchctl compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out

if TYPE_CHECKING:
    from mismatchctl.api.compare.comparison import Comparison
    from mismatchctl.report.document import Document

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUNS...",
        help="Dumps or Results. Each run is compared with the first.",
    ),
]
JsonOption = Annotated[bool, opt.output_option("--json", help="Print the comparison as JSON only.")]
OutputOption = Annotated[
    Path | None, opt.output_option("--output", "-o", help="Write the comparison as JSON to FILE, or to stdout with -.")
]
HtmlOption = Annotated[Path | None, opt.output_option(help="Write an HTML page.")]


@opt.flatten_options
def compare(
    *,
    paths: PathsArgument,
    correction: opt.CorrectionOption = None,
    by: opt.ByOption = None,
    column: opt.ColumnOption = None,
    on_bad: opt.OnBadOption = "error",
    micro_batch_size: opt.MicroBatchOption = None,
    engine: opt.EngineOptions,
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    figures: opt.FigureOptions,
    force: opt.ForceOption = False,
) -> None:
    """Compare runs with the first one.

    The exit code is 0 even if a run is worse. Use `gate` to fail CI.
    """
    output, json = out.resolve_json_output(output, json)
    out.check_output_paths(output, html, force=force, inputs=paths)
    figures.check(paths)
    corrections = opt.select_corrections(correction, quiet=quiet)

    from mismatchctl.api.compare.compare import compare as run

    where = engine.build()
    with out.progress_bar(quiet) as progress:
        found = run(
            paths,
            corrections=corrections,
            rename=opt.parse_renames(column),
            by=by or [],
            on_bad=on_bad,
            micro_batch_size=micro_batch_size,
            engine=where,
            progress=progress,
        )
    page = partial(_build_page, found)
    with out.write_together(quiet):
        figures.write_page(page, html, force=force)
        if output is not None:
            out.write_files([(output, found.to_json().encode())])
    if json:
        out.print_warnings(found.warnings, quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.report.pages.compare import compare_screen

        out.print_page(compare_screen(found, page() if verbose else None), whole=verbose)


def _build_page(found: Comparison) -> Document:
    from mismatchctl.report.pages.compare import document

    return document(found)
