"""`mismatchctl presets`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.options import JsonOption
from mismatchctl.cli.output import print_json_or_page
from mismatchctl.errors import ConfigError

app = typer.Typer(help="Corrections by name: `list` them all, or `show NAME`.", invoke_without_command=True)


@app.callback()
def presets_or_list(
    ctx: typer.Context,
    table: Annotated[bool, typer.Option("--table", help="Side by side: what each does, costs and assumes.")] = False,
    json: JsonOption = False,
) -> None:
    """Corrections by name: all of them, or one as YAML with `show NAME`."""
    if ctx.invoked_subcommand is not None:
        if table or json:
            raise ConfigError("options before a command are of the list: leave the command out")
    elif table:
        _show_table(json)
    else:
        list_presets(json)


def _show_table(json: bool) -> None:
    from dataclasses import asdict

    from mismatchctl.corrections.presets import list_traits
    from mismatchctl.frameworks.registry import load_presets
    from mismatchctl.report.pages import reference

    print_json_or_page(
        [asdict(row) for row in list_traits(load_presets())],
        lambda: reference.methods_document(load_presets()),
        as_json=json,
    )


@app.command("frameworks")
def list_frameworks(json: JsonOption = False) -> None:
    """All frameworks with their versions, and what is known of each."""
    from mismatchctl.frameworks.registry import list_frameworks
    from mismatchctl.report.pages import reference

    print_json_or_page(list_frameworks(), lambda: reference.frameworks_document(list_frameworks()), as_json=json)


@app.command("list")
def list_presets(json: JsonOption = False) -> None:
    """All presets, framework by framework."""
    from mismatchctl.frameworks.registry import load_presets
    from mismatchctl.report.pages import reference

    data = [preset.to_mapping() | {"name": name} for name, preset in load_presets().items()]
    print_json_or_page(data, lambda: reference.presets_document(load_presets()), as_json=json)


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
    from mismatchctl.cli.options import load_corrections
    from mismatchctl.corrections.presets import Preset
    from mismatchctl.frameworks.config_files import format_native, format_preset
    from mismatchctl.frameworks.registry import load_framework, load_presets

    for correction in load_corrections(name):
        known = load_presets().get(name, Preset(correction))
        text = (
            format_native(correction, load_framework(framework), nearest=nearest) if framework else format_preset(known)
        )
        typer.echo(text, nl=False)
