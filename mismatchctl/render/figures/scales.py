"""Where ticks stand on an axis, and what they say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power(value: float) -> str:
    """Text of a tick on a logarithmic axis: plain near 1, else 10⁻⁴ or 2·10⁻⁴."""
    if value == 0:
        return "0"
    sign, size = "−" if value < 0 else "", abs(value)
    if 0.01 <= size < 10_000:
        return f"{sign}{size:,.10g}"
    exponent = math.floor(math.log10(size) + 1e-9)
    mantissa = size / 10.0**exponent
    tens = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return f"{sign}{tens}" if abs(mantissa - 1) < 1e-6 else f"{sign}{mantissa:.3g}·{tens}"


def percent(value: float) -> str:
    """Text of a tick on an axis of fractions."""
    return f"{100 * value:.10g} %"


def plain(value: float) -> str:
    """Text of a tick on a linear axis."""
    return f"{value:,.10g}".replace("-", "−") if abs(value) >= 1e-4 or value == 0 else power(value)


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside the interval, every second or third if there are many; 1-2-5 steps if there are few.

    Where no such number lies in it, round ones as on a linear axis.
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        step = math.ceil((last - first + 1) / 7)
        return [10.0**exponent for exponent in range(last, first - 1, -step)][::-1]
    steps = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [tick for tick in steps if low <= tick <= high * (1 + 1e-9)] or round_ticks(low, high)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers inside the interval."""
    span = high - low
    if not span > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20) if span / (size * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def signed_ticks(low: float, high: float, bend: float) -> list[float]:
    """Zero, and powers of ten on either side of it."""
    ends = [max(-low, 0.0), max(high, 0.0)]
    decades = max(1, math.ceil(math.log10(max(*ends, bend) / bend)))
    step = math.ceil(decades / 4)
    sizes = [bend * 10.0**exponent for exponent in range(0, decades + 1, step)]
    return [-s for s in reversed(sizes) if s <= ends[0]] + [0.0] + [s for s in sizes if s <= ends[1]]


Text = Callable[[float], str]
Ticks = Sequence[float]
