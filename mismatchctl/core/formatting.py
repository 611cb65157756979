"""Format numbers for people, and escape and shorten text for each output medium."""

from __future__ import annotations

import math
import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Sequence

INTERVAL_LEVEL = 0.95
"""Confidence level of all intervals in results, on screens and in figures."""
INTERVAL_Z = 1.959963984540054
"""Half width of a 95% confidence interval, in standard errors."""
ONE_SIDED_Z = 1.6448536269514722
"""95% quantile of the normal distribution. Decisions use one-sided bounds: estimate ± 1.645 standard errors."""

_SYMBOLS = {"\n": "\u21b5", "\t": "\u21e5"}
_CI_COMMAND = re.compile(r"(^|\s)::(?=\S)")
_LOG_COMMAND = re.compile(r"##(?=(vso)?\[)", re.IGNORECASE)
"""Start of a command, such as `##[group]`, that GitHub and Azure run if it is in the log of a job."""
_MARKDOWN_LINK = re.compile(
    r"(?<=@)(?=\w)|(?<=#)(?=\d)|(?<=[A-Za-z]:)(?=//)|(?<=\bwww)(?=\.)|(?<=\bGH-)(?=\d)", re.IGNORECASE
)
"""Positions that could start a Markdown link: a mention, an issue number or an address."""
FORMULA_START = r"(^|[\r\n])([=+\-@\t])"
"""First characters of a CSV cell, or of a line in a cell, that start a formula in a spreadsheet."""
CSV_CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
"""Control characters that are replaced in CSV files."""
_LONG_WORD = re.compile(r"(\S{60})\S{100,}(\S{30})")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")


def escape_terminal(text: str) -> str:
    """Show invisible and direction-changing characters as symbols, and escape CI log commands (`::error`)."""
    shown = text if text.isprintable() else "".join(map(_make_visible, text))
    if "::" in shown:
        shown = _CI_COMMAND.sub(r"\1\\::", shown)
    return _LOG_COMMAND.sub("#\\\\#", shown) if "##" in shown else shown


def escape_markdown(text: str, *, code: bool = False) -> str:
    """Escape text for a Markdown table cell. @mentions and URLs do not become links."""
    text = escape_terminal(text)
    if code:
        return text.replace("|", "\\|").replace("`", "'")
    text = _MARKDOWN_LINK.sub("\u200b", text)
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", text)


def escape_csv(text: str) -> str:
    """Escape a CSV cell: replace control characters except tabs and line breaks, and mark formulas as text."""
    text = re.sub(CSV_CONTROLS, "\N{REPLACEMENT CHARACTER}", text)
    return re.sub(FORMULA_START, r"\1'\2", text)


def escape_github(text: str, *, of_property: bool = False) -> str:
    """Escape a message or property of a GitHub workflow command, so that it cannot contain another command."""
    text = escape_terminal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text


def shorten(text: str, length: int) -> str:
    """Escape `text`. If it is longer than `length`, cut it and end it with an ellipsis."""
    text = escape_terminal(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def cut_phrase(text: str, length: int) -> str:
    """Shorten a text to about `length` characters. Cut after a sentence if possible, else after a phrase or word."""
    if len(text) <= length:
        return text
    if sentences := re.match(rf"(.{{{length // 2},{length - 1}}}[a-z%)]\.) ", text):
        return sentences[1]
    phrase = re.match(rf"(.{{{length // 2},{length}}})(?:[,;:.] | \()", text)
    shown = phrase[1] if phrase else text[:length].rsplit(" ", 1)[0]
    return f"{shown} …{')' * (shown.count('(') - shown.count(')'))}"


def list_names(names: Sequence[str], length: int) -> str:
    """Join names with commas. If the text is longer than `length`, replace the last names by "and 3 more"."""
    text = ""
    for place, name in enumerate(names):
        if len(text) + len(name) > length:
            return f"{text} and {len(names) - place} more"
        text += f"{', ' if text else ''}{name}"
    return text


def shorten_for_cell(text: str) -> str:
    """Escape `text`, and shorten long names in the middle, so that the column stays narrow."""
    return _LONG_WORD.sub(r"\1…\2", escape_terminal(text))


def file_stems(names: Collection[str]) -> list[str]:
    """Convert names to file names without a suffix. If two file names are equal, number them."""
    found: list[str] = []
    for name in names:
        plain = _UNSAFE_CHARACTERS.sub("_", shorten(name, 60)).strip("._-") or "run"
        found.append(next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found))
    return found


def _make_visible(character: str) -> str:
    code = ord(character)
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if character == " " or character.isprintable():
        return character
    return " " if unicodedata.category(character) == "Zs" else f"\u27e8U+{code:04X}\u27e9"


DASH = "–"
"""The text for an undefined value."""

COUNT_UNITS = frozenset({"tokens", "sequences", "clusters", "rows", "bytes", "0/1"})
"""Units of values that are integers."""
UNITS_AROUND_ONE = frozenset({"fraction", "ratio", "correlation"})
"""Units whose values have more digits near 1: 0.99998 is not shown as 1."""

_DIGITS = 3
_MOST_DIGITS = 9
_SMALLEST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e6
_SMALLEST_PERCENT = 1e-5
_LARGEST_COUNT = 2.0**53  # larger counts and percentages have too many digits to read
_ROUNDING = 1e-13  # smaller relative errors and smaller distances from 1 are rounding errors
_MOST_SKEWED = 1.25  # if the longer side of an interval exceeds half its width by this factor, show its ends
_SMALLEST_DISTANCE = 1e-6  # a value that is nearer to 1 is shown as 1 + distance


