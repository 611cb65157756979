"""Flags that several verbs share, spelled once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatchctl.cli.output import on_disk
from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from mismatchctl.engines import Engine


class OnBad(str, Enum):
    """What to do with bad rows and files."""

    error = "error"
    skip = "skip"


class EngineName(str, Enum):
    """Where units are read."""

    local = "local"
    ray = "ray"


OUTPUTS = "Outputs"
"""The panel of help that says where things go."""
RUNNING = "How it runs"
"""The panel of help of what does not change the result."""

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
    typer.Option("--config", help="What configures a framework (YAML, JSON, script) as one more correction; repeat."),
]
By = Annotated[list[str] | None, typer.Option("--by", help="Break metrics down by this column; repeat.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Units read at once; default: all processors.", rich_help_panel=RUNNING)
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Read fewer units at once to stay below, as in 2GB.", rich_help_panel=RUNNING),
]
EngineChoice = Annotated[
    EngineName, typer.Option("--engine", help="Threads here, or tasks on a Ray cluster.", rich_help_panel=RUNNING)
]
Address = Annotated[
    str | None, typer.Option(help="The Ray cluster: auto is the one of this machine.", rich_help_panel=RUNNING)
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Keep what was read in this folder, and read it no more.", rich_help_panel=RUNNING),
]
OnBadRows = Annotated[OnBad, typer.Option(help="Bad rows and files: stop, or leave them out and count them.")]
Markdown = Annotated[
    Path | None, typer.Option(help="Write Markdown for a pull request; - is stdout.", rich_help_panel=OUTPUTS)
]
Open = Annotated[bool, typer.Option("--open", help="Open the page of --html.", rich_help_panel=OUTPUTS)]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows of a step per micro-batch, where no column names them.")
]
Html = Annotated[Path | None, typer.Option(help="Write the report.", rich_help_panel=OUTPUTS)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that stand there.", rich_help_panel=OUTPUTS)]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="CANONICAL=NAME: what the files call a column of the contract; repeat."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors; no summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def chosen_engine(
    threads: int | None, memory_limit: str | None, engine: EngineName, address: str | None, cache: Path | None
) -> Engine:
    """The engine that the flags spell.

    Raises:
        ConfigError: flags that do not fit each other.
    """
    from mismatchctl.engines import Local
    from mismatchctl.engines.memory import parse_size

    chosen: Engine
    if engine is EngineName.ray:
        if threads is not None or memory_limit is not None:
            raise ConfigError("--threads and --memory-limit are of this process: leave them out with --engine ray")
        from mismatchctl.engines.ray import Ray

        chosen = Ray(address)
    elif address is not None:
        raise ConfigError("--address is that of a Ray cluster: it needs --engine ray")
    else:
        chosen = Local(threads, None if memory_limit is None else parse_size(memory_limit))
    if cache is None:
        return chosen
    from mismatchctl.engines.cache import Cached

    return Cached(chosen, on_disk(cache))


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
