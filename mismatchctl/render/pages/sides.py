"""Whose error it is: both sides held against a reference."""

from __future__ import annotations

from collections.abc import Iterator

from mismatchctl.render.document import BRIEF, Facts, Figures, Later, Section
from mismatchctl.result import Sides, SidesGroup, SideShare, Value

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