def format_number(value: float | None, unit: str = "") -> str:
    """Format a value: `1,234` for a count, `12.3%` for a fraction, `1.23e-5` for a small number."""
    if value is None or not math.isfinite(value):
        return DASH
    if unit in COUNT_UNITS and value == int(value) and abs(value) < _LARGEST_COUNT:
        return f"{int(value):,}"
    if value == 0:
        return "0%" if unit == "fraction" else "0"
    if unit in UNITS_AROUND_ONE and abs(value - 1) < _ROUNDING:
        value = 1.0
    elif unit in UNITS_AROUND_ONE and abs(value - 1) < _SMALLEST_DISTANCE:
        return f"1 {'+' if value > 1 else '−'} {abs(value - 1):.1e}".replace("e-0", "e-")
    if unit == "fraction" and _SMALLEST_PERCENT <= abs(value) < _LARGEST_COUNT:
        return _format_percent(100 * value)
    return _format_scientific_or_plain(value, _digits_around_one(value) if unit in UNITS_AROUND_ONE else _DIGITS)


def format_estimate(
    value: float | None, se: float | None, unit: str = "", interval: tuple[float, float] | None = None
) -> str:
    """Format a value ± half the width of its 95% interval: `(5.36 ± 0.41)e-4`, `13.2 ± 0.78%`.

    If the interval is much wider on one side of the value, show its ends: `2.45e-3 (4.04e-4 to 0.0148)`.
    """
    text = format_number(value, unit)
    if value is None or not math.isfinite(value) or not se or not math.isfinite(se):
        return text
    if se < _ROUNDING * max(abs(value), unit in UNITS_AROUND_ONE or unit == "-"):
        return text
    low, high = interval if interval and interval[0] != interval[1] else (-math.inf, math.inf)
    error = INTERVAL_Z * se if math.isinf(high - low) else abs(high - low) / 2
    if not math.isfinite(error):
        return text
    if math.isfinite(high - low) and max(abs(high - value), abs(value - low)) > _MOST_SKEWED * error:
        return f"{text} ({format_number(low, unit)} to {format_number(high, unit)})"
    around_one = text.startswith("1 ")
    percent = "%" * (
        unit == "fraction" and not around_one and _SMALLEST_PERCENT <= max(abs(value), error) < _LARGEST_COUNT
    )
    if percent:
        text, value, error = text.removesuffix("%"), 100 * value, 100 * error
    largest = max(abs(value), error)
    exponent = max(_exponent(largest), sys.float_info.min_10_exp)
    scientific = not percent and not _SMALLEST_PLAIN <= largest < _LARGEST_PLAIN
    scale = 10.0**exponent if scientific else 1.0
    places = max(0, 1 - _exponent(error / scale))
    decimals = _DIGITS - 1 if scientific else places if abs(value) < error else len(text.partition(".")[2])
    if around_one or places > decimals + _DIGITS or ("e" in text and largest > error and not scientific):
        return f"{text} ± {_format_scientific_or_plain(error, 2)}{percent}"
    rounded = float(f"{error:.1e}") if error >= 100 else error
    middle = f"{_trim_zeros(value / scale, min(places, max(decimals, places - 1)))} ± {rounded / scale:,.{places}f}"
    return f"({middle})e{exponent}" if scientific else f"{middle}{percent}"


def format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def format_heavy_tail(covers: float | None) -> str:
    instead = "fewer than 95%" if covers is None else f"about {covers:.0%}"
    return f"few prompts or rare weights dominate, so the 95% interval contains the true value in {instead} of dumps"


def format_estimate_or_reason(value: float | None, se: float | None, unit: str, status: str) -> str:
    if value is not None:
        return format_estimate(value, se, unit)
    return DASH if status in ("", "ok") else f"{DASH} ({status})"


def format_bytes(size: int) -> str:
    amount, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount, units = amount / 1000, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{_format_plain(amount, _DIGITS)} {units[0]}"


def format_label(value: str | int | float | bool | None) -> str:
    if value is None:
        return "(none)"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else shorten_exponents(f"{value:g}")
    return str(value)


def shorten_exponents(text: str) -> str:
    """Write the exponents in a text without leading zeros: 6.94e-07 becomes 6.94e-7, and 1e+03 becomes 1e3."""
    return re.sub(r"(?<=\d)e(?:\+|(-))0?(?=\d)", r"e\1", text)


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def _format_percent(value: float) -> str:
    """Format a percentage with three digits, or with more digits if it would look like 100%."""
    texts = (_format_plain(value, digits) for digits in range(_DIGITS, 2 * _MOST_DIGITS))
    return f"{next((text for text in texts if value == 100 or float(text.replace(',', '')) != 100), '100')}%"


def _digits_around_one(value: float) -> int:
    """Return the number of digits that shows two digits of the distance from 1: 0.99876 needs 4 digits (0.9988)."""
    distance = abs(value - 1.0)
    if distance == 0 or distance > 0.1:
        return _DIGITS
    return min(_MOST_DIGITS, _DIGITS + max(0, _exponent(value) - _exponent(distance) - 1))


def _format_plain(value: float, digits: int) -> str:
    places = max(0, digits - 1 - _exponent(value))
    return _trim_zeros(value, places)


def _trim_zeros(value: float, places: int) -> str:
    text = f"{value:,.{places}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text


def _format_scientific_or_plain(value: float, digits: int) -> str:
    if _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN:
        return _format_plain(value, digits)
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def format_command(verb: str, paths: Sequence[str], options: str = "", most: int = 3) -> str:
    """Return a command line with the paths. If more than `most`, show only the first (all after `--rollout`)."""
    most = len(paths) if paths[:1] == ["--rollout"] else most
    chosen = paths if len(paths) <= most else paths[:1]
    shown = [shlex.quote(escape_terminal(path)) for path in chosen] + ["..."] * (len(paths) > most)
    return " ".join(filter(None, ["mismatchctl", verb, *shown, options]))
