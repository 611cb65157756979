"""Predictions in the terminal: values with their intervals, then the models and how they fared on the dump."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from mismatchctl.numbers import DASH, number
from mismatchctl.predict.prediction import Check, Prediction
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, print_grid

TITLES = {
    "rejected_tokens": "tokens rejected",
    "rejected_sequences": "sequences rejected",
    "ess_token": "ESS of tokens",
    "ess_sequence": "ESS of sequences",
}
"""Short titles of what is predicted; every one is a fraction."""
_WIDE, _FINEST = 0.02, 1e-3
"""Ends of an interval wider than the one are not told closer to 0 or 1 than the other."""


def render_predictions(predictions: Mapping[str, Sequence[Prediction]], console: Console) -> None:
    """Print predictions by what they are of (a correction at a point)."""
    glyphs = Glyphs(console)
    for question in dict.fromkeys(found.question for every in predictions.values() for found in every):
        rows = [(name, found) for name, every in predictions.items() for found in every if found.question == question]
        columns = [
            Column("", [TITLES[found.quantity] for _, found in rows], right=False),
            Column("predicted", [number(found.value, "fraction") for _, found in rows]),
            Column("90 % interval", [interval(found) for _, found in rows], right=False),
            Column("", [_brief(found.status) for _, found in rows], right=False),
        ]
        print_grid(console, f"Predicted: {question}", Column("correction", [name for name, _ in rows]), columns)
        for status in dict.fromkeys(found.status for _, found in rows if found.status != _brief(found.status)):
            if status != "ok":
                console.print(Text(glyphs.text(status), style="yellow"))
        for sentence in dict.fromkeys(found.model for _, found in rows):
            console.print(Text(glyphs.text(f"Model: {sentence}."), style="dim"))
        checks = [(name, found.check) for name, found in rows if found.check is not None]
        for words in dict.fromkeys(check_sentence(check) for _, check in checks):
            console.print(Text(glyphs.text(words), style="dim"))


def _brief(status: str) -> str:
    """The part of a status before its colon; nothing where all is well."""
    return "" if status == "ok" else status.partition(":")[0]


def interval(found: Prediction) -> str:
    """The interval of a prediction, a dash without one."""
    if found.interval is None:
        return DASH
    low, high = found.interval
    if high - low < _WIDE:
        return f"{number(low, 'fraction')} to {number(high, 'fraction')}"
    below = f"< {_FINEST:.1%}".replace("%", " %") if 0 < low < _FINEST else number(low, "fraction")
    above = f"> {1 - _FINEST:.1%}".replace("%", " %") if 1 - _FINEST < high < 1 else number(high, "fraction")
    return f"{below} to {above}"


def check_sentence(check: Check) -> str:
    """How the model fared on the dump itself, in a sentence."""
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(check.lengths))
    noise = math.sqrt(2 / math.pi) * sum(check.noise) / len(check.noise)  # as a mean absolute difference
    return (
        f"Check on this dump: from the first {check.start:,} tokens to {lengths}, rejection is off by "
        f"{100 * check.error:.1f} points on average, where {100 * noise:.1f} are noise."
    )
