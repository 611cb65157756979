"""A cause of the mismatch as a Result holds it: what speaks for it, where it shows, what to do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mismatchctl.finite import FiniteModel


class Fact(FiniteModel):
    """A number that speaks for a cause, or (`supports` false) against it; `interval` is a 90 % one."""

    name: str
    value: float | int | str | None
    interval: tuple[float, float] | None = None
    supports: bool = True
    meaning: str


class Rival(FiniteModel):
    """A cause that this dump cannot tell apart from the one found, and the column or experiment that would."""

    cause: str
    tell: str


class Example(FiniteModel):
    """A sequence that shows the cause; `position` is where, counted as in the file."""

    file: str
    row: int
    position: int | None = None
    step: str | int | float | bool | None = None
    sequence_id: str | int | None = None
    note: str = ""


Confidence = Literal["high", "medium", "low"]
Side = Literal["rollout", "trainer", "both", "none"]


class Finding(FiniteModel):
    """One cause of the mismatch, as far as the dump shows it.

    `share` is about how much of the summed |log ratio| it explains, `share_k3` its part of the K3: those of a run, with
    what is unexplained and what is noise, add up to 1; null for another reading of what a finding beside it holds.
    `where` are the steps, workers, positions or sequences that it concerns, `pointless` the corrections that make no
    sense until it is fixed.
    """

    cause: str
    confidence: Confidence
    title: str
    summary: str
    share: float | None = None
    share_k3: float | None = None
    evidence: list[Fact]
    where: dict[str, str] = Field(default_factory=dict)
    examples: list[Example] = Field(default_factory=list)
    advice: str
    pointless: str = ""
    rivals: list[Rival] = Field(default_factory=list)
    side: Side | None = None
