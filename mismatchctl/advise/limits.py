"""What the user will not have, and what no advice may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError

MOST_REJECTED = 0.9
"""Rejecting more than that is no advice, whatever it does to the variance: rejecting everything has none."""


@dataclass(frozen=True)
class Limits:
    """Constraints on candidates; `fixed` are fields of a correction with the text of the value that they must have."""

    max_rejection: float = 1.0
    min_ess: float = 0.0
    no_rejection: bool = False
    fixed: tuple[tuple[str, str], ...] = ()

    def refuse(self, correction: Correction, rejected: float, ess: float) -> str:
        """Why a candidate is out of the question; "" where it is not."""
        if rejected > min(self.max_rejection, MOST_REJECTED):
            return f"rejects {rejected:.1%} of the tokens"
        if ess < self.min_ess:
            return f"leaves an ESS of {ess:.2g}"
        if self.no_rejection and correction.gates:
            return "rejects"
        data = correction.model_dump(mode="json")
        return next((f"{path} is not {wanted}" for path, wanted in self.fixed if str(_at(data, path)) != wanted), "")


def parse_fixed(texts: list[str]) -> tuple[tuple[str, str], ...]:
    """Read `weight.level=token`.

    Raises:
        ConfigError: there is no = in it.
    """
    pairs = [text.partition("=") for text in texts]
    for text, (path, equals, value) in zip(texts, pairs, strict=True):
        if not (path and equals and value):
            raise ConfigError(f"--fixed {text}: write PATH=VALUE, as in weight.level=token")
    return tuple((path.strip(), value.strip()) for path, _, value in pairs)


def _at(data: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data
