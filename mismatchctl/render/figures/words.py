"""What figures say: a message from their own values, and a description for who does not see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.numbers import number
from mismatchctl.render.text import clean, short

MOST_DESCRIBED = 12
"""Lines that a description goes through one by one."""


def extremes(called: str, values: Float64s, names: Sequence[str], *, lowest: bool = False, share: bool = False) -> str:
    """Between what a series runs and where it is largest, or lowest."""
    unit = "fraction" if share else ""
    known = np.flatnonzero(np.isfinite(values))
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    if values[low] == values[high]:
        return f"{called} is {number(float(values[low]), unit)} throughout"
    place, other = (low, high) if lowest else (high, low)
    word, rest = ("falls to", "highest") if lowest else ("reaches", "lowest")
    return (
        f"{called} {word} {number(float(values[place]), unit)} at step {names[place]} "
        f"({rest} {number(float(values[other]), unit)} at step {names[other]})"
    )


def outside(called: str, values: Float64s, low: Float64s, high: Float64s, names: Sequence[str]) -> str:
    """How often 0 lies outside a series' band."""
    known = np.isfinite(values)
    off = known & ((low > 0) | (high < 0))
    if not off.any():
        return f"{called}: 0 within its error at all of {int(known.sum())} steps"
    far = int(np.nanargmax(np.where(known, np.abs(values), np.nan)))
    return (
        f"{called} beyond its error at {int(off.sum())} of {int(known.sum())} steps, "
        f"farthest {number(float(values[far]))} at step {names[far]}"
    )


def described(axis: str, names: Sequence[str], lines: Mapping[str, Float64s], along: str = "step") -> str:
    """Each line from its first to its last value, with its ends."""
    said = [_course(short(name, 40), names, values) for name, values in list(lines.items())[:MOST_DESCRIBED]]
    more = f" And {len(lines) - MOST_DESCRIBED} lines more." if len(lines) > MOST_DESCRIBED else ""
    return clean(f"Lines of {axis} by {along}, {names[0]} to {names[-1]}. {' '.join(said)}{more}")


def _course(name: str, names: Sequence[str], values: Float64s) -> str:
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return f"{name}: not known."
    low, high = known[np.argmin(values[known])], known[np.argmax(values[known])]
    first, last, least, most = (number(float(values[index])) for index in (known[0], known[-1], low, high))
    return f"{name}: {first} first, {last} last, smallest {least} at {names[low]}, largest {most} at {names[high]}."
