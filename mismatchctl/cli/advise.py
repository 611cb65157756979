"""`mismatchctl advise`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out

YourConfig = Annotated[
    list[str] | None,
    typer.Option("--config", help="Compare your framework's configuration with the recommendation (repeatable)."),
]
limit_option = partial(typer.Option, rich_help_panel="Limits")


@opt.flatten_options
def advise(
    *,
    paths: opt.PathsArgument = None,
    pair: opt.PairOptions,
    framework: Annotated[
        str,
        typer.Option(
            "--for", metavar="NAME", help="Recommend for this framework, in its syntax: NAME or NAME@VERSION."
        ),
    ] = "",
    correction: opt.CorrectionOption = None,
    config: YourConfig = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Assume N sequences per update. [default: sequences per step of the dump]")
    ] = None,
    max_rejection: Annotated[
        str,
        limit_option(
            metavar="SHARE", help="Exclude corrections that reject more than this share of the tokens: 5% or 0.05."
        ),
    ] = "100%",
    min_ess: Annotated[
        float, limit_option(min=0, max=1, help="Exclude corrections with a lower effective sample size (0 to 1).")
    ] = 0.0,
    no_rejection: Annotated[bool, limit_option("--no-rejection", help="Exclude corrections that reject data.")] = False,
    column: opt.ColumnOption = None,
    json: opt.JsonOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the advice as JSON to FILE, or to stdout with -.")
    ] = None,
    html: opt.HtmlOption = None,
    force: opt.ForceOption = False,
    quiet: opt.QuietOption = False,
    verbose: opt.VerboseOption = False,
) -> None:
    """Recommend a correction and its threshold, or name a bug to fix first."""
    output, json = out.resolve_json_output(output, json)
    paths = paths or []
    out.check_output_paths(output, html, force=force, inputs=[*paths, *(pair.sides() or ())])
    sources = pair.sources(paths, quiet)

    from mismatchctl.api.advise.advise import advise as run
    from mismatchctl.api.advise.candidates import Limits

    most = opt.parse_share("--max-rejection", max_rejection, 1, "write a share, as in 5% or 0.05")
    limits = Limits(most, min_ess, no_rejection)
    chosen = opt.select_corrections(correction, quiet=quiet)
    yours = opt.select_corrections(None, config, framework=framework if config and framework else "", quiet=quiet)
    with out.progress_bar(quiet) as progress:
        found = run(
            sources,
            framework=framework,
            corrections=chosen,
            yours=yours,
            batch=batch,
            limits=limits,
            rename=opt.parse_renames(column),
            progress=progress,
        )
    from mismatchctl.report.pages.advise import advise_screen, document

    with out.write_together(quiet):
        if output is not None:
            out.write_files([(output, found.to_json().encode())])
        out.write_files(out.render_page_files(lambda: document(found), html))
    if json:
        out.print_json(found.to_data())
    elif not quiet:
        out.print_page(advise_screen(found, pair.words(paths), full=verbose), whole=verbose)
