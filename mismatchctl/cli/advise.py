"""`mismatchctl advise`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mismatchctl.cli.corrections import chosen_corrections
from mismatchctl.cli.flags import Columns, Corrections, Force, Html, Json, Paths, Quiet, renamed, share
from mismatchctl.cli.output import json_text, outputs, page_files, print_or_show, progress_bar, signed, write
from mismatchctl.cli.places import check_places, or_stdout

if TYPE_CHECKING:
    from mismatchctl.advise import Advice

Yours = Annotated[
    list[str] | None,
    typer.Option("--config", help="Your configuration, in a framework's own keys, held against the ranking; repeat."),
]
limit_option = partial(typer.Option, rich_help_panel="What is out of the question")


def advise(
    paths: Paths,
    framework: Annotated[
        str, typer.Option("--for", help="Whose corrections, and whose syntax: NAME or NAME@VERSION.")
    ] = "",
    correction: Corrections = None,
    config: Yours = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of one update; else those of the dump per step.")
    ] = None,
    max_rejection: Annotated[str, limit_option(help="Reject at most this share of the tokens: 5% or 0.05.")] = "100%",
    min_ess: Annotated[float, limit_option(min=0, max=1, help="Keep at least this ESS, as a share.")] = 0.0,
    no_rejection: Annotated[bool, limit_option("--no-rejection", help="No gates.")] = False,
    fixed: Annotated[
        list[str] | None, limit_option(help="PATH=VALUE: a field that must be so, as in weight.level=token; repeat.")
    ] = None,
    column: Columns = None,
    json: Json = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the advice (JSON); - is stdout.")] = None,
    html: Html = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Which correction, at which threshold, or what to fix first; and how sure that is."""
    output, json = or_stdout(output, json)
    check_places(output, html, force=force, inputs=paths)

    from mismatchctl.advise import Limits, parse_fixed
    from mismatchctl.advise import advise as run

    most = share("--max-rejection", max_rejection, 1, "write a share, as in 5% or 0.05")
    limits = Limits(most, min_ess, no_rejection, parse_fixed(fixed or []))
    chosen, yours = chosen_corrections(correction, quiet=quiet), chosen_corrections(None, config, quiet=quiet)
    with progress_bar(quiet) as progress:
        found = run(
            paths,
            framework=framework,
            corrections=chosen,
            yours=yours,
            batch=batch,
            limits=limits,
            rename=renamed(column),
            progress=progress,
        )
    from mismatchctl.render.pages.advise import document

    with outputs(quiet):
        if output is not None:
            write([(output, json_text(_as_json(found)).encode())])
        write(page_files(lambda: document(found), html))
    print_or_show(_as_json(found), lambda: document(found), as_json=json, quiet=quiet)


def _as_json(found: dict[str, Advice]) -> dict[str, Any]:
    """The advice of one run as it is; of several by name."""
    data = {run: advice.model_dump(mode="json") for run, advice in found.items()}
    said = next(iter(data.values())) if len(data) == 1 else {"runs": data}
    return signed(said)
