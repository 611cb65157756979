"""`mismatchctl metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.flags import Json
from mismatchctl.cli.output import print_json, show
from mismatchctl.errors import ConfigError


def metrics(
    name: Annotated[
        str | None,
        typer.Argument(help="A metric's key, or the name that a framework logs; without it, all are listed."),
    ] = None,
    json: Json = False,
) -> None:
    """What a number means: definition, unit, source."""
    from mismatchctl.frameworks import glossary
    from mismatchctl.frameworks.meanings import find_meanings
    from mismatchctl.render.pages import reference

    meanings = {} if name is None else find_meanings(name)
    try:
        found = glossary.find_metrics(name)
    except ConfigError:
        if not meanings:
            raise
        found = {}
    if json:  # what every framework calls each metric is read for it, from all their tables
        print_json([*glossary.metrics_data(found), *glossary.meanings_data(meanings)])
    else:
        show(reference.metrics(found) if name is None else reference.metric(found, meanings))
