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
        Path, typer.Argument(help="A configuration: YAML, TOML, JSON, a launch script, Python.", show_default=False)
    ],
    dumps: Annotated[
        list[str] | None,
        typer.Argument(help="Say what it rejects, and what its advice would change, on these.", show_default=False),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(help="Its framework, NAME or NAME@VERSION. [default: found from the file]", show_default=False),
    ] = "",
    column: ColumnOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print notes too.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a framework's configuration (exit 3 if the framework refuses it or computes something else)."""
    from dataclasses import asdict, replace

    from mismatchctl.api.lint import lint as run
    from mismatchctl.report.pages.checks import lint_document

    chosen, findings = run(config, dumps or (), framework, parse_renames(column))
    entries = [asdict(replace(finding, instead=None)) for finding in findings]
    for entry in entries:
        del entry["instead"]
    data = {"framework": chosen.title, "findings": entries}
    print_json_or_page(
        data,
        lambda: lint_document(findings, f"{config}, read as {chosen.dated}", notes=verbose),
        as_json=json,
        quiet=quiet,
    )
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_CHECK_FAILED)
