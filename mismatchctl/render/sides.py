"""Whose error it is, in the terminal: both sides against the third column."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.render.glyphs import Glyphs
from mismatchctl.result import Sides, SidesGroup, SideShare

_MOST = 12


def render_sides(found: Mapping[str, Sides], console: Console) -> None:
    """Say of each run which side is wrong, how sure that is, and where."""
    glyphs = Glyphs(console)
    for name, sides in found.items():
        heading = f"Whose error on {name}" if len(found) > 1 else "Whose error"
        console.print(Text.assemble((glyphs.text(heading), "bold"), f"  {sides.side}, {sides.confidence} confidence"))
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        for label, text in _lines(sides):
            rows.add_row(f"   {label}", Text(glyphs.text(text)))
        console.print(rows, "")


def _lines(sides: Sides) -> list[tuple[str, str]]:
    shares = f"the rollout's share of the squared gap is {_share(sides.rollout_share)}"
    lines = [("found", sides.summary), ("split", f"{shares}, of K3 {_share(sides.rollout_share_k3)}")]
    ratio = sides.reference_over_rollout
    if ratio.value is not None:
        error = "" if ratio.se is None else f" ± {ratio.se:.1g}"
        meaning = "1 where the rollout's column is what sampled"
        lines.append(("sampled", f"E[reference/rollout] = {ratio.value:.5g}{error}, {meaning}"))
    lines += [(f"by {name}", _groups(groups)) for name, groups in sides.groups.items()]
    return [*lines, *(("note", note) for note in sides.notes)]


def _share(share: SideShare) -> str:
    if share.value is None:
        return f"undefined ({share.status})"
    interval = "" if share.interval is None else f" [{share.interval[0]:.0%}, {share.interval[1]:.0%}]"
    return f"{share.value:.0%}{interval}"


def _groups(groups: list[SidesGroup]) -> str:
    told = (f"{own.label}: rollout {own.rollout_rms:.2g}, trainer {own.train_rms:.2g}" for own in groups[:_MOST])
    return "; ".join(told) + ("; ..." if len(groups) > _MOST else "")
