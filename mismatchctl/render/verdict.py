"""A verdict in words: for the terminal, Markdown, and annotations of a CI run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.escape import github, markdown
from mismatchctl.gate import Check, Need, Verdict
from mismatchctl.gate.verdict import LOWER, TRENDS, Part
from mismatchctl.numbers import DASH, number
from mismatchctl.render.glyphs import Glyphs
from mismatchctl.render.grid import Column, print_grid
from mismatchctl.render.text import clean

_STYLES = {"passed": "green", "undecided": "yellow", "failed": "bold red"}
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
    if check.interval is None:
        return ""
    low, high = (number(end, check.unit) for end in check.interval)
    return f" ({low} to {high})"


def _origin(check: Check) -> str:
    """Where the limit comes from."""
    if check.kind in ("max", "min"):
        return f", the rule's {check.kind}"
    allowance = check.allowance.replace("+", " + ")
    if check.kind in TRENDS:
        return f", {allowance} of what it was"
    side = "above" if check.kind == "increase" else "below"
    interval = (
        ""
        if check.baseline_interval is None
        else " ({} to {})".format(*(number(end, check.unit) for end in check.baseline_interval))
    )
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
    if check.detectable is not None:
        least = number(check.detectable, check.unit)
        parts.append(f"would most likely have failed from {least}{_relative(check)} on")
    return "; ".join(parts)


_PARTS = {"bulk": "the bulk (most tokens)", "shoulder": "the shoulder", "tail": "the tail (a few tokens)"}


def anatomy(check: Check) -> str:
    """Which part of K3 rose by how much, with 90 % intervals; empty where the layers of K3 are not known."""
    found = [f"{_PARTS[part.name]} {_rose(part)}" for part in check.parts if part.rise is not None]
    if not found:
        return ""
    risen = [_PARTS[part.name] for part in check.parts if part.interval is not None and part.interval[0] > 0]
    head = f"what rose is {' and '.join(risen)}: " if risen else "no part rose beyond noise: "
    return head + ", ".join(found)


def _rose(part: Part) -> str:
    assert part.rise is not None
    rise = _signed(part.rise)
    return rise if part.interval is None else f"{rise} ({_signed(part.interval[0])} to {_signed(part.interval[1])})"


def _signed(rise: float) -> str:
    """A relative change: a factor where it is more than double."""
    return f"x {number(1 + rise)}" if rise > 1 else f"{100 * rise:+.2g} %"


def _relative(check: Check) -> str:
    """How far above the baseline what could have been found lies."""
    if check.kind != "increase" or not check.baseline or check.detectable is None:
        return ""
    return f" (+{number(check.detectable / check.baseline - 1, 'fraction')})"


def headline(verdict: Verdict) -> str:
    """The outcome in a few words."""
    tally = _tally(verdict.checks)
    against = "" if verdict.baseline is None else f" against {clean(verdict.baseline)}"
    return f"{verdict.outcome}{against}: {_MEANING[verdict.outcome]} ({tally or 'nothing was judged'})"


def chosen(checks: Sequence[Check]) -> tuple[list[Check], int]:
    """The checks of a rule and run that are told one by one; and how many are not: of many, those that passed."""
    if len(checks) <= SHOWN:
        return list(checks), 0
    order = sorted(checks, key=lambda check: ("failed", "undecided", "passed").index(check.outcome))
    bad = sum(check.outcome != "passed" for check in checks)
    shown = order[: max(min(bad, SHOWN), 1)]
    return shown, len(checks) - len(shown)


def render_verdict(verdict: Verdict, console: Console) -> None:
    """Print the verdict: one sentence per rule and place."""
    glyphs = Glyphs(console)
    console.print(Text(glyphs.text(headline(verdict)), style=_STYLES[verdict.outcome]))
    for note in verdict.notes:
        console.print(Text(glyphs.text(clean(note)), style="yellow"))
    console.print()
    for (run, rule), checks in _by_rule(verdict.checks):
        several = len({check.run for check in verdict.checks}) > 1
        console.print(Text.assemble((glyphs.text(rule), "bold"), glyphs.text(f"  {run}") if several else ""))
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(no_wrap=True)
        rows.add_column(overflow="fold")
        shown, hidden = chosen(checks)
        for check in shown:
            style = _STYLES[check.outcome]
            rows.add_row(Text(f"  {check.outcome}", style=style), Text(glyphs.text(statement(check))))
            for line in filter(None, (check.reason, anatomy(check), basis(check))):
                rows.add_row("", Text(glyphs.text(line), style="dim"))
        console.print(rows)
        if hidden:
            console.print(f"  and {hidden} more: {_tally(checks)} in all")
        console.print()


def _tally(checks: Iterable[Check]) -> str:
    outcomes = [check.outcome for check in checks]
    return ", ".join(f"{outcomes.count(name)} {name}" for name in _STYLES if name in outcomes)


def _by_rule(checks: Iterable[Check]) -> list[tuple[tuple[str, str], list[Check]]]:
    grouped = groupby(checks, key=lambda check: (check.run, check.rule))
    return [(key, list(found)) for key, found in grouped]


def render_plan(needs: Sequence[Need], console: Console) -> None:
    """Print how much data finds a regression."""
    if not needs:
        console.print("No rule bounds a mean from above: there is nothing to plan.")
        return
    columns = [
        Column("rise", [f"+{number(need.regression, 'fraction')}" for need in needs]),
        Column("needs\nsequences", [DASH if need.sequences is None else f"{need.sequences:,}" for need in needs]),
        Column("needs\nclusters", [DASH if need.clusters is None else f"{need.clusters:,}" for need in needs]),
        Column("has\nclusters", [f"{need.have:,}" for need in needs]),
        Column("compared", ["the same clusters" if need.paired else "with others" for need in needs], right=False),
    ]
    names = Column("run and metric", [f"{need.run} {need.metric}" for need in needs])
    print_grid(console, "Data on each side to find a rise in four of five dumps", names, columns)
    if any(need.clusters is None for need in needs):
        console.print(f"{Glyphs(console).text(DASH)}: no number is enough, as where the rule allows that much")


def verdict_markdown(verdict: Verdict) -> str:
    """The verdict as Markdown, for the summary of a CI run."""
    lines = [f"### mismatchctl gate: {markdown(headline(verdict))}", ""]
    lines += ["| verdict | run | rule | what was found | rests on |", "|---|---|---|---|---|"]
    for (run, rule), checks in _by_rule(verdict.checks):
        shown, hidden = chosen(checks)
        lines += [
            f"| {check.outcome} | {markdown(run)} | `{markdown(rule, code=True)}` | {markdown(sentence(check))} "
            f"| {markdown('; '.join(filter(None, (anatomy(check), basis(check)))))} |"
            for check in shown
        ]
        if hidden:
            lines.append(
                f"| | {markdown(run)} | `{markdown(rule, code=True)}` | and {hidden} more | {_tally(checks)} |"
            )
    lines += ["", *(f"- {markdown(note)}" for note in verdict.notes)] if verdict.notes else []
    return "\n".join([*lines, ""])


def workflow_commands(verdict: Verdict) -> list[str]:
    """Workflow commands of GitHub Actions: an error per failed check, a warning per undecided one, notes."""
    words = {"failed": "error", "undecided": "warning"}
    notes = [f"::notice title=mismatch::{github(note)}" for note in verdict.notes]
    judged = [
        f"::{words[check.outcome]} title={github(f'mismatch: {check.rule}', of_property=True)}::"
        f"{github(f'{check.run}: {sentence(check)}')}"
        for _, checks in _by_rule(verdict.checks)
        for check in chosen(checks)[0]
        if check.outcome in words
    ]
    return judged + notes
