"""Presets: corrections with a name, and where each comes from. The generic ones stand here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mismatchctl.correction.model import Correction, Source

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


NONE = Preset(Correction(name="none", about="No correction: every weight is 1 and every token is kept."))

PRESETS: tuple[Preset, ...] = (NONE,)
