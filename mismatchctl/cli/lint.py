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
        Path,
        typer.Argument(
            metavar="CONFIG", help="The framework's configuration (YAML, TOML, JSON or Python) or a launch script."
        ),
    ],
    dumps: Annotated[
        list[str] | None,
        typer.Argument(metavar="DUMPS...", help="Measure how much the configured correction rejects in these dumps."),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(
            help="Read the file as a configuration of this framework: NAME or NAME@VERSION. [default: detected]",
            show_default=False,
        ),
    ] = "",
    column: ColumnOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all findings and notes.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a framework's configuration (exit 3 on errors)."""
    from dataclasses import asdict, replace

    from mismatchctl.api.lint import lint as run
    from mismatchctl.core.formatting import format_command
    from mismatchctl.report.pages.checks import lint_document

    chosen, findings = run(config, dumps or (), framework, parse_renames(column))
    entries = [asdict(replace(finding, instead=None)) for finding in findings]
    for entry in entries:
        del entry["instead"]
    data = {"framework": chosen.title, "findings": entries}
    print_json_or_page(
        data,
        lambda: lint_document(
            findings,
            f"{config} as {chosen.dated}",
            notes=verbose,
            following=format_command("analyze", dumps or ["DUMPS"], f"--config {config}"),
        ),
        as_json=json,
        quiet=quiet,
    )
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)
