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
        help="Dumps or Results, told apart by content; each run is held against the first. "
        "rollout=NAME,trainer=NAME=PATH names a pair of engines: two or more of them make a matrix. "
        "A NAME with a comma or an equals sign stands in quotes: 'rollout=\"vllm, fp8\",trainer=fsdp=dumps/a'.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, output_option("--json", help="Print the comparison as JSON, and nothing else.")]
OutputOption = Annotated[Path | None, output_option("--output", "-o", help="Write the comparison (JSON); - is stdout.")]
HtmlOption = Annotated[Path | None, output_option(help="Write the comparison as a page.")]


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
    quiet: QuietOption = False,
    json: JsonOption = False,
    output: OutputOption = None,
    html: HtmlOption = None,
    figures: FigureOptions,
    force: ForceOption = False,
) -> None:
    """Hold runs against the first one: what changed, whether that is noise, and what carries it.

    It describes, and exits with 0 whatever it finds. The shape of the JSON: docs/reference/comparison.schema.json.
    """
    output, json = resolve_json_output(output, json)
    inputs = [*paths, *(path.rpartition("=")[2] for path in paths)]
    check_output_paths(output, html, force=force, inputs=inputs)
    figures.check(inputs)
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
        print_page(page())


def _build_page(found: Comparison) -> Document:
    from mismatchctl.report.pages.compare import document

    return document(found)
