"""What a Sweep says, in words: values of axes, wishes, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mismatchctl.numbers import DASH, number
from mismatchctl.predict.prediction import BackTest, Prediction
from mismatchctl.sweep.front import by_cost
from mismatchctl.sweep.model import SolvedThreshold, Sweep
from mismatchctl.sweep.study import Study

MOST_PRESETS = 4
"""Presets named at one place."""
FIGURES = {
    "rejected_tokens": ("fraction", 0),
    "rejected_sequences": ("fraction", 4),
    "ess_token": ("fraction", 0),
    "ess_sequence": ("fraction", 3),
    "weight_mean": ("ratio", 5),
    "weight_bias": ("ratio", 2),
    "k3_kept": ("nats/token", 1),
}
"""What is told of a point: its unit, and how early it goes where there is little room."""
WISHES = {
    "rejected_tokens": "of tokens rejected",
    "rejected_sequences": "of sequences rejected",
    "ess_token": "ESS of tokens",
}
_DIGITS = 6
_WIDE, _FINEST = 0.02, 1e-3
"""Ends of an interval wider than the one are not told closer to 0 or 1 than the other."""

Row = Mapping[str, Any]
Item = TypeVar("Item")


def predictions_of(sweep: Sweep, run: str) -> dict[str, Sequence[Prediction]]:
    """The predictions of one run by correction and point."""
    found: dict[str, Sequence[Prediction]] = {}
    for forecast in sweep.forecasts:
        if forecast.run == run:
            place = sweep.place(forecast.correction, forecast.point)
            values = ", ".join(f"{path} {threshold(value)}" for path, value in place.items())
            found[f"{forecast.correction}: {values}"] = forecast.predictions
    return found


def threshold(value: Any) -> str:
    """A value of an axis: as many digits as tell thresholds apart."""
    if value is None:
        return DASH
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


def at_place(study: Study, point: int) -> str:
    """A point by its axes: `gates.0.keep 2`."""
    values = zip(study.axes, study.points[point], strict=True)
    return ", ".join(f"{axis.path} {threshold(value)}" for axis, value in values)


def telling(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Keys and units of those FIGURES that differ among rows, and of the two that always stand there."""
    always = ("rejected_tokens", "ess_token")
    differing = (key for key in FIGURES if key in always or any(row[key] != rows[0][key] for row in rows))
    return [(key, FIGURES[key][0]) for key in differing]


def by_wish(targets: Sequence[SolvedThreshold]) -> dict[tuple[str, float], list[SolvedThreshold]]:
    """Targets by what was asked for, in order."""
    found: dict[tuple[str, float], list[SolvedThreshold]] = {}
    for target in targets:
        found.setdefault((target.wish, target.wanted), []).append(target)
    return found


def wish_text(key: str, wanted: float) -> str:
    """`5 % of tokens rejected`."""
    return f"{100 * wanted:.10g} % {WISHES[key]}"


def says(sweep: Sweep, run: str) -> list[str]:
    """The answer for one run: the cheapest point of each correction, then a sentence per wish."""
    said = [_cheapest(study, sweep.rows(run, study.name).to_dicts()) for study in sweep.studies]
    found = "; ".join(filter(None, said))
    sentences = [f"At its cheapest, {found}." if found else "No point has every figure."]
    for (key, wanted), chosen in by_wish([target for target in sweep.targets if target.run == run]).items():
        met = [_met(target) for target in chosen if target.status == "ok"]
        sentences.append(f"{wish_text(key, wanted)} – {'; '.join(met) or 'no threshold meets it'}.")
    return sentences


def _met(target: SolvedThreshold) -> str:
    """Where a rule meets its wish, and the interval of that where it is known."""
    interval = "" if target.interval is None else f" ({target_interval(target)})"
    return f"{target.rule}: {threshold(target.threshold)}{interval}"


def _cheapest(study: Study, rows: Sequence[Row]) -> str:
    """What the point costs and gives that rejects least, of those that no other beats."""
    known = by_cost([row for row in rows if row["pareto"]])
    if not known:
        return ""
    row = known[0]
    lost = row["rejected_tokens"]
    cost = f"rejects {number(lost, 'fraction')} of tokens" if lost else "rejects nothing"
    gain = f"ESS {number(row['ess_token'], 'fraction')}"
    if study.correction.weight is not None:
        gain += f", mean weight moved by {number(row['weight_bias'], 'ratio')}"
    return f"{study.name} at {at_place(study, row['point'])} {cost} ({gain})"


def thinned(rows: Sequence[Item], most: int) -> list[Item]:
    """At most so many of them, spread evenly."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def target_interval(target: SolvedThreshold) -> str:
    """The interval of a solved threshold, a dash without one."""
    if target.interval is None:
        return DASH
    low, high = target.interval
    return f"{'below' if low is None else threshold(low)} to {'beyond' if high is None else threshold(high)}"


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


def check_sentence(check: BackTest) -> str:
    """How the model fared on the dump itself, in a sentence."""
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(check.lengths))
    noise = math.sqrt(2 / math.pi) * sum(check.noise) / len(check.noise)  # as a mean absolute difference
    return (
        f"Check on this dump: from the first {check.start:,} tokens to {lengths}, rejection is off by "
        f"{100 * check.error:.1f} points on average, where {100 * noise:.1f} are noise."
    )
