"""Build options from help.toml, and print help pages: usage, arguments, options in panels, and examples."""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HELP_FILE = Path(__file__).with_name("help.toml")
_LAST_PANEL = "Advanced"
_TYPE_METAVARS = {Path: "FILE", int: "N", float: "NUMBER", str: "TEXT"}
_WIDEST = 100


@cache
def _read_help() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_HELP_FILE.read_text("utf-8"))


def read_examples(command: str) -> list[str]:
    found: list[str] = _read_help().get(command, {}).get("examples", [])
    return found


def declare_options(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command's function: each parameter, and each field of a dataclass parameter, becomes an option."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        original = signature(function, eval_str=True)
        groups: dict[str, Any] = {
            name: one.annotation for name, one in original.parameters.items() if is_dataclass(one.annotation)
        }
        fields = {name: list(signature(group, eval_str=True).parameters.values()) for name, group in groups.items()}

        @wraps(function)
        def flattened(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(*(given.pop(field.name) for field in fields[name]))
            function(**given)

        parameters = [
            field.replace(kind=Parameter.KEYWORD_ONLY, annotation=_annotate(field, command, one))
            for name, one in original.parameters.items()
            for field in fields.get(name, [one])
        ]
        flattened.__signature__ = original.replace(parameters=parameters)  # type: ignore[attr-defined]
        flattened.__annotations__ = {one.name: one.annotation for one in parameters}
        return flattened

    return declare


def _annotate(parameter: Parameter, command: str, owner: Parameter) -> Any:
    """Add help of help.toml to a parameter's type. For a dataclass field, `owner` is the dataclass parameter."""
    if parameter.annotation is typer.Context:
        return parameter.annotation
    sections = [_read_help().get(name, {}) for name in (command, getattr(owner.annotation, "__name__", ""), "shared")]
    found = next(section[parameter.name] for section in sections if parameter.name in section)
    own: dict[str, Any] = dict(found) if isinstance(found, dict) else {"help": found}
    if "argument" in own:
        return Annotated[parameter.annotation, typer.Argument(metavar=own["argument"], help=own["help"])]
    flags = own.pop("flags", f"--{parameter.name.replace('_', '-')}").split()
    panel, value = own.pop("panel", None), own.pop("value", None)
    return Annotated[parameter.annotation, typer.Option(*flags, rich_help_panel=panel, metavar=value, **own)]


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
    for title in sorted(filter(panels.get, panels), key=_LAST_PANEL.__eq__):
        with formatter.section(title):
            formatter.write_dl(panels[title])
    if examples := read_examples(ctx.command_path.split()[-1]):
        formatter.write("\n".join(["", "Examples:", *(f"  $ mismatchctl {example}" for example in examples), ""]))
    if command.epilog:
        formatter.write(f"\n{fill(command.epilog, width)}\n")


class HelpCommand(TyperCommand):
    """A command whose `--help` prints the page of `_write_page`."""

    format_help = _write_page


class HelpGroup(TyperGroup):
    """A group of commands whose `--help` prints the page of `_write_page`."""

    format_help = _write_page


def _argument_name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    name = f"{name}..." if argument.metavar is None and argument.nargs != 1 else name
    return name if argument.required else f"[{name}]"


def _option_label(option: Any) -> str:
    names = sorted(option.opts, key=lambda name: name.startswith("--"))
    metavar = option_metavar(option)
    return f"{', '.join(names)}{f' {metavar}' if metavar else ''}"


def option_metavar(option: Any) -> str:
    """Return the placeholder that the help shows for an option's value, such as FILE, or "" for a flag."""
    if getattr(option, "is_flag", False) or option.name == "help":
        return ""
    if option.metavar:
        return str(option.metavar)
    described = option.type_descriptor
    if described.is_choice:
        return "|".join(str(getattr(choice, "value", choice)) for choice in described.choices or ())
    return next((_TYPE_METAVARS[kind] for kind in _types(described.annotation) if kind in _TYPE_METAVARS), "TEXT")


def _types(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is None:
        yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)


def _option_help(option: Any) -> str:
    text, value = " ".join((getattr(option, "help", None) or "").split()), option.default
    shown = not (option.required or callable(value) or option.show_default is False or "[default" in text)
    if shown and value not in (None, "", (), [], False):
        value = value.value if isinstance(value, enum.Enum) else value
        text = f"{text} [default: {value}]"
    return text
