"""`mismatchctl diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.flags import (
    Address,
    Cache,
    Columns,
    EngineChoice,
    EngineName,
    Force,
    Html,
    Json,
    MemoryLimit,
    Quiet,
    Threads,
    chosen_engine,
    renamed,
)
from mismatchctl.cli.output import (
    check_places,
    console,
    or_stdout,
    outputs,
    print_json,
    progress_bar,
    say,
    signed,
    write,
)
from mismatchctl.numbers import counted


def diagnose(
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
    column: Columns = None,
    threads: Threads = None,
    memory_limit: MemoryLimit = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    cache: Cache = None,
    json: Json = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write findings (JSON); - is stdout.")] = None,
    html: Html = None,
    force: Force = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All of each finding, with its evidence.")] = False,
    quiet: Quiet = False,
) -> None:
    """What causes the mismatch: findings with their evidence, strongest first, and what to do.

    The shape of the JSON: docs/diagnosis.schema.json.
    """
    output, json = or_stdout(output, json)
    check_places(output, html, force=force, inputs=paths)

    from mismatchctl.diagnose import diagnose as run
    from mismatchctl.diagnose.saved import as_json
    from mismatchctl.frameworks.layers import read_layers

    reports = [report for path in layers or [] for report in read_layers(path)]
    where = chosen_engine(threads, memory_limit, engine, address, cache)
    with progress_bar(quiet) as progress:
        found = run(paths, rename=renamed(column), by=by or [], progress=progress, engine=where)
    for warning in found.warnings:
        say(f"warning: {warning}", quiet)
    for (file, reason), count in found.problems.counts.items():
        say(f"warning: left out of {file}: {counted(count, 'sequence')}, {reason}", quiet)
    from mismatchctl.render.pages.diagnose import document

    files: list[tuple[Path, bytes]] = []
    if output is not None:
        import json as format_

        text = format_.dumps(signed(as_json(found, reports)), indent=2, ensure_ascii=False, allow_nan=False)
        files.append((output, f"{text}\n".encode()))
    if html is not None:
        from mismatchctl.render.to import html as page

        files.append((html, page.html(document(found, reports)).encode()))
    with outputs(quiet):
        write(files)
    if json:
        print_json(signed(as_json(found, reports)))
    elif not quiet:
        from mismatchctl.render.to.terminal import show

        show(document(found, reports, told=verbose), console(), whole=verbose)
