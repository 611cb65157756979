"""`mismatchctl metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.flags import Json
from mismatchctl.cli.output import console, print_json


def metrics(
    name: Annotated[str | None, typer.Argument(help="A metric's key; without it, all are listed.")] = None,
    json: Json = False,
) -> None:
    """What a number means: definition, unit, source."""
    from mismatchctl.render.reference import find_metrics, metrics_data, render_metric, render_metrics

    found = find_metrics(name)
    if json:
        print_json(metrics_data(found))
    elif name is None:
        render_metrics(found, console())
    else:
        render_metric(found, console())
