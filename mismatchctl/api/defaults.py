"""Choices that both the command line and Python fall back on when the caller names none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatchctl.api.gate.rules import Rule
    from mismatchctl.api.sweep.study import Study
    from mismatchctl.corrections.model import Correction


def corrections_or_default(chosen: Sequence[Correction] | None) -> Sequence[Correction]:
    """Return the corrections to measure: the chosen ones, or the usual five where none were chosen (None)."""
    from mismatchctl.frameworks.registry import DEFAULT_CORRECTIONS, find_preset

    return [find_preset(name) for name in DEFAULT_CORRECTIONS] if chosen is None else chosen


def studies_or_default(chosen: Sequence[Study]) -> Sequence[Study]:
    """Return the studies of a sweep: the chosen ones, or each kind of correction over its usual range."""
    from mismatchctl.api.sweep.study import DEFAULT_STUDIES

    return chosen or DEFAULT_STUDIES


def rules_or_default(chosen: Sequence[Rule]) -> Sequence[Rule]:
    """Return the rules of a gate: the chosen ones, or K3 against the baseline."""
    from mismatchctl.api.gate.rules import DEFAULT_RULES

    return chosen or DEFAULT_RULES
