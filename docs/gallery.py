"""Draw the figures of docs/guides/reports.md from sample_data (`make gallery`).

The page names the command that writes each figure.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare.compare import compare
from mismatchctl.api.sweep.study import ThresholdAxis, make_studies
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.core.formatting import escape_markdown
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.report.figures.figure import Figure
from mismatchctl.report.figures.matplotlib_backend import figure_content, figures_of_page
from mismatchctl.report.html import render_html
from mismatchctl.report.pages import analyze as analyze_page
from mismatchctl.report.pages import compare as compare_page
from mismatchctl.report.pages import sweep as sweep_page
from mismatchctl.report.terminal import print_document
from mismatchctl.results.model import Result

ROOT = Path(__file__).parent.parent
DENSE, MOE = (str(ROOT / "sample_data" / name) for name in ("dense", "moe"))
CORRECTIONS = ("token_tis", "geo_rs", "miles-moe-2")
WIDTH = 110
"""Columns of the terminal."""
TERMINAL = """<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>{styles} .{unique_id}-matrix {{ font-family: DejaVu Sans Mono, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px }}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""A picture of a terminal that loads no font from a network."""


FIGURES = ROOT / "docs/guides/gallery"
ANALYZE = "mismatchctl analyze sample_data/moe -c token_tis -c geo_rs -c miles-moe-2"
SWEEP = """mismatchctl sweep sample_data/moe \\
    --vary weight.truncate=1.1:4:20:log --vary gates.0.keep=1.0005:1.02:20:log \\
    -c '{name: tis-geo, weight: {level: token, truncate: 2}, gates: [{level: geometric, keep: [0.5, 2]}]}'"""
COMPARE = "mismatchctl compare sample_data/dense sample_data/moe"


PAGE = ROOT / "docs/guides/reports.md"
MARK = "<!-- Below this line, `make gallery` (docs/gallery.py) writes the page from sample_data. -->\n"


@dataclass(frozen=True)
class Shown:
    """The figures of one command, with a title and a description."""

    title: str
    why: str
    command: str
    figures: Callable[[], dict[str, Figure]]
    names: tuple[str, ...]


@cache
def of_moe() -> Result:
    """Analyze the run `moe` with three corrections."""
    return analyze([MOE], corrections=[find_preset(name) for name in CORRECTIONS])


@cache
def swept() -> dict[str, Figure]:
    """Sweep the thresholds of token weights and of geometric rejection."""
    both = Correction.model_validate(
        {"name": "tis-geo", "weight": {"level": "token", "truncate": 2.0},
         "gates": [{"level": "geometric", "keep": [0.5, 2.0]}]}
    )  # fmt: skip
    axes = [
        ThresholdAxis.parse("weight.truncate", "1.1:4:20:log"),
        ThresholdAxis.parse("gates.0.keep", "1.0005:1.02:20:log"),
    ]
    return figures_of_page(sweep_page.document(sweep([MOE], make_studies([both], axes))))


@cache
def compared() -> dict[str, Figure]:
    """Compare the two runs."""
    return figures_of_page(compare_page.document(compare([DENSE, MOE])))


PARTS = (
    Shown(
        "Over the steps",
        "This command writes the figures of this section and of the next two sections:",
        f"{ANALYZE} --figures figures", lambda: figures_of_page(analyze_page.document(of_moe())),
        ("k3", "over-rejected_tokens"),
    ),
    Shown(
        "Position and probability",
        "A log ratio is the trainer's log-prob of a token minus the rollout's log-prob.",
        f"{ANALYZE} --figures figures", lambda: figures_of_page(analyze_page.document(of_moe())),
        ("distribution", "joint", "k3_by_position"),
    ),
    Shown(
        "Corrections",
        "The figures show how much data each correction rejects, and the rewards of kept and rejected data.",
        f"{ANALYZE} --figures figures", lambda: figures_of_page(analyze_page.document(of_moe())),
        ("corrections", "kept-reward"),
    ),
    Shown(
        "Thresholds", "The figures show how much data each threshold rejects, and the thresholds on the Pareto front.",
        f"{SWEEP} \\\n    --figures figures", swept,
        ("tis-geo-gates.0.keep-rejected", "tis-geo-front"),
    ),
    Shown(
        "Two runs", "The figures show how much each step changes K3, and the log ratios of the two runs.",
        f"{COMPARE} --figures figures", compared,
        ("change_by_step", "distribution"),
    ),
)  # fmt: skip


def terminal() -> str:
    """Return the output of `analyze` as a picture."""
    output = io.StringIO()
    print_document(
        analyze_page.analyze_screen(of_moe(), ["sample_data/moe"]),
        Console(width=WIDTH, file=output, force_terminal=True, color_system="truecolor", legacy_windows=False),
    )
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(Text.from_ansi(output.getvalue()))
    return console.export_svg(title=f"$ {ANALYZE}", code_format=TERMINAL, unique_id="terminal")


def pictures() -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file in docs/guides/gallery."""
    yield "terminal.svg", terminal().encode()
    for number, part in enumerate(PARTS):
        figures = part.figures()
        for name in part.names:
            yield f"{number}-{name}.svg", figure_content(figures[name], "svg")


def page() -> str:
    """Return docs/guides/reports.md with new figures below the mark."""
    before, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    lines = [
        before + mark, "### The terminal", "",
        f"![{ANALYZE}](gallery/terminal.svg)", "", "```console", f"$ {ANALYZE}", "```", "",
    ]  # fmt: skip
    for number, part in enumerate(PARTS):
        figures = part.figures()
        lines += [f"### {part.title}", "", *textwrap.wrap(part.why, 120), ""]
        if number == 0 or part.command != PARTS[number - 1].command:
            lines += ["```console", f"$ {part.command}", "```", ""]
        for name in part.names:
            figure = figures[name]
            alt = escape_markdown(figure.alt).replace("\n", " ")
            lines += [f"#### {escape_markdown(figure.title)}", "", f"![{alt}](gallery/{number}-{name}.svg)", ""]
            lines += [*textwrap.wrap(escape_markdown(figure.caption), 120), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the pictures and the page."""
    FIGURES.mkdir(exist_ok=True)
    for old in FIGURES.glob("*.svg"):
        old.unlink()
    for name, content in pictures():
        (FIGURES / name).write_bytes(content)
    PAGE.write_text(page(), encoding="utf-8")
    take_screenshot(ROOT / "docs" / "report.png")


def take_screenshot(picture: Path) -> None:
    """Write the first screen of the report on the sample data, if Chromium is installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("no Chromium: the picture of the report stays as it is")
        return
    runs = [Path(run).relative_to(ROOT) for run in (DENSE, MOE)]
    with contextlib.chdir(ROOT), tempfile.TemporaryDirectory() as folder:
        result = analyze([str(run) for run in runs], corrections=[find_preset(name) for name in CORRECTIONS])
        report = Path(folder, "report.html")
        report.write_text(render_html(analyze_page.document(result)), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,760"]
        subprocess.run([browser, *flags, f"--screenshot={picture}", report.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main()
