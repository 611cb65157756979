"""`mismatchctl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.corrections import RuleFlags, chosen_corrections
from mismatchctl.cli.figures import FigureFolder, FigureFormat, Picture, check_folder, write_page
from mismatchctl.cli.flags import (
    OUTPUTS,
    Address,
    By,
    Cache,
    Columns,
    Corrections,
    EngineChoice,
    EngineName,
    Force,
    MemoryLimit,
    MicroBatch,
    OnBad,
    OnBadRows,
    Quiet,
    Threads,
    chosen_engine,
    renamed,
)
from mismatchctl.cli.output import check_places, console, or_stdout, outputs, progress_bar, say, write

Paths = Annotated[
    list[str],
    typer.Argument(
        help="Dumps or Results, told apart by content; each run is held against the first. "
        "rollout=NAME,trainer=NAME=PATH names a pair of engines: two or more of them make a matrix. "
        "A NAME with a comma or an equals sign stands in quotes: 'rollout=\"vllm, fp8\",trainer=fsdp=dumps/a'.",
        show_default=False,
    ),
]
ToJson = Annotated[
    bool, typer.Option("--json", help="Print the comparison as JSON, and nothing else.", rich_help_panel=OUTPUTS)
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the comparison (JSON); - is stdout.", rich_help_panel=OUTPUTS),
]
Html = Annotated[Path | None, typer.Option(help="Write the comparison as a page.", rich_help_panel=OUTPUTS)]


def compare(
    paths: Paths,
    correction: Corrections = None,
    by: By = None,
    column: Columns = None,
    on_bad: OnBadRows = OnBad.error,
    micro_batch_size: MicroBatch = None,
    threads: Threads = None,
    memory_limit: MemoryLimit = None,
    engine: EngineChoice = EngineName.local,
    address: Address = None,
    cache: Cache = None,
    quiet: Quiet = False,
    json: ToJson = False,
    output: Output = None,
    html: Html = None,
    figures: FigureFolder = None,
    figure_format: FigureFormat = Picture.svg,
    force: Force = False,
) -> None:
    """Hold runs against the first one: what changed, whether that is noise, and what carries it.

    It describes, and exits with 0 whatever it finds. The shape of the JSON: docs/comparison.schema.json.
    """
    output, json = or_stdout(output, json)
    inputs = [*paths, *(path.rpartition("=")[2] for path in paths)]
    check_places(output, html, force=force, inputs=inputs)
    check_folder(figures, inputs)

    corrections = chosen_corrections(correction, RuleFlags(), quiet=quiet) if correction else []

    from mismatchctl.compare import compare as run

    where = chosen_engine(threads, memory_limit, engine, address, cache)
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            corrections=corrections,
            rename=renamed(column),
            by=by or [],
            on_bad=on_bad.value,
            micro_batch_size=micro_batch_size,
            engine=where,
            progress=progress,
        )
    with outputs(quiet):
        if html is not None or figures is not None:
            from mismatchctl.render.pages.compare import document

            write_page(document(found), html, figures, figure_format, force=force)
        if output is not None:
            write([(output, found.to_json().encode())])
    if json:
        for warning in found.warnings:
            say(f"warning: {warning}", quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        from mismatchctl.render.pages.compare import document
        from mismatchctl.render.to.terminal import show

        show(document(found), console())
