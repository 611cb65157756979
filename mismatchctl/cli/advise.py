"""`mismatchctl advise`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from mismatchctl.cli import options as opt
from mismatchctl.cli import output as out

limit_option = partial(typer.Option, rich_help_panel="Limits")


@opt.flatten_options
def advise(
    *,
    inputs: opt.InputOptions,
    framework: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="NAME",
            help="Recommend a correction of this framework, in the framework's syntax: NAME or NAME@VERSION.",
        ),
    ] = "",
    correction: opt.CorrectionOption = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", help="Compare your framework's configuration with the recommendation (repeatable)."),
    ] = None,
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
        float,
        limit_option(
            min=0, max=1, help="Exclude corrections whose effective sample size is below this share (0 to 1)."
        ),
    ] = 0.0,
    no_rejection: Annotated[bool, limit_option("--no-rejection", help="Exclude corrections that reject data.")] = False,
    outputs: opt.OutputOptions,
) -> None:
    """Recommend a correction and its threshold, or name a bug to fix first."""
    outputs.check(inputs=inputs.files)
    sources, quiet = inputs.sources(outputs.quiet), outputs.quiet

    from mismatchctl.api.advise.advise import advise as run
    from mismatchctl.api.advise.candidates import Limits
    from mismatchctl.report.pages.advise import advise_screen, document

    most = opt.parse_share("--max-rejection", max_rejection, 1, "write a share, as in 5% or 0.05")
    chosen = opt.select_corrections(correction, quiet=quiet)
    yours = opt.select_corrections(None, config, framework=framework if config and framework else "", quiet=quiet)
    with out.progress_bar(quiet) as progress:
        found = run(
            sources, framework=framework, corrections=chosen, yours=yours, batch=batch,
            limits=Limits(most, min_ess, no_rejection), rename=inputs.rename, progress=progress,
        )  # fmt: skip
    outputs.finish(
        found.to_json,
        lambda: document(found),
        lambda: advise_screen(found, inputs.words, full=outputs.verbose),
    )
