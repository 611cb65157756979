"""What a verdict says: each check in a sentence, what it rests on, which part of K3 rose, and the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from mismatchctl.escape import terminal as clean
from mismatchctl.gate.verdict import LOWER, TRENDS, Check, K3Part, Verdict
from mismatchctl.numbers import heavy_tail, number

OUTCOMES = ("passed", "undecided", "failed")
_MEANING = {
    "passed": "nothing is worse than allowed",
    "undecided": "not everything could be judged",
    "failed": "worse than allowed, beyond noise",
}
_PAIRED = {
    "none": "",
    "some clusters": ", some of them the baseline's too",
    "same clusters": ", the same as the baseline's",
    "same tokens": ", the same tokens as the baseline's",
}
_MOST_DIGITS = 17
SHOWN = 8
"""Places of one rule that are named in full where it was judged at many."""


def told(verdict: Verdict) -> Verdict:
    """The same with what it says, so that every medium and every reader of the JSON has it in these words."""
    verdict.says = headline(verdict)
    for check in verdict.checks:
        check.says = sentence(check)
    return verdict


def apart(value: float, limit: float, unit: str = "") -> tuple[str, str]:
    """A value and a limit, with as many digits as it takes that neither is rounded onto or across the other."""
    percent = unit == "fraction"
    for digits in range(3, _MOST_DIGITS + 1):
        shown = tuple(_digits(each, digits, percent) for each in (value, limit))
        read = tuple(float(text.removesuffix(" %").replace(",", "")) for text in shown)
        if (value > limit) == (read[0] > read[1]) and (value < limit) == (read[0] < read[1]):
            break
    return shown[0], shown[1]


def _digits(value: float, digits: int, percent: bool) -> str:
    shown = 100 * value if percent else value
    scientific = shown != 0 and not 1e-3 <= abs(shown) < 1e6
    if not scientific:
        return f"{shown:.{digits}g}{' %' * percent}" if abs(shown) < 10**digits else f"{shown:,.0f}{' %' * percent}"
    mantissa, exponent = f"{shown:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}{' %' * percent}"


def sentence(check: Check) -> str:
    """One check in one sentence: value, interval, limit, baseline, verdict."""
    reason = f", {clean(check.reason)}" if check.reason else ""
    return f"{statement(check)}; {check.outcome}{reason}"


def statement(check: Check) -> str:
    """The same without the verdict."""
    where = "" if check.place == "overall" else f" in {clean(check.place)}"
    head = f"{check.title}{where}: "
    if check.value is None:
        return f"{head}no value"
    if check.limit is None:
        return f"{head}{number(check.value, check.unit)}{_range(check)}"
    value, limit = apart(check.value, check.limit, check.unit)
    beyond, side = exceeds(check), "below" if check.kind in LOWER else "above"
    return f"{head}{_what(check)}{value}{_range(check)} is {'' if beyond else 'not '}{side} {limit}{_origin(check)}"


def _what(check: Check) -> str:
    """What the value is, where it is not the metric itself."""
    return "" if check.kind not in TRENDS else f"its change since {clean(check.since)}, "


def exceeds(check: Check) -> bool:
    """Whether the value is beyond its limit, noise aside."""
    if check.value is None or check.limit is None:
        return False
    return check.value < check.limit if check.kind in LOWER else check.value > check.limit


def _range(check: Check) -> str:
    return _between(check.interval, check.covers, check.unit)


def _between(ends: tuple[float, float] | None, covers: float | None, unit: str) -> str:
    if ends is None:
        return ""
    low, high = (number(end, unit) for end in ends)
    return f" ({low} to {high}{'' if covers is None else ', heavy_tail'})"


def _origin(check: Check) -> str:
    """Where the limit comes from."""
    if check.kind in ("max", "min"):
        return f", the rule's {check.kind}"
    allowance = check.allowance.replace("+", " + ")
    if check.kind in TRENDS:
        return f", {allowance} of what it was"
    side = "above" if check.kind == "increase" else "below"
    interval = _between(check.baseline_interval, check.baseline_covers, check.unit)
    return f", {allowance} {side} the baseline's {number(check.baseline, check.unit)}{interval}"


def basis(check: Check) -> str:
    """What the judgement rests on: what a framework's name means, data, p-value, power."""
    parts = [clean(check.meaning)] if check.meaning else []
    if check.sequences:
        parts.append(f"{check.sequences:,} sequences")
    if check.clusters:
        word = f"{check.clustered_by}s" if check.clustered_by in ("prompt", "step") else "clusters"
        parts.append(f"{check.clusters:,} {word}{_PAIRED[check.pairing]}")
    if check.p is not None and exceeds(check):
        parts.append(f"p = {number(check.p)}")
    if covers := [each for each in (check.covers, check.baseline_covers) if each is not None]:
        parts.append(heavy_tail(min(covers)))
    if check.detectable is not None:
        least = number(check.detectable, check.unit)
        below = check.limit is not None and check.detectable < check.limit
        parts.append(f"would most likely have failed from {least}{_relative(check)} on{_BY_ANOTHER * below}")
    return "; ".join(parts)


