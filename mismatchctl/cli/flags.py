"""Flags that several verbs share, spelled once; those that belong together are one parameter of a verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mismatchctl.cli.places import on_disk
from mismatchctl.errors import ConfigError

Verb = Callable[..., None]


def flat(verb: Verb) -> Verb:
    """The verb as typer reads it: each field of a parameter that is a dataclass is a parameter of its own."""
    own = signature(verb, eval_str=True)
    made: dict[str, Any] = {
        name: one.annotation for name, one in own.parameters.items() if is_dataclass(one.annotation)
    }
    groups = {name: list(signature(group, eval_str=True).parameters.values()) for name, group in made.items()}

    @wraps(verb)
    def flattened(**given: Any) -> None:
        for name, fields in groups.items():
            given[name] = made[name](*(given.pop(field.name) for field in fields))
        verb(**given)

    parameters = [field for name, one in own.parameters.items() for field in groups.get(name, [one])]
    spelled = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters]
    flattened.__signature__ = own.replace(parameters=spelled)  # type: ignore[attr-defined]
    flattened.__annotations__ = {one.name: one.annotation for one in spelled}
    return flattened


if TYPE_CHECKING:
    from mismatchctl.engines import Engine


OnBad = Literal["error", "skip"]
"""What to do with bad rows and files."""
output_option = partial(typer.Option, rich_help_panel="Outputs")
"""The panel of help that says where things go."""
running_option = partial(typer.Option, rich_help_panel="How it runs")
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
Threads = Annotated[int | None, running_option(min=1, help="Units read at once; default: all processors.")]
Cache = Annotated[Path | None, running_option(help="Keep what was read in this folder, and read it no more.")]
OnBadRows = Annotated[OnBad, typer.Option(help="Bad rows and files: stop, or leave them out and count them.")]
Markdown = Annotated[Path | None, output_option(help="Write Markdown for a pull request; - is stdout.")]
Open = Annotated[bool, output_option("--open", help="Open the page of --html.")]
MicroBatch = Annotated[
    int | None, typer.Option(min=1, help="Rows of a step per micro-batch, where no column names them.")
]
Html = Annotated[Path | None, output_option(help="Write the report.")]
Force = Annotated[bool, output_option("--force", help="Overwrite files that stand there.")]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", help="CANONICAL=NAME: what the files call a column of the contract; repeat."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors; no summary.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class EngineFlags:
    """The flags that spell an engine."""

    threads: Threads = None
    memory_limit: Annotated[
        str | None, running_option(metavar="SIZE", help="Read fewer units at once to stay below, as in 2GB.")
    ] = None
    engine: Annotated[Literal["local", "ray"], running_option(help="Threads here, or tasks on a Ray cluster.")] = (
        "local"
    )
    address: Annotated[str | None, running_option(help="The Ray cluster: auto is the one of this machine.")] = None
    cache: Cache = None

    def chosen(self) -> Engine:
        """The engine.

        Raises:
            ConfigError: flags that do not fit each other.
        """
        engine = self._reads()
        if self.cache is None:
            return engine
        from mismatchctl.engines.cache import Cached

        return Cached(engine, on_disk(self.cache))

    def _reads(self) -> Engine:
        if self.engine == "ray":
            if self.threads is not None or self.memory_limit is not None:
                raise ConfigError("--threads and --memory-limit are of this process: leave them out with --engine ray")
            from mismatchctl.engines.ray import Ray

            return Ray(self.address)
        if self.address is not None:
            raise ConfigError("--address is that of a Ray cluster: it needs --engine ray")
        from mismatchctl.engines import Local
        from mismatchctl.engines.local import parse_size

        return Local(self.threads, None if self.memory_limit is None else parse_size(self.memory_limit))


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


def share(flag: str, text: str, most: float, remedy: str) -> float:
    """A share as `20%` or 0.2.

    Raises:
        ConfigError: it is none from 0 to `most`.
    """
    from mismatchctl.texts import number

    try:
        found = number(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= most:
        raise ConfigError(f"{flag} {text}: {remedy}")
    return found
