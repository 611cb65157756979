"""Plain data that does not fit a model, said in our words: which key, what it takes, what was found there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from mismatchctl.errors import suggestion

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_TAKES = {
    "float": "takes a number", "finite": "takes a finite number", "int": "takes a whole number",
    "bool": "takes true or false", "string": "takes text", "tuple": "takes a list", "list": "takes a list",
    "model": "takes keys and values", "dict": "takes keys and values", "missing": "is missing",
}  # fmt: skip
"""What a field takes, by the kind of the problem with what it was given."""
_SIZES = {
    "string_too_short": "must not be empty", "string_too_long": "may have {max_length} characters at most",
    "too_long": "takes a list of {max_length}",
}  # fmt: skip


def explained(error: ValidationError, model: type[BaseModel], most: int | None = None) -> str:
    """What is wrong with the data of a model, in a sentence; `most`: so many problems of it."""
    return "; ".join(_explained(problem, model) for problem in error.errors()[:most])


def _explained(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    place, key = path_of(problem), str((problem["loc"] or ("",))[-1])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key {place!r}{suggestion(key, owner(model, problem['loc'][:-1]).model_fields)}"
    if problem["type"] == "value_error":
        return f"{place}: {takes(problem)}" if place else takes(problem)
    found = "" if problem["type"] == "missing" else f", found {_shown(problem['input'])}"
    return f"{place or 'it'} {takes(problem)}{found}"


def path_of(problem: Mapping[str, Any]) -> str:
    """Where it is, dotted."""
    return ".".join(str(part) for part in problem["loc"] if part != "[key]")


def takes(problem: Mapping[str, Any]) -> str:
    """What the field takes; or what a rule of the model's own says."""
    kind = str(problem["type"])
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind in _SIZES:
        return _SIZES[kind].format(**problem["ctx"])
    return _TAKES.get(kind.partition("_")[0]) or f"must {str(problem['msg']).removeprefix('Input should ')}"


def owner(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    """The model whose keys stand at a place of another one's."""
    for part in place:
        field = model.model_fields.get(str(part))
        model = next(_models(field.annotation), model) if field is not None else model
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return "keys and values" if isinstance(value, Mapping) else repr(value)
