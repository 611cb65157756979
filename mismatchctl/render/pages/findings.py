"""Findings as cards: what, how sure, its part of the K3, the evidence, what to do; and whose error it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from mismatchctl.numbers import number
from mismatchctl.render.document import BRIEF, Card, Facts, Figures, Later, Section, under
from mismatchctl.result import Example, Fact, Finding, Sides, SidesGroup, SideShare, Value
from mismatchctl.result.story import CALM, percent


def card(finding: Finding, folder: str = "", *, told: bool = True, place: int = 0) -> Card:
    """One finding; `folder` has been named already, without `told` it takes a line, `place` numbers it."""
    share = f", {percent(finding.share_k3)} of the K3" if finding.share_k3 is not None else ""
    return Card(
        finding.confidence, "calm" if finding.cause in CALM else finding.confidence,
        f"{place}. {finding.title}" if place else finding.title,
        "" if told else finding.summary, f"{finding.cause}{share}" if told or place else "",
        list(_gist(finding, folder)) if told else [], list(_details(finding, folder)),
        note=f"{finding.confidence} confidence{share}", most=int(not told and finding.confidence == "low"),
    )  # fmt: skip


def _gist(finding: Finding, folder: str) -> Iterable[tuple[str, str, int]]:
    """What fits on seven lines of a terminal."""
    yield "found", finding.summary, 3
    if finding.examples:
        yield "see", "; ".join(example_text(example, folder) for example in finding.examples[:2]), 1
    yield "do", finding.advice, 2
    if finding.rivals:
        yield "or is it", f"{', '.join(rival.cause for rival in finding.rivals)}? {finding.rivals[0].tell}", 1


def _details(finding: Finding, folder: str) -> Iterable[tuple[str, str]]:
    """All of a finding."""
    yield "found", finding.summary
    for heading, supports in (("for", True), ("against", False)):
        facts = (fact for fact in finding.evidence if fact.supports == supports)
        yield from under(heading, (f"{fact.meaning}: {fact.name} {fact_text(fact)}" for fact in facts))
    if finding.where:
        yield "where", "; ".join(f"{key}: {value}" for key, value in finding.where.items())
    yield from under("see", (example_text(example, folder) for example in finding.examples))
    yield "do", finding.advice
    if finding.pointless:
        yield "pointless", f"until then, {finding.pointless}"
    for rival in finding.rivals:
        yield "or is it", f"{rival.cause}? To tell: {rival.tell}"


def fact_text(fact: Fact) -> str:
    """The value of a fact, with its interval."""
    shown = fact.value if isinstance(fact.value, str) else _plain(fact.value)
    if fact.interval is None:
        return shown
    return f"{shown} ({_plain(fact.interval[0])} to {_plain(fact.interval[1])})"


def _plain(value: float | None) -> str:
    """Whole numbers as they are: steps, shifts and counts are among them."""
    return number(value, "rows") if value is not None and float(value).is_integer() else number(value)


def example_text(example: Example, folder: str = "") -> str:
    """Where an example is; `folder` has been named already."""
    parts = [f"row {example.row}"]
    parts += [f"position {example.position}"] if example.position is not None else []
    parts += [f"sequence {example.sequence_id}"] if example.sequence_id is not None else []
    parts += [f"step {example.step}"] if example.step is not None else []
    return f"{example.file.removeprefix(folder)}: {', '.join(parts)}"


_WORTH_SHORTENING = 8


def folder_of(findings: Iterable[Sequence[Finding]]) -> str:
    """The folder that all examples are in, if leaving it out makes them shorter."""
    folders = [example.file.split("/")[:-1] for every in findings for found in every for example in found.examples]
    shared = takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))
    common = "/".join(names[0] for names in shared)
    return f"{common}/" if len(common) > _WORTH_SHORTENING else ""


_MOST, _MOST_DRAWN = 12, 24


def sides_section(title: str, anchor: str, sides: Sides) -> Section:
    """Which side is wrong, how sure that is, and where."""
    shares = f"the rollout's share of the squared gap is {_share(sides.rollout_share)}"
    rows = [("found", sides.summary), ("split", f"{shares}, of K3 {_share(sides.rollout_share_k3)}")]
    ratio = sides.reference_over_rollout
    if ratio.value is not None:
        error = "" if ratio.se is None else f" ± {ratio.se:.1g}"
        meaning = "1 where the rollout's column is what sampled"
        rows.append(("sampled", f"E[reference/rollout] = {ratio.value:.5g}{error}, {meaning}"))
    rows += [(f"by {name}", _groups(groups)) for name, groups in sides.groups.items()]
    note = f"{sides.side}, {sides.confidence} confidence"
    facts = Facts([*rows, *(("note", note) for note in sides.notes)], reach=BRIEF)
    return Section(title, anchor, note=note).add(facts, Later(lambda: _clouds(sides, anchor)))


def _clouds(sides: Sides, anchor: str) -> Iterator[Figures]:
    """The errors of both sides side by side, by whatever they were taken apart."""
    from mismatchctl.render.figures.dots import dots_figure, sides_dots  # draws: a terminal need not wait for it

    for name, groups in sides.groups.items():
        if 1 < len(groups) <= _MOST_DRAWN:
            errors = {
                own.label: {"rollout": Value(value=own.rollout_rms), "train": Value(value=own.train_rms)}
                for own in groups
            }
            yield Figures([dots_figure(sides_dots(name), errors, f"{anchor}-{name}")])


def _share(share: SideShare) -> str:
    if share.value is None:
        return f"undefined ({share.status})"
    if share.status != "ok":
        return share.status
    interval = "" if share.interval is None else f" [{share.interval[0]:.0%}, {share.interval[1]:.0%}]"
    return f"{share.value:.0%}{interval}"


def _groups(groups: list[SidesGroup]) -> str:
    told = (f"{own.label}: rollout {own.rollout_rms:.2g}, trainer {own.train_rms:.2g}" for own in groups[:_MOST])
    return "; ".join(told) + ("; ..." if len(groups) > _MOST else "")
