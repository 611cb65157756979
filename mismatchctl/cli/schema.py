"""`mismatchctl schema`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from mismatchctl.cli.options import ColumnOption, JsonOption, QuietOption, parse_renames
from mismatchctl.cli.output import print_json, print_json_or_page
from mismatchctl.errors import EXIT_CANNOT_JUDGE, ConfigError


def schema(
    paths: Annotated[
        list[str] | None, typer.Argument(help="With --check: files, folders, globs.", show_default=False)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Explain the files of PATHS.")] = False,
    column: ColumnOption = None,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of a Result.")] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """The dump contract; with --check PATHS, what files hold, what is missing, what is wrong (exit code 4)."""
    if check or paths:
        if not paths:
            raise ConfigError("--check needs something to check: files, folders, globs")
        _check_files(paths, parse_renames(column), json, quiet)
    elif json_schema:
        from mismatchctl.results.model import result_schema

        print_json(result_schema())
    else:
        _print_contract(json)


def _print_contract(json: bool) -> None:
    from mismatchctl.core.schema import build_schema_data
    from mismatchctl.frameworks.registry import column_aliases
    from mismatchctl.report.pages import reference

    print_json_or_page(
        build_schema_data(column_aliases()), lambda: reference.contract_document(column_aliases()), as_json=json
    )


def _check_files(paths: Sequence[str], rename: dict[str, str], json: bool, quiet: bool) -> None:
    from dataclasses import asdict

    from mismatchctl.data.schema_check import check_files
    from mismatchctl.frameworks.registry import column_aliases
    from mismatchctl.report.pages import checks

    found = check_files(paths, rename=rename, aliases=column_aliases())
    data = [asdict(file) | {"sound": file.sound} for file in found]
    print_json_or_page(data, lambda: checks.schema_check_document(found), as_json=json, quiet=quiet)
    if not all(file.sound for file in found):
        raise typer.Exit(EXIT_CANNOT_JUDGE)
