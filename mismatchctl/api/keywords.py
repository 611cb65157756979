"""Suggestions for wrong keywords of the public functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from mismatchctl.errors import suggestion

P = ParamSpec("P")
Returned = TypeVar("Returned")

_SYNONYMS = {"rename": "columns", "yours": "configs", "log": "against", "studies": "vary"}
"""What else a parameter may be called -> its name."""


def public_function(function: Callable[P, Returned]) -> Callable[P, Returned]:
    """Suggest the right name for a wrong keyword, and keep BLAS to one thread while the function runs."""
    names = [name for name, one in signature(function).parameters.items() if one.kind != one.VAR_POSITIONAL]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Returned:
        for name in kwargs:
            if name not in names:
                meant = _SYNONYMS.get(name)
                near = f" (did you mean {meant!r}?)" if meant in names else suggestion(name, names)
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{near}")
        from mismatchctl.io.process import limit_to_one_thread

        with limit_to_one_thread():
            return function(*args, **kwargs)

    return call
