"""`mismatchctl diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli import flags
from mismatchctl.cli.flags import flat
from mismatchctl.cli.output import json_text, outputs, page_files, print_json, progress_bar, show, signed, warn, write
from mismatchctl.cli.places import check_places, or_stdout
from mismatchctl.numbers import counted


@flat
def diagnose(
    *,
    paths: Annotated[
        list[str], typer.Argument(help="Dumps: files, folders, globs. Each is a run.", show_default=False)
    ],
    by: Annotated[
        list[str] | None,
        typer.Option("--by", help="A column that may tell a deviating worker, rank or data source; repeat."),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(help="A report of a layer-wise comparator, or a folder; repeat."),
    ] = None,
    column: flags.Columns = None,
    engine: flags.EngineFlags,
    json: flags.Json = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write findings (JSON); - is stdout.")] = None,
    html: flags.Html = None,
    force: flags.Force = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All of each finding, with its evidence.")] = False,
    quiet: flags.Quiet = False,
) -> None:
    """What causes the mismatch: findings with their evidence, strongest first, and what to do.

    The shape of the JSON: docs/diagnosis.schema.json.
    """
    output, json = or_stdout(output, json)
    check_places(output, html, force=force, inputs=paths)

    from mismatchctl.analyze.diagnose import diagnose as run
    from mismatchctl.diagnose.saved import as_json
    from mismatchctl.frameworks.layers import read_layers

    reports = [report for path in layers or [] for report in read_layers(path)]
    where = engine.chosen()
    with progress_bar(quiet) as progress:
        found = run(paths, rename=flags.renamed(column), by=by or [], progress=progress, engine=where)
    left_out = found.problems.counts.items()
    warn(found.warnings, quiet)
    warn((f"left out of {file}: {counted(count, 'sequence')}, {reason}" for (file, reason), count in left_out), quiet)
    from mismatchctl.render.pages.diagnose import document

    with outputs(quiet):
        if output is not None:
            write([(output, json_text(signed(as_json(found, reports))).encode())])
        write(page_files(lambda: document(found, reports), html))
    if json:
        print_json(signed(as_json(found, reports)))
    elif not quiet:
        show(document(found, reports, told=verbose), whole=verbose)
