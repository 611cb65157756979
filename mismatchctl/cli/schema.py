"""`mismatchctl schema`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mismatchctl.cli.flags import Columns, Json, Quiet, renamed
from mismatchctl.cli.output import print_json, print_or_show
from mismatchctl.errors import EXIT_CANNOT_JUDGE, ConfigError


def schema(
    paths: Annotated[
        list[str] | None, typer.Argument(help="With --check: files, folders, globs.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Explain the files of PATHS.")] = False,
    column: Columns = None,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of a Result.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The dump contract; with --check PATHS, what files hold, what is missing, what is wrong (exit code 4)."""
    if check or paths:
        if not paths:
            raise ConfigError("--check needs something to check: files, folders, globs")
        _check(paths, renamed(column), json, quiet)
    elif json_schema:
        from mismatchctl.result import result_schema

        print_json(result_schema())
    else:
        _contract(json)


def _contract(json: bool) -> None:
    from mismatchctl.contract import contract_data
    from mismatchctl.frameworks import column_aliases
    from mismatchctl.render.pages import reference

    print_or_show(contract_data(column_aliases()), lambda: reference.contract(column_aliases()), as_json=json)


def _check(paths: Sequence[str], rename: dict[str, str], json: bool, quiet: bool) -> None:
    from dataclasses import asdict

    from mismatchctl.dumps.check import check as check_files
    from mismatchctl.frameworks import column_aliases
    from mismatchctl.render.pages import checks

    found = check_files(paths, rename=rename, aliases=column_aliases())
    data = [asdict(file) | {"sound": file.sound} for file in found]
    print_or_show(data, lambda: checks.files(found), as_json=json, quiet=quiet)
    if not all(file.sound for file in found):
        raise typer.Exit(EXIT_CANNOT_JUDGE)
