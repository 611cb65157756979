"""`mismatchctl metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.output import console


def metrics(
    name: Annotated[str | None, typer.Argument(help="A metric's key; without it, all are listed.")] = None,
) -> None:
    """What a number means: definition, unit, source."""
    from mismatchctl.render.reference import render_metric, render_metrics

    if name is None:
        render_metrics(console())
    else:
        render_metric(name, console())
