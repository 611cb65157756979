"""`mismatchctl compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.options import (
    ByOption,
    ColumnOption,
    CorrectionOption,
    EngineOptions,
    FigureOptions,
    ForceOption,
    MicroBatchOption,
    OnBadOption,
    QuietOption,
    VerboseOption,
    flatten_options,
    output_option,
    parse_renames,
    select_corrections,
)
from mismatchctl.cli.output import (
    check_output_paths,
    print_page,
    print_warnings,
    progress_bar,
    resolve_json_output,
    write_files,
    write_together,
)

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
JsonOption = Annotated[bool, output_option("--json", help="Print the comparison as JSON only.")]
OutputOption = Annotated[
    Path | None, output_option("--output", "-o", help="Write the comparison as JSON to FILE, or to stdout with -.")
]
HtmlOption = Annotated[Path | None, output_option(help="Write an HTML page.")]


@flatten_options
def compare(
    *,
    paths: PathsArgument,
    correction: CorrectionOption = None,
    by: ByOption = None,
    column: ColumnOption = None,
    on_bad: OnBadOption = "error",
    micro_batch_size: MicroBatchOption = None,
    engine: EngineOptions,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    figures: FigureOptions,
    force: ForceOption = False,
) -> None:
    """Compare runs with the first one.

    The exit code is 0 even if a run is worse. Use `gate` to fail CI.
    """
    output, json = resolve_json_output(output, json)
    check_output_paths(output, html, force=force, inputs=paths)
    figures.check(paths)
    corrections = select_corrections(correction, quiet=quiet)

    from mismatchctl.api.compare.compare import compare as run

    where = engine.build()
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            corrections=corrections,
            rename=parse_renames(column),
            by=by or [],
            on_bad=on_bad,
            micro_batch_size=micro_batch_size,
            engine=where,
            progress=progress,
        )
    page = partial(_build_page, found)
    with write_together(quiet):
        figures.write_page(page, html, force=force)
        if output is not None:
            write_files([(output, found.to_json().encode())])
    if json:
        print_warnings(found.warnings, quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.report.pages.compare import compare_screen

        print_page(compare_screen(found, page() if verbose else None), whole=verbose)


def _build_page(found: Comparison) -> Document:
    from mismatchctl.report.pages.compare import document

    return document(found)
