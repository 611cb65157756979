"""`mismatchctl lint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.flags import Columns, Json, Quiet, renamed
from mismatchctl.cli.output import print_or_show
from mismatchctl.errors import EXIT_CHECK_FAILED


def lint(
    config: Annotated[
        Path, typer.Argument(help="What configures a framework: YAML, JSON, a script.", show_default=False)
    ],
    dumps: Annotated[
        list[str] | None,
        typer.Argument(help="Say what it rejects, and what its advice would change, on these.", show_default=False),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(help="Whose configuration it is, NAME or NAME@VERSION; default: as its keys tell."),
    ] = "",
    column: Columns = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What the framework will really do with a configuration: its traps (exit code 3 with any at level error)."""
    from dataclasses import asdict, replace

    from mismatchctl.lint import lint as run
    from mismatchctl.render.pages.checks import traps

    chosen, findings = run(config, dumps or (), framework, renamed(column))
    told = [asdict(replace(finding, instead=None)) for finding in findings]
    for finding in told:
        del finding["instead"]
    data = {"framework": chosen.title, "findings": told}
    print_or_show(data, lambda: traps(findings, f"{config}, read as {chosen.dated}"), as_json=json, quiet=quiet)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)
