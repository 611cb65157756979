"""`mismatchctl compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli import flags
from mismatchctl.cli.corrections import chosen_corrections
from mismatchctl.cli.figures import FigureFlags
from mismatchctl.cli.flags import flat, output_option
from mismatchctl.cli.output import outputs, page_of, progress_bar, show, warn, write
from mismatchctl.cli.places import check_places, or_stdout

Paths = Annotated[
    list[str],
    typer.Argument(
        help="Dumps or Results, told apart by content; each run is held against the first. "
        "rollout=NAME,trainer=NAME=PATH names a pair of engines: two or more of them make a matrix. "
        "A NAME with a comma or an equals sign stands in quotes: 'rollout=\"vllm, fp8\",trainer=fsdp=dumps/a'.",
        show_default=False,
    ),
]
ToJson = Annotated[bool, output_option("--json", help="Print the comparison as JSON, and nothing else.")]
Output = Annotated[Path | None, output_option("--output", "-o", help="Write the comparison (JSON); - is stdout.")]
Html = Annotated[Path | None, output_option(help="Write the comparison as a page.")]


@flat
def compare(
    *,
    paths: Paths,
    correction: flags.Corrections = None,
    by: flags.By = None,
    column: flags.Columns = None,
    on_bad: flags.OnBadRows = "error",
    micro_batch_size: flags.MicroBatch = None,
    engine: flags.EngineFlags,
    quiet: flags.Quiet = False,
    json: ToJson = False,
    output: Output = None,
    html: Html = None,
    figures: FigureFlags,
    force: flags.Force = False,
) -> None:
    """Hold runs against the first one: what changed, whether that is noise, and what carries it.

    It describes, and exits with 0 whatever it finds. The shape of the JSON: docs/comparison.schema.json.
    """
    output, json = or_stdout(output, json)
    inputs = [*paths, *(path.rpartition("=")[2] for path in paths)]
    check_places(output, html, force=force, inputs=inputs)
    figures.check(inputs)
    corrections = chosen_corrections(correction, quiet=quiet)

    from mismatchctl.compare import compare as run

    where = engine.chosen()
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            corrections=corrections,
            rename=flags.renamed(column),
            by=by or [],
            on_bad=on_bad,
            micro_batch_size=micro_batch_size,
            engine=where,
            progress=progress,
        )
    page = partial(page_of, "compare", found)
    with outputs(quiet):
        figures.write_page(page, html, force=force)
        if output is not None:
            write([(output, found.to_json().encode())])
    if json:
        warn(found.warnings, quiet)
        typer.echo(found.to_json(), nl=False)
    elif not quiet:
        show(page())
