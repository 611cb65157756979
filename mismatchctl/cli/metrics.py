"""`mismatchctl metrics`."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatchctl.cli.options import JsonOption
from mismatchctl.cli.output import print_json, print_page
from mismatchctl.errors import ConfigError


def metrics(
    name: Annotated[
        str | None,
        typer.Argument(help="A metric's key, a word in keys such as ess, or the name that a framework logs."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """What a number means: definition, unit, source."""
    from mismatchctl.frameworks.glossary import find_meanings, find_metrics, meanings_as_data, metrics_as_data
    from mismatchctl.report.pages import reference

    meanings = {} if name is None else find_meanings(name)
    try:
        found = find_metrics(name)
    except ConfigError:
        if not meanings:
            raise
        found = {}
    if json:  # loads every framework for the names it uses
        print_json([*metrics_as_data(found), *meanings_as_data(meanings)])
    else:
        several = len({metric.key for metrics in found.values() for metric in metrics}) > 1
        if several:
            print_page(reference.metrics_document({title: own for title, own in found.items() if own}))
        if meanings or not several:
            print_page(reference.metric_document({} if several else found, meanings))
