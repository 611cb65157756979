"""`mismatchctl diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.core.formatting import format_count


@opt.flatten_options
def diagnose(
    *,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="DUMPS...", help="Files, folders or globs of any supported format. Each is a run."),
    ] = None,
    pair: opt.PairOptions,
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by", help="Test whether one value of this column (a worker, rank or data source) deviates (repeatable)."
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Read a report that compares the layers of engine and trainer, or a folder of reports (repeatable)."
        ),
    ] = None,
    column: opt.ColumnOption = None,
    engine: opt.EngineOptions,
    json: opt.JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the findings as JSON to FILE, or to stdout with -.")
    ] = None,
    html: opt.HtmlOption = None,
    force: opt.ForceOption = False,
    verbose: opt.VerboseOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Find the causes of the mismatch, with evidence and what to do.

    docs/reference/diagnosis.schema.json describes the JSON output.
    """
    output, json = out.resolve_json_output(output, json)
    paths = paths or []
    out.check_output_paths(output, html, force=force, inputs=[*paths, *(pair.sides() or ())])
    sources = pair.sources(paths, quiet)

    from mismatchctl.api.diagnose import diagnose as run
    from mismatchctl.diagnosis.layer_reports.reader import read_layers
    from mismatchctl.results.views import json_text

    reports = [report for path in layers or [] for report in read_layers(path)]
    where = engine.build()
    with out.progress_bar(quiet) as progress:
        found = run(sources, rename=opt.parse_renames(column), by=by or [], progress=progress, engine=where)
    left_out = found.problems.counts.items()
    notes = [f"left out of {file}: {format_count(count, 'sequence')}, {reason}" for (file, reason), count in left_out]
    if json:
        out.print_warnings([*found.warnings, *notes], quiet)
    from mismatchctl.report.pages.diagnose import document

    with out.write_together(quiet):
        if output is not None:
            out.write_files([(output, json_text(found.to_data(reports)).encode())])
        out.write_files(out.render_page_files(lambda: document(found, reports), html))
    if json:
        out.print_json(found.to_data(reports))
    elif not quiet:
        from mismatchctl.report.pages.diagnose import diagnose_screen

        page = document(found, reports, full=verbose) if verbose or reports else None
        page_words = pair.words(paths)
        out.print_page(diagnose_screen(found, page_words, page, [*found.warnings, *notes]), whole=verbose)
