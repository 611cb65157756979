"""`mismatchctl presets`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.flags import Columns, Json
from mismatchctl.cli.output import print_or_show
from mismatchctl.errors import ConfigError

app = typer.Typer(help="Corrections by name: `list` them all, or `show NAME`.", invoke_without_command=True)


@app.callback()
def presets_or_list(
    ctx: typer.Context,
    table: Annotated[bool, typer.Option("--table", help="Side by side: what each does, costs and assumes.")] = False,
    method: Annotated[
        str, typer.Option("--method", help="One method across frameworks: tis, icepop, geometric-mask, opsm, ...")
    ] = "",
    on: Annotated[
        list[str] | None, typer.Option("--on", help="With --method: what differs in the result on these dumps; repeat.")
    ] = None,
    column: Columns = None,
    json: Json = False,
) -> None:
    """Corrections by name: all of them, one as YAML with `show NAME`, or one method as each framework has it."""
    if ctx.invoked_subcommand is not None:
        if table or json or method or on:
            raise ConfigError("options before a command are of the list: leave the command out")
    elif on and not method:
        raise ConfigError("--on says what differs between frameworks in one method: name it with --method")
    elif method:
        _show_method(method, on or [], column, json)
    elif table:
        _show_table(json)
    else:
        list_presets(json)


def _show_table(json: bool) -> None:
    from dataclasses import asdict

    from mismatchctl.correction.traits import traits_of
    from mismatchctl.frameworks import presets
    from mismatchctl.render.pages import reference

    print_or_show([asdict(row) for row in traits_of(presets())], lambda: reference.methods(presets()), as_json=json)


def _show_method(method: str, dumps: list[str], column: list[str] | None, json: bool) -> None:
    from mismatchctl.analyze.across import across, results
    from mismatchctl.cli.flags import renamed
    from mismatchctl.render.pages import reference

    rows = across(method)
    found = results(method, dumps, renamed(column)) if dumps else {}
    data = {"method": method, "presets": rows, "results": found}
    print_or_show(data, lambda: reference.across(method, rows, found), as_json=json)


@app.command("frameworks")
def list_frameworks(json: Json = False) -> None:
    """All frameworks with their versions, and what is known of each."""
    from mismatchctl.frameworks import inventory
    from mismatchctl.render.pages import reference

    print_or_show(inventory(), lambda: reference.frameworks(inventory()), as_json=json)


@app.command("list")
def list_presets(json: Json = False) -> None:
    """All presets, framework by framework."""
    from mismatchctl.frameworks import presets
    from mismatchctl.render.pages import reference

    data = [preset.to_mapping() | {"name": name} for name, preset in presets().items()]
    print_or_show(data, lambda: reference.presets(presets()), as_json=json)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A preset's name, or a file of corrections.", show_default=False)],
    framework: Annotated[str, typer.Option("--as", help="In the syntax of this framework, NAME or NAME@VERSION.")] = "",
    nearest: Annotated[
        bool, typer.Option("--nearest", help="With --as: what the framework cannot say exactly, as near as it can.")
    ] = False,
) -> None:
    """A preset as YAML, to edit and to name with --correction FILE; --as a framework, for its own configuration."""
    if nearest and not framework:
        raise ConfigError("--nearest is how near --as may be: name a framework with --as")
    from mismatchctl.cli.corrections import named_corrections
    from mismatchctl.correction.presets import Preset
    from mismatchctl.frameworks import load, presets
    from mismatchctl.frameworks.native import native_yaml, preset_yaml

    for correction in named_corrections(name):
        known = presets().get(name, Preset(correction))
        text = native_yaml(correction, load(framework), nearest=nearest) if framework else preset_yaml(known)
        typer.echo(text, nl=False)
