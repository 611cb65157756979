"""Reports of layer-wise comparators in the terminal: where the runs part, and how the difference grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.frameworks.layers import LayerReport, Tensor
from mismatchctl.frameworks.layers.noise import LogitNoise, held_against
from mismatchctl.render.glyphs import Glyphs


def render_layers(reports: Sequence[LayerReport], noise: Mapping[str, LogitNoise], console: Console) -> None:
    """Say of each report which tensor is the first bad one, and hold it against the dump's own noise."""
    glyphs = Glyphs(console)
    for report in reports:
        rank = f", rank {report.rank}" if report.rank is not None else ""
        console.print(Text.assemble((glyphs.text(report.file), "bold"), glyphs.text(f": {report.tool}{rank}")))
        rows = Table.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        for heading, text in _lines(report, glyphs):
            rows.add_row(f"   {heading}", Text(glyphs.text(text)))
        for name, found in noise.items():
            rows.add_row("   dump", Text(glyphs.text(f"{name}: {held_against(report, found)}")))
        console.print(rows, "")


def _lines(report: LayerReport, glyphs: Glyphs) -> list[tuple[str, str]]:
    lines = [("first bad", headline(report))]
    apart, bad = report.first_apart, report.first_bad
    if apart is not None and (bad is None or (apart.layer, apart.step) != (bad.layer, bad.step)):
        lines.append(("yet", f"{tensor_text(apart)} {apart.why}, within the tool's tolerance"))
    if len(report.growth) > 1:
        first, last = report.growth[0][0], report.growth[-1][0]
        bars = glyphs.sparkline([value or None for _, value in report.growth])
        lines.append(("growth", f"layer {first} {bars} layer {last}"))
    lines.append(("measure", report.measure))
    return [*lines, *(("note", note) for note in report.notes)]


def headline(report: LayerReport) -> str:
    """The first bad tensor in a sentence: where, how far, and how good it was before."""
    if report.first_bad is None:
        return f"none of {report.tensors:,} tensors is outside the tool's tolerance"
    words = [f"{tensor_text(report.first_bad)}: {report.first_bad.why}"]
    if report.before is not None:
        words.append("before it all equal" if report.before == 0 else f"before it all within {report.before:.2g}")
    if report.last_good is not None:
        words.append(f"last good layer {report.last_good}")
    return "; ".join(words)


def tensor_text(tensor: Tensor) -> str:
    """`layer 3, mlp_output, 0.39 (step 1)`."""
    place = "beside the layers" if tensor.layer is None else f"layer {tensor.layer}"
    value = "" if tensor.value is None else f", {tensor.value:.2g}"
    step = "" if tensor.step is None else f" (step {tensor.step})"
    return f"{place}, {tensor.name}{value}{step}"
