"""`mismatchctl diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.options import (
    ColumnOption,
    EngineOptions,
    ForceOption,
    HtmlOption,
    JsonOption,
    PairOptions,
    QuietOption,
    VerboseOption,
    flatten_options,
    parse_renames,
)
from mismatchctl.cli.output import (
    check_output_paths,
    print_json,
    print_page,
    print_warnings,
    progress_bar,
    render_page_files,
    resolve_json_output,
    write_files,
    write_together,
)
from mismatchctl.core.formatting import format_count


@flatten_options
def diagnose(
    *,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="DUMPS...", help="Files, folders or globs. Each is a run.")
    ] = None,
    pair: PairOptions,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", help="Look for a deviating worker, rank or data source in this column; repeat."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="Read a report of a layer-wise comparator, or a folder of reports; repeat."),
    ] = None,
    column: ColumnOption = None,
    engine: EngineOptions,
    json: JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the findings as JSON to FILE, or to stdout with -.")
    ] = None,
    html: HtmlOption = None,
    force: ForceOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the causes of the mismatch, with evidence and what to do.

    docs/reference/diagnosis.schema.json describes the JSON.
    """
    output, json = resolve_json_output(output, json)
    paths = paths or []
    check_output_paths(output, html, force=force, inputs=[*paths, *(pair.sides() or ())])
    sources = pair.sources(paths, quiet)

    from mismatchctl.api.diagnose import diagnose as run
    from mismatchctl.diagnosis.layer_reports.reader import read_layers
    from mismatchctl.results.views import json_text

    reports = [report for path in layers or [] for report in read_layers(path)]
    where = engine.build()
    with progress_bar(quiet) as progress:
        found = run(sources, rename=parse_renames(column), by=by or [], progress=progress, engine=where)
    left_out = found.problems.counts.items()
    notes = [f"left out of {file}: {format_count(count, 'sequence')}, {reason}" for (file, reason), count in left_out]
    if json:
        print_warnings([*found.warnings, *notes], quiet)
    from mismatchctl.report.pages.diagnose import document

    with write_together(quiet):
        if output is not None:
            write_files([(output, json_text(found.to_data(reports)).encode())])
        write_files(render_page_files(lambda: document(found, reports), html))
    if json:
        print_json(found.to_data(reports))
    elif not quiet:
        from mismatchctl.report.pages.diagnose import diagnose_screen

        page = document(found, reports, full=verbose) if verbose or reports else None
        page_words = pair.words(paths)
        print_page(diagnose_screen(found, page_words, page, [*found.warnings, *notes]), whole=verbose)
