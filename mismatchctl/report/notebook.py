"""Results as HTML pages, notebook cells and matplotlib figures, for the Python API."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape

from matplotlib.figure import Figure as MatplotlibFigure

from mismatchctl.api.advise.advice import Advice
from mismatchctl.api.compare.comparison import Comparison
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.api.sweep.result import Sweep
from mismatchctl.core.formatting import escape_terminal
from mismatchctl.diagnosis.diagnosis import Diagnosis
from mismatchctl.report.document import (
    TERMINAL_AND_PAGE,
    Answers,
    Card,
    DeferredSection,
    Document,
    DocumentPart,
    Facts,
    Figures,
    Note,
    Section,
    Table,
    Tiles,
)
from mismatchctl.report.figures.figure import Figure
from mismatchctl.report.figures.files import figure_content
from mismatchctl.report.figures.matplotlib_backend import draw_figure
from mismatchctl.report.html import render_html
from mismatchctl.report.pages import advise, analyze, compare, diagnose, gate
from mismatchctl.report.pages.sweep import document as sweep_document
from mismatchctl.results.model import Result, RunResult
from mismatchctl.results.views import Renderer, RunViews, View

_COLORS = {
    "bad": "#c0392b", "failed": "#c0392b", "high": "#c0392b", "error": "#c0392b", "alarm": "#b9770e", "fair": "#b9770e",
    "medium": "#b9770e", "undecided": "#b9770e", "warning": "#b9770e", "good": "#1e8449", "passed": "#1e8449",
    "calm": "#1e8449", "advice": "#1e8449", "info": "#2471a3",
}  # fmt: skip
_MAX_ROWS = 20


class ReportRenderer:
    """Draws results with the pages of the report."""

    def page(self, shown: View) -> str:
        """Return a self-contained HTML page."""
        return render_html(_build_document(shown))

    def cell(self, shown: View) -> str:
        """Return HTML for a notebook: the terminal output and the first chart of the page."""
        document = _build_document(shown)
        head = document.headline
        title = ", ".join(filter(None, (head.title, *head.facts)))
        parts = [f"<h3>{_escape_text(title)}</h3>"] if title else []
        parts += [block for section in document.sections for block in _render_part(section)]
        figure = next(_iterate_figures(document.sections), None)
        if figure is not None:
            image = base64.b64encode(figure_content(figure, "svg")).decode()
            parts.append(
                f'<img style="max-width:640px" alt="{_escape_text(figure.alt)}" '
                f'src="data:image/svg+xml;base64,{image}">'
            )
        return f'<div style="max-width:1000px">{"".join(parts)}</div>'

    def figure(self, run: RunViews, name: str) -> MatplotlibFigure:
        """Return a figure of the report by its name."""
        assert isinstance(run, RunResult)
        return draw_figure(run, name)


@cache
def get_report_renderer() -> Renderer:
    """Return the renderer of the report."""
    return ReportRenderer()


def _build_document(shown: View) -> Document:
    if isinstance(shown, Result):
        return analyze.document(shown)
    if isinstance(shown, Sweep):
        return sweep_document(shown)
    if isinstance(shown, Comparison):
        return compare.document(shown)
    if isinstance(shown, Verdict):
        return gate.document(shown)
    if isinstance(shown, Diagnosis):
        return diagnose.document(shown)
    if isinstance(shown, Advice):
        return advise.document(shown)
    raise TypeError(f"a {type(shown).__name__} does not have a page")


def _iterate_figures(parts: Iterable[DocumentPart | None]) -> Iterator[Figure]:
    """Yield figures in the order of the page. Later sections are only built if they are needed."""
    for part in parts:
        if isinstance(part, Figures):
            yield from (figure for figure in part.figures if figure is not None)
        elif isinstance(part, Section):
            yield from _iterate_figures(part.parts)
        elif isinstance(part, DeferredSection):
            yield from _iterate_figures(part.make())


def _render_part(part: DocumentPart) -> Iterator[str]:
    """Yield a part as HTML, if the terminal shows it."""
    if part.reach > TERMINAL_AND_PAGE:
        return
    if isinstance(part, Section):
        blocks = [block for inner in part.parts for block in _render_part(inner)]
        if blocks and part.heading and part.title:
            note = f" <small>{_escape_text(part.note)}</small>" if part.note else ""
            yield f"<h4>{_escape_text(part.title)}{note}</h4>"
        yield from blocks
    elif isinstance(part, Answers):
        yield _render_rows([(line.question, line.text, line.level) for line in part.lines])
    elif isinstance(part, Tiles):
        shown = [tile for tile in part.tiles if tile.first or tile.level == "alarm"]
        yield _render_rows([(tile.title, f"{tile.value}  {tile.verdict}".strip(), "") for tile in shown])
    elif isinstance(part, Facts):
        yield _render_rows([(name, text, "") for name, text in part.rows])
    elif isinstance(part, Note):
        yield f"<p>{_color_text(part.text, part.level)}</p>"
    elif isinstance(part, Card):
        text = f": {_escape_text(part.text)}" if part.text else ""
        below = "".join(f"<br>{_escape_text(f'{heading} {line}'.strip())}" for heading, line, _ in part.lines)
        yield f"<p>{_color_text(part.mark, part.level)} <b>{_escape_text(part.title)}</b>{text}{below}</p>"
    elif isinstance(part, Table):
        yield _render_table(part)


def _render_table(table: Table) -> str:
    chosen = [place for place, head in enumerate(table.heads) if place == 0 or head.drop is not None]
    chosen = [place for place in chosen if not any(row[place].series for row in table.rows[:1])]
    heads = "".join(f"<th>{_escape_text(table.heads[place].short or table.heads[place].text)}</th>" for place in chosen)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_escape_text(row[place].text)}</td>' for place in chosen)}</tr>"
        for row in table.rows[:_MAX_ROWS]
    )
    more = len(table.rows) - _MAX_ROWS
    rest = f'<tr><td colspan="{len(chosen)}">and {more} more</td></tr>' if more > 0 else ""
    title = f"<h4>{_escape_text(table.title)}</h4>" if table.title else ""
    return f"{title}<table><thead><tr>{heads}</tr></thead><tbody>{rows}{rest}</tbody></table>"


def _render_rows(rows: Iterable[tuple[str, str, str]]) -> str:
    left = 'style="text-align:left"'
    cells = "".join(
        f"<tr><th {left}>{_color_text(name, level)}</th><td {left}>{_escape_text(text)}</td></tr>"
        for name, text, level in rows
    )
    return f"<table>{cells}</table>"


def _color_text(text: str, level: str) -> str:
    color = _COLORS.get(level)
    return f'<span style="color:{color}">{_escape_text(text)}</span>' if color else _escape_text(text)


def _escape_text(text: str) -> str:
    return escape(escape_terminal(text))