_BY_ANOTHER = ", below the limit: for its lost tokens, or another statistic beside K3 as it is"
_ROUNDED = 1e-4  # relative: what the digits of a saved Result leave of no change at all
_PARTS = {"bulk": "the bulk (most tokens)", "shoulder": "the shoulder", "tail": "the tail (a few tokens)"}


def anatomy(check: Check) -> str:
    """Which part of K3 rose by how much, with 90 % intervals; empty where the layers of K3 are not known."""
    found = [f"{_PARTS[part.name]} {_rose(part)}" for part in check.parts if part.rise is not None]
    if not found:
        return ""
    sure = check.kind in TRENDS  # of a change over nights, the part that shows it
    risen = [
        _PARTS[part.name]
        for part in check.parts
        if (part.interval is not None and part.interval[0] > _ROUNDED) or (sure and part.rise)
    ]
    head = f"what rose is {' and '.join(risen)}: " if risen else "no part rose beyond noise: "
    return head + ", ".join(found)


def _rose(part: K3Part) -> str:
    assert part.rise is not None
    rise = _signed(part.rise)
    return rise if part.interval is None else f"{rise} ({_signed(part.interval[0])} to {_signed(part.interval[1])})"


def _signed(rise: float) -> str:
    """A relative change: a factor where it is more than double."""
    rise = 0.0 if abs(rise) < _ROUNDED else rise
    if rise > 1:
        return f"x {number(1 + rise)}"
    digits = 0 if rise == 0 or abs(rise) >= 0.1 else 1 if abs(rise) >= 1e-3 else 2
    return f"{100 * rise:+.{digits}f} %"


def _relative(check: Check) -> str:
    """How far above the baseline what could have been found lies."""
    if check.kind != "increase" or not check.baseline or check.detectable is None:
        return ""
    return f" (+{number(check.detectable / check.baseline - 1, 'fraction')})"


def headline(verdict: Verdict) -> str:
    """The outcome in a few words."""
    counts = tally(verdict.checks)
    against = "" if verdict.baseline is None else f" against {clean(verdict.baseline)}"
    return f"{verdict.outcome}{against}: {_MEANING[verdict.outcome]} ({counts or 'nothing was judged'})"


def chosen(checks: Sequence[Check]) -> tuple[list[Check], int]:
    """The checks of a rule and run that are told one by one; and how many are not: of many, those that passed."""
    if len(checks) <= SHOWN:
        return list(checks), 0
    order = sorted(checks, key=lambda check: ("failed", "undecided", "passed").index(check.outcome))
    bad = sum(check.outcome != "passed" for check in checks)
    shown = order[: max(min(bad, SHOWN), 1)]
    return shown, len(checks) - len(shown)


def tally(checks: Iterable[Check]) -> str:
    """How many checks came to what."""
    outcomes = [check.outcome for check in checks]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES if name in outcomes)


def by_rule(checks: Iterable[Check]) -> list[tuple[tuple[str, str], list[Check]]]:
    """Checks by their run and rule, in order."""
    grouped = groupby(checks, key=lambda check: (check.run, check.rule))
    return [(key, list(found)) for key, found in grouped]
