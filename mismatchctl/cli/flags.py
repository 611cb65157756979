"""Flags that several verbs share, spelled once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mismatchctl.errors import ConfigError


class OnBad(str, Enum):
    """What to do with bad rows and files."""

    error = "error"
    skip = "skip"


OUTPUTS = "Outputs"
"""The panel of help that says where things go."""

Paths = Annotated[
    list[str],
    typer.Argument(help="Dumps, or what frameworks write: files, folders. Each is a run.", show_default=False),
]
Corrections = Annotated[
    list[str] | None,
    typer.Option("--correction", "-c", help="A preset, a YAML or TOML file, or a YAML mapping; repeat to compare."),
]
Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config", help="A configuration of verl, slime or Miles (YAML, JSON) as one more correction; repeat."
    ),
]
By = Annotated[list[str] | None, typer.Option("--by", help="Break metrics down by this column; repeat.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Units read at once; default: all processors.")]
OnBadRows = Annotated[OnBad, typer.Option(help="Bad rows and files: stop, or leave them out and count them.")]
Html = Annotated[Path | None, typer.Option(help="Write the report.", rich_help_panel=OUTPUTS)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite reports and sequences.", rich_help_panel=OUTPUTS)]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="CANONICAL=NAME: what the files call a column of the contract; repeat."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors; no summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def renamed(columns: Sequence[str] | None) -> dict[str, str]:
    """`--column canonical=actual` as a mapping.

    Raises:
        ConfigError: not of that form, or one column twice.
    """
    found: dict[str, str] = {}
    for text in columns or ():
        canonical, equals, actual = text.partition("=")
        if not (canonical and equals and actual):
            raise ConfigError(f"--column {text}: write CANONICAL=NAME, as in train_log_probs=old_log_probs")
        if found.setdefault(canonical, actual) != actual:
            raise ConfigError(f"--column {text}: {canonical} is {found[canonical]} already")
        found[canonical] = actual
    return found
