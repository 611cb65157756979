"""Figures as data: a message, words, numbers, and the same bytes every time; in pages, papers, notebooks."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from matplotlib.textpath import TextPath

from mismatchctl.report.figures.figure import Figure, FigureData
from mismatchctl.report.figures.files import figure_content
from mismatchctl.report.figures.runs import run_figures
from mismatchctl.report.figures.svg import (
    DARK,
    FIGURE_WIDTH,
    LIGHT,
    RAMP,
    SERIES,
    Canvas,
    Drawing,
    FigureAxis,
    FigureLayout,
    LineShape,
    TextShape,
    color_name,
    page_css,
    render_elements,
)
from mismatchctl.results.model import RunResult, Series
from mismatchctl.results.summary import get_summary
from tests.factories.results import make_result
from tests.paths import ROOT
from tests.report.figure_contents import Seen, assert_shown_as_drawn, of_svg


@pytest.fixture(scope="module")
def run() -> RunResult:
    return make_result().runs["run-a"]


@pytest.fixture(scope="module")
def figures(run: RunResult) -> dict[str, Figure]:
    return {figure.name: figure for figure in run_figures(run, "f0")}


def test_each_has_a_message_words_units_and_numbers(figures: dict[str, Figure]) -> None:
    assert len(figures) > 15
    for figure in figures.values():
        assert figure.title and figure.title not in (figure.subject, figure.caption)
        assert len(figure.alt) > 40
        assert figure.data.rows
        assert all(len(row) == len(figure.data.heads) for row in figure.data.rows)
        rows = list(csv.reader(io.StringIO(figure.data.csv())))
        assert len(rows) == len(figure.data.rows) + 1
        assert any(unit in " ".join(rows[0]) for unit in ("(", "probability", "tokens", "ratio")), rows[0]


def test_the_numbers_are_those_of_the_result(run: RunResult, figures: dict[str, Figure]) -> None:
    k3 = figures["f0-k3"].data
    assert k3.heads[:2] == ("step", "K3 (nats/token)")
    assert [row[1] for row in k3.rows] == run.groups.metrics["k3"].value
    assert figures["f0-k3"].title == f"K3 {get_summary(run).growth.text}"
    position = figures["f0-k3_by_position"].data
    assert [row[2] for row in position.rows] == run.breakdowns["position"].k3
    tokens = sum(int(row[2] or 0) for row in figures["f0-distribution"].data.rows)  # type: ignore[arg-type]
    assert tokens == sum(run.distribution.tokens)


def test_each_line_is_held_to_its_own_limit(run: RunResult) -> None:
    """Between the two limits, k-hat of tokens is fine and that of sequences is not."""
    count = len(run.groups.labels)
    khat = {"khat_token": 0.5, "khat_token_limit": 0.7, "khat_sequence": 0.5, "khat_sequence_limit": 0.336}
    metrics = run.groups.metrics | {key: Series(value=[value] * count) for key, value in khat.items()}
    between = run.model_copy(update={"groups": run.groups.model_copy(update={"metrics": metrics})})
    figure = next(figure for figure in run_figures(between, "f0") if figure.name == "f0-khat")
    assert figure.title == f"Above the limit at {count} of {count} steps by sequences"
    assert figure.data.rows[0][1:] == (0.5, 0.5, 0.7, 0.336)


def test_a_band_is_spoken_of_where_one_is_drawn(figures: dict[str, Figure]) -> None:
    said = {name: "The band is" in figure.caption for name, figure in figures.items() if name in ("f0-k3", "f0-khat")}
    assert said == {"f0-k3": True, "f0-khat": False}


def test_colours_are_classes_and_nothing_has_an_id(figures: dict[str, Figure]) -> None:
    css = page_css()
    for figure in figures.values():
        root = ET.fromstring(figure.svg)
        assert root.attrib["aria-label"] == figure.alt
        used = {name for element in root.iter() for name in element.get("class", "").split()}
        assert used and all(f".{name} {{" in css for name in used)
        assert "#" not in re.sub(r">[^<]*<", "><", str(figure.svg).partition(">")[2])


@pytest.mark.slow
def test_a_page_shows_what_matplotlib_draws(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        assert_shown_as_drawn(figure)


@pytest.mark.parametrize("reach", [1.0, 3e-4, 2.5e-5, 4e6])
def test_the_name_of_an_axis_stands_beside_its_ticks(reach: float) -> None:
    """Measured with the font itself: `−0.00025` ran into it."""
    canvas = Canvas(FigureLayout())
    canvas.linear("y", -reach, 3 * reach)
    canvas.axis_titles("step", "K3 (nats/token)")
    _, name = (shape for shape in canvas.drawing.shapes if isinstance(shape, TextShape))
    widths = [TextPath((0, 0), text, size=10.5).get_extents().x1 for _, text in canvas.drawing.y.ticks]
    left = canvas.drawing.layout.box[0] - 6.5 - max(widths)
    assert name.x * FIGURE_WIDTH - name.size / 2 > 2 and name.x * FIGURE_WIDTH + name.size / 2 < left


def test_a_line_ends_with_its_axes_and_keeps_what_shows() -> None:
    """Beyond the axes nothing is written; of ten thousand points, each column's ends and extremes."""
    there = Drawing(FigureLayout(), FigureAxis((0, 9999)), FigureAxis((0, 1)))
    there.shapes = [LineShape([0, 2500, 5000, 7500], [0.5, 2.0, 0.5, np.nan], color=SERIES[0])]
    (left, top, right, bottom), (line, *_) = there.layout.box, lines(there)
    assert len(line.boxes) == 2 and all(box[1] == top - 1 and box[3] < bottom for box in line.boxes)
    assert left == line.boxes[0][0] and line.boxes[1][2] < right
    values = np.random.default_rng(1).random(10_000)
    values[[4000, 7000]] = 0.0, 1.0
    there.shapes = [LineShape(np.arange(10_000), values, color=SERIES[0])]
    (line, *_) = lines(there)
    assert line.boxes == [(left, top, right, bottom)] and len(render_elements(there)) < 30_000


