"""Flags that belong together as one parameter of a verb: a dataclass whose fields are options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any

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
