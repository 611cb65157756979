"""`mismatchctl schema`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.analyze import _renamed
from mismatchctl.cli.output import console
from mismatchctl.errors import EXIT_CANNOT_JUDGE


def schema(
    check: Annotated[list[str] | None, typer.Option("--check", help="Explain the files of this path; repeat.")] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", help="CANONICAL=NAME: what the files call a column of the contract; repeat."),
    ] = None,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of a Result.")] = False,
) -> None:
    """The dump contract; with --check, what files hold, what is missing, what is wrong."""
    if json_schema:
        import json

        from mismatchctl.result import result_schema

        typer.echo(json.dumps(result_schema(), indent=2))
        return
    from mismatchctl.frameworks import column_aliases
    from mismatchctl.render.reference import render_checks, render_contract

    if not check:
        render_contract(column_aliases(), console())
        return
    from mismatchctl.dumps.check import check as check_files

    found = check_files(check, rename=_renamed(column or []), aliases=column_aliases())
    if not render_checks(found, console()):
        raise typer.Exit(EXIT_CANNOT_JUDGE)
