"""`mismatchctl compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out


@opt.flatten_options
def compare(
    *,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUNS...", help="Dumps or Results. Each run is compared with the first."),
    ],
    correction: opt.CorrectionOption = None,
    by: opt.ByOption = None,
    column: opt.ColumnOption = None,
    on_bad: opt.OnBadOption = "error",
    micro_batch_size: opt.MicroBatchOption = None,
    engine: opt.EngineOptions,
    outputs: opt.OutputOptions,
) -> None:
    """Compare runs with the first one.

    The exit code is 0 even if a run is worse. Use `gate` to fail CI.
    """
    outputs.check(inputs=paths)
    corrections = opt.select_corrections(correction, quiet=outputs.quiet)

    from mismatchctl.api.compare.compare import compare as run
    from mismatchctl.report.pages.compare import compare_screen, document

    with out.progress_bar(outputs.quiet) as progress:
        found = run(
            paths, corrections=corrections, rename=opt.parse_renames(column), by=by or [], on_bad=on_bad,
            micro_batch_size=micro_batch_size, engine=engine.build(), progress=progress,
        )  # fmt: skip
    shown = document(found) if outputs.verbose else None
    outputs.finish(found.to_json, lambda: document(found), lambda: compare_screen(found, shown), lambda: found.warnings)
