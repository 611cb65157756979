"""Presets: corrections with a name, and where each comes from. The generic ones stand here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mismatchctl.correction.model import Correction, Gate, Source

MISMATCH: Source = "train/rollout"
"""The trainer's recomputation over the rollout engine."""

BYPASS: Source = "current/rollout"
"""The policy being updated over the rollout engine: what is left when the recomputation is skipped."""


@dataclass(frozen=True)
class Preset:
    """A named Correction with its origin.

    Attributes:
        correction: the rules; its `name` is the preset's, its `about` says what it does.
        framework: who ships it; empty for the generic ones.
        version: of which release, as year and month.
        source: the commit or the document that says so.
        alias_of: the preset that it is another name of.
        documented: how a document has it otherwise; empty where it agrees with the code, or there is none.
    """

    correction: Correction
    framework: str = ""
    version: str = ""
    source: str = ""
    alias_of: str | None = None
    documented: str = ""

    @property
    def name(self) -> str:
        """How the preset is called."""
        return self.correction.name

    def alias(self, name: str) -> Preset:
        """The same preset under another name."""
        return replace(self, correction=self.correction.model_copy(update={"name": name}), alias_of=self.name)

    def to_mapping(self) -> dict[str, Any]:
        """All of it as plain data."""
        facts = ("name", "framework", "version", "source", "alias_of", "documented")
        return {fact: getattr(self, fact) for fact in facts} | {"correction": self.correction.to_mapping()}


NONE = Preset(Correction(name="none", about="No correction: every weight is 1 and every token is kept."))


def _papers(name: str, about: str, source: str = "", **gate: object) -> Preset:
    made = Correction(name=name, about=f"{about} The bound is an example.", gates=(Gate.model_validate(gate),))
    return Preset(made, source=source or "articles on off-policy correction; no framework ships it")


PRESETS: tuple[Preset, ...] = (
    NONE,
    _papers(
        "staleness-drop", "Sequences sampled more than 4 weight updates ago are dropped.",
        statistic="age", level="sequence", keep=(None, 4.0),
    ),
    _papers(
        "trust-region-mask", "A sequence with a token of K3 above the bound is dropped whole (trust-region masking).",
        source="Trust Region Masking for Long-Horizon LLM Reinforcement Learning, arXiv 2512.23075",
        statistic="k3", level="max", keep=(None, 0.05), effect="zero",
    ),
    _papers(
        "prefix-product", "A token is dropped where the product of the ratios so far leaves the interval.",
        level="sequence", over="prefix", keep=(0.5, 2.0), effect="zero",
    ),
    _papers(
        "prefix-minimum", "A token is dropped where any ratio so far lies below the bound: what follows it, too.",
        level="min", over="prefix", keep=(1e-4, None), clamp="none", effect="zero",
    ),
    _papers(
        "position-weighted",
        "Tokens outside an interval that widens with the square root of their place are dropped.",
        keep=(0.8, 1.25), widen=0.5, effect="zero",
    ),
    _papers(
        "stochastic-rejection", "Tokens above the bound are kept with a chance of bound over ratio, under a seed.",
        keep=(None, 2.0), seed=0, effect="zero",
    ),
)  # fmt: skip
