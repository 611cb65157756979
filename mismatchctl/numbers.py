"""Numbers for people: enough digits to tell two apart, no more; the same in every medium."""

from __future__ import annotations

import math

DASH = "–"
"""What stands in place of a value that is undefined; the reason stands beside it."""

COUNTS = frozenset({"tokens", "sequences", "clusters", "rows", "bytes", "0/1"})
"""Units of whole numbers."""
AROUND_ONE = frozenset({"fraction", "ratio", "correlation"})
"""Units whose distance from 1 is what matters: 0.99998 never reads as 1."""

_DIGITS = 3
_MOST_DIGITS = 9
_SMALLEST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e6
_SMALLEST_PERCENT = 1e-5
_ROUNDING = 1e-13  # a standard error this small beside the value, or a distance from 1, is the arithmetic's
_INVISIBLE = 1e-6  # nearer to 1 than this, the distance is written out


def number(value: float | None, unit: str = "") -> str:
    """A value in its unit: counts with separators, fractions as percent, small ones in scientific notation."""
    if value is None or not math.isfinite(value):
        return DASH
    if unit in COUNTS and value == int(value):
        return f"{int(value):,}"
    if value == 0:
        return "0 %" if unit == "fraction" else "0"
    if unit in AROUND_ONE and abs(value - 1) < _ROUNDING:
        value = 1.0
    elif unit in AROUND_ONE and abs(value - 1) < _INVISIBLE:
        return f"1 {'+' if value > 1 else '−'} {abs(value - 1):.1e}".replace("e-0", "e-")
    if unit == "fraction" and abs(value) >= _SMALLEST_PERCENT:
        return f"{_plain(100 * value, _digits_around_one(value))} %"
    return _scientific_or_plain(value, _digits_around_one(value) if unit in AROUND_ONE else _DIGITS)


def estimate(value: float | None, se: float | None, unit: str = "") -> str:
    """A value ± its standard error, both to the same place: `(5.36 ± 0.21)e-4`, `13.2 ± 0.4 %`."""
    if value is None or not math.isfinite(value) or not se or not math.isfinite(se):
        return number(value, unit)
    if se < _ROUNDING * max(abs(value), unit in AROUND_ONE or unit == "-"):
        return number(value, unit)
    percent = unit == "fraction" and max(abs(value), se) >= _SMALLEST_PERCENT
    if percent:
        value, se = 100 * value, 100 * se
    exponent = _exponent(max(abs(value), se))
    scientific = not percent and not _SMALLEST_PLAIN <= max(abs(value), se) < _LARGEST_PLAIN
    scale = 10.0**exponent if scientific else 1.0
    value, se = value / scale, se / scale
    places = max(0, min(1 - _exponent(se), _MOST_DIGITS))
    middle = f"{_trimmed(value, places)} ± {se:.{places}f}"
    if se < 0.5 * 10.0**-places:
        middle = f"{_trimmed(value, places)} ± {_scientific_or_plain(se, 2)}"
    return f"({middle})e{exponent}" if scientific else f"{middle} %" if percent else middle


def counted(count: int, noun: str) -> str:
    """A number of things: `1 step`, `1,024 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def heavy_tail(covers: float | None) -> str:
    """What the status of an interval says, and how often such an interval holds the truth where that is known."""
    instead = "less" if covers is None else f"about {covers:.0%}".replace("%", " %")
    return f"heavy_tail: it rests on few clusters or rare weights; the 90 % interval covers {instead}"


def estimate_or_reason(value: float | None, se: float | None, unit: str, status: str) -> str:
    """An estimate, or a dash and the reason why there is none."""
    if value is not None:
        return estimate(value, se, unit)
    return DASH if status in ("", "ok") else f"{DASH} ({status})"


def bytes_size(size: int) -> str:
    """A file size: `4.2 MB`."""
    amount, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{_plain(amount, _DIGITS)} {units[0]}"


def label(value: str | int | float | bool | None) -> str:
    """A step, or a value of a `--by` column, as text."""
    if value is None:
        return "(none)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def _digits_around_one(value: float) -> int:
    """Significant digits so that three digits of the distance from 1 show."""
    distance = abs(value - 1.0)
    if distance == 0 or distance > 0.1:
        return _DIGITS
    return min(_MOST_DIGITS, _DIGITS + max(0, _exponent(value) - _exponent(distance) - 1))


def _plain(value: float, digits: int) -> str:
    places = max(0, digits - 1 - _exponent(value))
    return _trimmed(value, places)


def _trimmed(value: float, places: int) -> str:
    text = f"{value:,.{places}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def _scientific_or_plain(value: float, digits: int) -> str:
    if _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN:
        return _plain(value, digits)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
