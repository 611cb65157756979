"""`mismatchctl metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.flags import Json
from mismatchctl.cli.output import console, print_json
from mismatchctl.errors import ConfigError


def metrics(
    name: Annotated[
        str | None,
        typer.Argument(help="A metric's key, or the name that a framework logs; without it, all are listed."),
    ] = None,
    json: Json = False,
) -> None:
    """What a number means: definition, unit, source."""
    from mismatchctl.frameworks.meanings import find_meanings
    from mismatchctl.render import reference

    meanings = {} if name is None else find_meanings(name)
    try:
        found = reference.find_metrics(name)
    except ConfigError:
        if not meanings:
            raise
        found = {}
    if json:
        print_json([*reference.metrics_data(found), *reference.meanings_data(meanings)])
    elif name is None:
        reference.render_metrics(found, console())
    else:
        reference.render_metric(found, console())
        reference.render_meanings(meanings, console())
