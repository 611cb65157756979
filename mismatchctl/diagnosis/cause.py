"""Definition of a cause: the columns it needs, its test, its texts, and what a test returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from mismatchctl.core.batch import Bools, Ints
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.evidence import FlagFunction
from mismatchctl.frameworks.registry import list_settings
from mismatchctl.io.yaml import parse_toml
from mismatchctl.results.model import Confidence, Fact

CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low")
"""Strongest first."""

Place = tuple[int, int, int]
"""File, row and position. A negative position means the whole row."""


@dataclass(frozen=True)
class Detection:
    """Result of a test.

    `tokens` are those that the cause takes out [T]; `share` and `leaves` follow from them. Otherwise `share` is the
    explained part of the summed |log ratio|, and `leaves` the rest of the case. `k3` is the explained part of K3 if it
    differs. `where` defaults to all tokens if the cause acts `everywhere`. `examples` are sequences of the sample [N]
    (default: the largest differences) with `positions` [N], and `places` are examples of the whole dump. `rivals` maps
    a cause to the measurement that distinguishes it. `outside_k3`: K3 does not measure this data.
    """

    confidence: Confidence
    summary: str
    share: float = 1.0
    evidence: tuple[Fact, ...] = ()
    where: Mapping[str, str] | None = None
    examples: Ints | None = None
    positions: Ints | None = None
    places: tuple[Place, ...] = ()
    rivals: Mapping[str, str] = field(default_factory=dict)
    tokens: Bools | None = None
    leaves: Case | None = None
    k3: float | None = None
    everywhere: bool = False
    outside_k3: bool = False


@cache
def load_texts() -> dict[str, dict[str, str]]:
    """Return the texts of each cause from causes.toml."""
    return parse_toml((files("mismatchctl.diagnosis.causes") / "causes.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cause:
    """Cause of a mismatch.

    `test` runs on the case that earlier causes leave, `columns` are the optional columns it reads, `flags` counts
    tokens of the whole dump, and `in_layers` is true if a comparison of layers can find it.
    """

    id: str
    test: Callable[[Case], Detection | None]
    columns: tuple[str, ...] = ()
    flags: FlagFunction = lambda rows: {}
    in_layers: bool = False

    @property
    def title(self) -> str:
        return load_texts()[self.id]["title"]

    @property
    def shows(self) -> str:
        return load_texts()[self.id]["shows"]

    @property
    def pointless(self) -> str:
        return load_texts()[self.id].get("pointless", "")

    @property
    def advice(self) -> str:
        """Advice with the frameworks' names of the settings."""
        known = list_settings(self.id)
        return load_texts()[self.id]["advice"].replace("{settings}", f" ({'; '.join(known)})" if known else "")
