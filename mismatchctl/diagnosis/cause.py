"""Definition of a cause: the columns it needs, its test, its texts, and what a test returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from mismatchctl.core.batch import Ints
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.evidence import FlagFunction
from mismatchctl.frameworks.registry import list_settings
from mismatchctl.io.yaml import parse_toml
from mismatchctl.results.model import Confidence, Fact

CONFIDENCES: tuple[Confidence, ...] = ("high", "medium", "low")
"""Strongest first."""

Place = tuple[int, int, int]
"""File, row and position."""


@dataclass(frozen=True)
class Detection:
    """What a test found in a case.

    Attributes:
        confidence: how sure it is.
        summary: one sentence with the figures that matter.
        share: how much of the summed |log ratio| it explains, about.
        evidence: the numbers for and against.
        where: what it concerns: steps, workers, positions, sequences; None: all tokens, if it acts `everywhere`.
        examples: sequences of the sample that show it [N], most telling first; None: those that differ most.
        positions: where in them, where that matters [N].
        places: examples beyond the sample, from the pass; a position below 0 stands for the whole row.
        rivals: cause -> the column or experiment that would tell the two apart.
        leaves: what remains of the case once this is taken out of it; None: all of it.
        k3: share of the K3 that it explains, where that is not what it takes out.
        everywhere: whether it acts on all tokens, so that what no other cause takes of the K3 is its doing.
        outside_k3: whether it is about data that K3 does not measure, so that a share of K3 means nothing.
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
    leaves: Case | None = None
    k3: float | None = None
    everywhere: bool = False
    outside_k3: bool = False


@cache
def load_texts() -> dict[str, dict[str, str]]:
    """Return the texts of each cause, from causes/causes.toml."""
    return parse_toml((files("mismatchctl.diagnosis.causes") / "causes.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Cause:
    """One cause of a mismatch. Its texts are in causes/causes.toml.

    Attributes:
        id: stable name.
        test: looks for it in a case from which earlier causes have been removed.
        columns: optional columns of the dump that the test uses.
        flags: tokens that the pass counts over the whole dump, by name.
        in_layers: whether comparing layers can find it. Other causes are in the network's input or output.
    """

    id: str
    test: Callable[[Case], Detection | None]
    columns: tuple[str, ...] = ()
    flags: FlagFunction = lambda rows: {}
    in_layers: bool = False

    @property
    def title(self) -> str:
        """Name in reports."""
        return load_texts()[self.id]["title"]

    @property
    def shows(self) -> str:
        """The way it shows in a dump."""
        return load_texts()[self.id]["shows"]

    @property
    def pointless(self) -> str:
        """Corrections that do not help until it is fixed, or an empty string."""
        return load_texts()[self.id].get("pointless", "")

    @property
    def advice(self) -> str:
        """What to check or change, with the frameworks' names of the settings."""
        known = list_settings(self.id)
        return load_texts()[self.id]["advice"].replace("{settings}", f" ({'; '.join(known)})" if known else "")
