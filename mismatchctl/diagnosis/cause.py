"""Definition of a cause: the columns it needs, its test, its texts, and what a test returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mismatchctl.core.batch import Ints
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.evidence import FlagFunction
from mismatchctl.frameworks.registry import list_settings
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


@dataclass(frozen=True)
class Cause:
    """One cause of a mismatch.

    Attributes:
        id: stable name.
        title: what it is called in a report.
        shows: how it shows in a dump.
        test: looks for it in a case that earlier causes have been taken out of.
        advice: what to check or change; `{settings}`: where frameworks have it.
        pointless: which corrections make no sense until it is fixed.
        columns: optional columns of the dump that the test looks at.
        flags: tokens that the pass counts over the whole dump, by name.
        in_layers: whether it is somewhere in the network, so that comparing layers finds it; others are in what goes
            into it, or comes out.
    """

    id: str
    title: str
    shows: str
    test: Callable[[Case], Detection | None]
    advice: str
    pointless: str = ""
    columns: tuple[str, ...] = ()
    flags: FlagFunction = lambda rows: {}
    in_layers: bool = False

    @property
    def advised(self) -> str:
        """The advice, with what frameworks call it."""
        known = list_settings(self.id)
        return self.advice.replace("{settings}", f" ({'; '.join(known)})" if known else "")
