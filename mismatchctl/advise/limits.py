"""What the user will not have, and what no advice may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, wording
from mismatchctl.texts import parse_inline
from mismatchctl.validation import owner, path_of, takes

MOST_REJECTED = 0.9
"""Rejecting more than that is no advice, whatever it does to the variance: rejecting everything has none."""


@dataclass(frozen=True)
class Limits:
    """Constraints on candidates; `fixed` are fields of a correction with the value that they must have."""

    max_rejection: float = 1.0
    min_ess: float = 0.0
    no_rejection: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()

    def refuse(self, correction: Correction, rejected: float, ess: float) -> str:
        """Why a candidate is out of the question; "" where it is not."""
        if rejected > min(self.max_rejection, MOST_REJECTED):
            return f"rejects {rejected:.1%} of the tokens"
        if ess < self.min_ess:
            return f"leaves an ESS of {ess:.2g}"
        if self.no_rejection and correction.gates:
            return "rejects"
        data = correction.model_dump(mode="json")
        return next((f"{path} is not {wanted}" for path, wanted in self.fixed if _at(data, path) != wanted), "")


def parse_fixed(texts: list[str]) -> tuple[tuple[str, Any], ...]:
    """Read `weight.level=token`.

    Raises:
        ConfigError: there is no = in it, a correction has no such field, or the field no such value.
    """
    return tuple(_fixed(text) for text in texts)


def _fixed(text: str) -> tuple[str, Any]:
    path, equals, written = (part.strip() for part in text.partition("="))
    where = wording(python=f"fixed: {text}", command=f"--fixed {text}")
    if not (path and equals and written):
        raise ConfigError(f"{where}: write PATH=VALUE, as in weight.level=token")
    value, parts = parse_inline(written, where), path.split(".")
    try:
        Correction.model_validate(_nested(parts, value))
    except ValidationError as error:
        for problem in error.errors():
            # that fields do not fit each other says nothing of one of them alone
            if problem["type"] != "value_error" or len(problem["loc"]) >= len(parts) - (parts[-1] in ("0", "1")):
                raise ConfigError(f"{where}: {_explained(problem, parts)}") from None
    return path, value


def _nested(parts: list[str], value: Any, under: str = "") -> Any:
    """A correction of which no more is given than this."""
    if not parts:
        return value
    name, rest = parts[0], _nested(parts[1:], value, parts[0])
    if not (under and name.isdecimal()):
        return {name: rest}
    return [rest] if under == "gates" else [None] * int(name[:2]) + [rest] + [None] * (name == "0")


def _explained(problem: Any, parts: list[str]) -> str:
    """What is wrong, with the fields that there are, or with what the field takes and is for."""
    path, kind, part = path_of(problem), problem["type"], owner(Correction, parts[:1])
    known = ", ".join({Weight: "weight.", Gate: "gates.0."}.get(part, "") + name for name in part.model_fields)
    if kind == "extra_forbidden":
        return f"there is no such field; what may be fixed: {known}"
    if kind == "model_type":
        return f"{path} is no value by itself; what may be fixed: {known}"
    field = next((part.model_fields[name] for name in parts if name in part.model_fields), None)
    about = (field or Correction.model_fields[parts[0]]).description
    if kind in ("tuple_type", "too_long"):
        return f"{path} is a list: fix {path}.0 or {path}.1 ({about})"
    return f"{takes(problem) if kind == 'value_error' else f'{path} {takes(problem)}'} ({about})"


def _at(data: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data
