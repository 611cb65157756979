"""`mismatchctl diagnose`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out
from mismatchctl.core.formatting import format_count


@opt.flatten_options
def diagnose(
    *,
    inputs: opt.InputOptions,
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
    engine: opt.EngineOptions,
    outputs: opt.OutputOptions,
) -> None:
    """Find the causes of the mismatch, with evidence and what to do.

    docs/reference/diagnosis.schema.json describes the JSON output.
    """
    outputs.check(inputs=inputs.files)
    sources = inputs.sources(outputs.quiet)

    from mismatchctl.api.diagnose import diagnose as run
    from mismatchctl.diagnosis.layer_reports.reader import read_layers
    from mismatchctl.report.pages.diagnose import diagnose_screen, document
    from mismatchctl.results.views import json_text

    reports = [report for path in layers or [] for report in read_layers(path)]
    with out.progress_bar(outputs.quiet) as progress:
        found = run(sources, rename=inputs.rename, by=by or [], progress=progress, engine=engine.build())
    left_out = found.problems.counts.items()
    notes = [f"left out of {file}: {format_count(count, 'sequence')}, {reason}" for (file, reason), count in left_out]
    warnings, whole = [*found.warnings, *notes], outputs.verbose
    shown = document(found, reports, full=whole) if whole or reports else None
    outputs.finish(
        lambda: json_text(found.to_data(reports)),
        lambda: document(found, reports),
        lambda: diagnose_screen(found, inputs.words, shown, warnings),
        lambda: warnings,
    )
