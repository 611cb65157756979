"""Corrections: the rules (`model`), where they come from (`load`), what they do to a block (`apply`)."""

from mismatchctl.correction.apply import CorrectedBlock, Selection, apply
from mismatchctl.correction.gates import GateOutcome
from mismatchctl.correction.load import correction_from_mapping, corrections_from_file
from mismatchctl.correction.model import Correction, Gate, Weight
from mismatchctl.correction.weights import divisor

__all__ = [
    "CorrectedBlock",
    "Correction",
    "Gate",
    "GateOutcome",
    "Selection",
    "Weight",
    "apply",
    "correction_from_mapping",
    "corrections_from_file",
    "divisor",
]
