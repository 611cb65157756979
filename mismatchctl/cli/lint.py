"""`mismatchctl lint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.cli.options import ColumnOption, JsonOption, QuietOption, parse_renames
from mismatchctl.cli.output import print_json_or_page
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
    column: ColumnOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """What the framework will really do with a configuration: its traps (exit code 3 with any at level error)."""
    from dataclasses import asdict, replace

    from mismatchctl.api.lint import lint as run
    from mismatchctl.report.pages.checks import lint_document

    chosen, findings = run(config, dumps or (), framework, parse_renames(column))
    told = [asdict(replace(finding, instead=None)) for finding in findings]
    for finding in told:
        del finding["instead"]
    data = {"framework": chosen.title, "findings": told}
    print_json_or_page(
        data, lambda: lint_document(findings, f"{config}, read as {chosen.dated}"), as_json=json, quiet=quiet
    )
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)
