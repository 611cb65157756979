"""What `advise` says in the terminal: what to fix first, else the ranking with its prices."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.advise import Advice, Advised, Ahead
from mismatchctl.render.glyphs import Glyphs


def render_advice(found: Mapping[str, Advice], console: Console) -> None:
    """The advice for each run."""
    for run, advice in found.items():
        glyphs = Glyphs(console)
        console.print(Text.assemble((glyphs.text(run), "bold"), f": {glyphs.text(headline(advice))}"))
        if advice.fix_first is not None:
            console.print(Text(f"  {glyphs.text(advice.fix_first.summary)}"))
            console.print(Text(f"  do: {glyphs.text(advice.fix_first.advice)}"))
        if advice.advice:
            console.print(_table(advice, glyphs))
        for own in advice.yours if advice.advice else ():
            console.print(Text(f"  {glyphs.text(against_yours(own, advice.advice[0]))}."))
        if advice.stable is not None and advice.advice:
            console.print(Text(f"  {advice.stable:.0%} of random halves of the prompts advise the same, up to ties."))
        for note in advice.notes:
            console.print(Text(f"  {glyphs.text(note)}.", style="dim"))
        if advice.advice and advice.advice[0].config:
            _print_config(advice.advice[0].config, console)
        console.print()


def headline(advice: Advice) -> str:
    """The answer in one sentence."""
    until = ""
    if advice.fix_first is not None:
        if not advice.advice:
            return f"fix this first, nothing corrects it: {advice.fix_first.title}"
        until = f"fix this first: {advice.fix_first.title}; until then, "
    if not advice.advice:
        return "nothing can be ranked"
    best = advice.advice[0]
    size = f"at {advice.batch:,} sequences an update"
    if best.name == "none":
        return f"{until}no correction: nothing beats it beyond noise {size}"
    cost = f"rejects {best.rejected_tokens:.1%} of the tokens" if best.rejected_tokens else "rejects nothing"
    return f"{until}{best.name}: {best.gain:.0%} less error of the gradient than no correction {size}; {cost}"


def against_yours(own: Advised, best: Advised) -> str:
    """What you have against the first, in one sentence."""
    if own.ties:
        return f"{own.name} cannot be told from {best.name}"
    times = own.mse / best.mse if best.mse else 1.0
    return f"{own.name} has {times:.2g} times the error of the gradient that {best.name} has: {own.why}"


def _table(advice: Advice, glyphs: Glyphs) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("correction", overflow="fold")
    for heading in ("error", "bias²", "variance", "rejected", "ESS", "next batch", "twice as long"):
        table.add_column(glyphs.text(heading), justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    every = [
        *((f"{place}", own) for place, own in enumerate(advice.advice, start=1)),
        *(("", own) for own in advice.yours),
    ]
    scale = max(own.mse for _, own in every) or 1.0
    for place, own in every:
        table.add_row(
            place,
            glyphs.text(own.name),
            f"{own.mse / scale:.3f}",
            f"{max(own.bias2, 0.0) / scale:.3f}",
            f"{own.variance / scale:.3f}",
            _rejected(own),
            f"{own.ess:.2f}",
            glyphs.text(_ahead(own.next_batch)),
            glyphs.text(_ahead(own.twice_the_length)),
            own.why,
        )
    return table


def _rejected(own: Advised) -> str:
    return f"{own.rejected_tokens:.1%}" if own.rejected_tokens else "0"


def _ahead(ahead: Ahead | None) -> str:
    if ahead is None or ahead.value is None:
        return "–"
    if ahead.interval is None or ahead.value == ahead.interval[0] == ahead.interval[1]:
        return f"{ahead.value:.1%}"
    return f"{ahead.value:.1%} [{ahead.interval[0]:.0%}, {ahead.interval[1]:.0%}]"


def _print_config(config: dict[str, object], console: Console) -> None:
    import yaml

    console.print(Text("  as configuration:"))
    for line in yaml.safe_dump(config, sort_keys=False).splitlines():
        console.print(Text(f"    {line}"))
