"""Help pages: usage, arguments, options in panels, and examples."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

ADVANCED = "Advanced"
"""Name of the last panel of the help, with options that few users need."""
EXAMPLES_FILE = Path(__file__).with_name("examples.txt")
"""File with example command lines, three for each help page."""
METAVARS = {
    "correction": "NAME|FILE|YAML", "config": "FILE", "study_file": "FILE", "framework": "NAME", "by": "COLUMN",
    "column": "COLUMN=NAME", "loss": "LOSS", "kl": "KIND", "loss_agg": "KIND", "vary": "PATH=VALUES",
    "rule": "METRIC:KEY=VALUE", "figures": "FOLDER", "history": "FOLDER", "layers": "FILE",
    "tokenizer": "NAME|FILE", "on": "COLUMNS", "address": "ADDRESS", "device": "DEVICE", "geo": "X", "out": "FILE",
    "replay": "FILE", "join": "FILE", "against": "FILE", "copy": "FOLDER",
}  # fmt: skip
"""Placeholders of option values by parameter. Other placeholders depend on the type."""
_TYPE_METAVARS = {Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}
_WIDEST = 100


def read_examples(command: str) -> list[str]:
    """Return example command lines of a command, or of the program."""
    if command == "mismatchctl":
        return ["demo", "analyze dumps/", "help sweep"]
    return [line for line in EXAMPLES_FILE.read_text("utf-8").splitlines() if line.split()[0] == command]


class HelpCommand(TyperCommand):
    """A command that prints its own help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        _write_page(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands that prints its own help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        _write_page(self, ctx, formatter)


def _write_page(command: Any, ctx: Any, formatter: Any) -> None:
    width = formatter.width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    shown = [one for one in command.get_params(ctx) if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name != "argument"]
    inner = [each for each in getattr(command, "commands", {}).values() if not each.hidden]
    usage = [*(["[OPTIONS]"] if options else []), *map(_argument_name, arguments), *(["COMMAND"] if inner else [])]
    texts = (" ".join(paragraph.split()) for paragraph in (command.help or "").split("\n\n"))
    formatter.write(
        "\n\n".join([f"Usage: {ctx.command_path} {' '.join(usage)}".rstrip(), *(fill(t, width) for t in texts)])
    )
    formatter.write("\n")
    panels: dict[str, list[tuple[str, str]]] = {
        "Commands": [(each.name, " ".join((each.help or "").split("\n\n")[0].split()).rstrip(".")) for each in inner],
        "Arguments": [(_argument_name(one), _option_help(one)) for one in arguments],
        "Options": [],
    }
    for option in options:
        panel = panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", [])
        panel.append((_option_label(option), _option_help(option)))
    for title in sorted(filter(panels.get, panels), key=ADVANCED.__eq__):
        with formatter.section(title):
            formatter.write_dl(panels[title])
    if examples := read_examples(ctx.command_path.split()[-1]):
        formatter.write("\n".join(["", "Examples:", *(f"  $ mismatchctl {example}" for example in examples), ""]))
    if command.epilog:
        formatter.write(f"\n{fill(command.epilog, width)}\n")


def _argument_name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = f"{name}..." if argument.metavar is None and argument.nargs != 1 else name
    return name if argument.required else f"[{name}]"


def _option_label(option: Any) -> str:
    names = sorted(option.opts, key=lambda name: name.startswith("--"))
    metavar = option_metavar(option)
    return f"{', '.join(names)}{f' {metavar}' if metavar else ''}"


def option_metavar(option: Any) -> str:
    """Return the placeholder of an option's value. A flag has an empty placeholder."""
    if getattr(option, "is_flag", False) or option.name == "help":
        return ""
    if option.metavar:
        return str(option.metavar)
    if option.name in METAVARS:
        return METAVARS[option.name]
    described = option.type_descriptor
    if described.is_choice:
        return "|".join(str(getattr(choice, "value", choice)) for choice in described.choices or ())
    return next((_TYPE_METAVARS[kind] for kind in _types(described.annotation) if kind in _TYPE_METAVARS), "TEXT")


def _types(annotation: Any) -> Iterator[Any]:
    """Yield all types in an annotation such as `list[Path]`."""
    if get_origin(annotation) is None:
        yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def _option_help(option: Any) -> str:
    """Return the help text of an option, followed by its default."""
    text, value = " ".join((getattr(option, "help", None) or "").split()), option.default
    shown = not (option.required or callable(value) or option.show_default is False or "[default" in text)
    if shown and value not in (None, "", (), [], False):
        value = value.value if isinstance(value, enum.Enum) else value
        text = f"{text} [default: {value}]"
    return text
