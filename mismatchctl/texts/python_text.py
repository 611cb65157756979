"""Calls in Python text: a name with plain arguments. Nothing is executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from mismatchctl.texts.scalars import TextError

NOT_BROUGHT = "what ** brings is not read; write its options in the call"


@dataclass(frozen=True)
class PythonCall:
    """A call of `name`, or of a function that belongs to it.

    Attributes:
        function: what follows the name's dot; empty: the name itself is called.
        given: plain arguments by their names.
        computed: the arguments that are no plain values with a name, by their names or places.
        brings_more: whether `**` brings arguments from elsewhere.
        partial: whether `...` stands for arguments that are left out.
        line: where it stands, counted from 1.
    """

    function: str
    given: dict[str, Any]
    computed: tuple[str, ...]
    brings_more: bool
    partial: bool
    line: int


def python_calls(text: str, name: str) -> list[PythonCall]:
    """The calls of a name, in their order.

    Raises:
        TextError: the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TextError(error.msg, error.lineno, error.offset) from None
    except (ValueError, RecursionError, MemoryError):
        raise TextError("nested too deeply, or holds a null character") from None
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _function(node, name) is not None]
    return [_call(node, _function(node, name) or "") for node in sorted(found, key=lambda node: node.lineno)]


def _function(node: ast.Call, name: str) -> str | None:
    called = node.func
    if isinstance(called, ast.Name):
        return "" if called.id == name else None
    if isinstance(called, ast.Attribute):
        owner = called.value
        own = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        return called.attr if own == name else "" if called.attr == name else None
    return None


def _call(node: ast.Call, function: str) -> PythonCall:
    partial = False
    given: dict[str, Any] = {}
    computed = []
    for place, argument in enumerate(node.args, 1):
        if isinstance(argument, ast.Constant) and argument.value is ...:
            partial = True
        else:
            computed.append(f"argument {place}")
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            computed.append(keyword.arg)
    brings_more = any(keyword.arg is None for keyword in node.keywords)
    return PythonCall(function, given, tuple(computed), brings_more, partial, node.lineno)
