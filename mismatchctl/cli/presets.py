"""`mismatchctl presets`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.output import console

app = typer.Typer(help="Corrections by name.", no_args_is_help=False, invoke_without_command=True)


@app.callback()
def list_presets(ctx: typer.Context) -> None:
    """Corrections by name: all of them, or one as YAML with `show NAME`."""
    if ctx.invoked_subcommand is None:
        from mismatchctl.frameworks import presets
        from mismatchctl.render.reference import render_presets

        render_presets(presets(), console())


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A preset's name.")]) -> None:
    """A preset as YAML, to edit and to name with --correction FILE."""
    from mismatchctl.frameworks import preset, presets
    from mismatchctl.render.reference import preset_yaml

    preset(name)  # an unknown name is refused with a suggestion
    typer.echo(preset_yaml(presets()[name]), nl=False)