def lines(drawing: Drawing) -> list[Seen]:
    return [seen for seen in of_svg(f"<svg>{render_elements(drawing)}</svg>") if "class l-s0" in seen.look]


@pytest.mark.slow
def test_the_same_figure_gives_the_same_bytes(run: RunResult, figures: dict[str, Figure]) -> None:
    again = {figure.name: figure for figure in run_figures(run, "f0")}
    order = list(again.values())
    for figure in reversed(order):  # the one canvas keeps nothing of the figure before
        assert figure.svg == figures[figure.name].svg
    for kind in ("svg", "png", "pdf"):
        assert figure_content(order[0], kind) == figure_content(figures[order[0].name], kind)
        assert b"mismatchctl" in figure_content(order[0], kind)


def test_nobodys_settings_change_them_nor_they_others(run: RunResult) -> None:
    plain = str(run_figures(run, "f0").trends[0].svg)
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9}):
        assert str(run_figures(run, "f0").trends[0].svg) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_it_can_be_told_in_grey() -> None:
    def lightness(color: str) -> float:
        red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for palette in (LIGHT, DARK):
        steps = [lightness(palette[f"r{index}"]) for index in range(len(RAMP))]
        assert np.all(np.diff(steps) < 0) or np.all(np.diff(steps) > 0)
    assert [color_name(color) for color in SERIES] == [f"s{index}" for index in range(10)]
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_lines_differ_by_more_than_colour(figures: dict[str, Figure]) -> None:
    lines = re.findall(r"<path[^>]*l-s[01]\b[^>]*fill=\"none\"[^>]*>", str(figures["f0-chi2"].svg))
    assert len({"stroke-dasharray" in line for line in lines}) == 2


def test_text_in_numbers_is_no_formula() -> None:
    assert FigureData(("name", "x"), (("=1+1", 1.0), ('a"b', None))).csv() == 'name,x\n\'=1+1,1\n"a""b",\n'


def test_a_notebook_gets_matplotlibs_own(run: RunResult) -> None:
    figure = run.plot("k3_by_position")
    assert isinstance(figure, matplotlib.figure.Figure)
    assert figure.axes[0].get_yscale() == "log"
    assert run.plot("steps") is not run.plot("steps")


@pytest.mark.process
def test_a_page_needs_no_matplotlib() -> None:
    code = """
import sys
from tests.factories.results import make_result
from mismatchctl.report.pages import analyze
from mismatchctl.report.html import render_html
assert "<figure" in render_html(analyze.document(make_result()))
print("matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["False"]


def test_csv_of_labels_with_control_characters() -> None:
    hostile = "a\r=HYPERLINK(1)\n\x1b[2J\x07"
    text = FigureData.of(["label", "value"], [hostile, "=1", "plain"], [1.0, 2.0, 3.0]).csv()
    rows = list(csv.reader(io.StringIO(text, newline="")))
    shown = "a\r'=HYPERLINK(1)\n\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"
    assert rows[1:] == [[shown, "1"], ["'=1", "2"], ["plain", "3"]]
    assert text.count('"') == 2 and not set(text) & {"\x1b", "\x07"}
