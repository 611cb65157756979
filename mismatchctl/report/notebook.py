"""Results as HTML pages, notebook cells and matplotlib figures, for Python."""

from __future__ import annotations

import base64
import io
from functools import cache
from html import escape

from matplotlib.figure import Figure as MatplotlibFigure
from rich.console import Console
from rich.text import Text

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.report.document import Figures
from mismatchctl.report.figures.matplotlib_backend import draw_figure, figure_content
from mismatchctl.report.html import render_html
from mismatchctl.report.pages.saved import PAGES
from mismatchctl.report.terminal import print_document
from mismatchctl.results.model import RunResult
from mismatchctl.results.views import Renderer, TextView, View

_WIDTH = 110


class ReportRenderer:
    """Renders results as pages of the report."""

    def page(self, shown: View) -> str:
        return render_html(PAGES[type(shown)](shown))

    def cell(self, shown: View) -> str:
        """Return HTML for a notebook: the terminal output and the first chart of the page."""
        document, stream = PAGES[type(shown)](shown), io.StringIO()
        print_document(document, Console(file=stream, width=_WIDTH, force_terminal=True, force_jupyter=False))
        pages = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
        pages.print(Text.from_ansi(stream.getvalue()))
        text = pages.export_html(inline_styles=True, code_format='<div><pre style="line-height:1.3">{code}</pre>')
        figures = next(document.parts(Figures), None)
        if figures is None:
            return f"{text}</div>"
        figure = figures.figures[0]
        image = base64.b64encode(figure_content(figure, "svg")).decode()
        alt = escape(escape_terminal(figure.alt))
        return f'{text}<img style="max-width:640px" alt="{alt}" src="data:image/svg+xml;base64,{image}"></div>'

    def figure(self, run: TextView, name: str) -> MatplotlibFigure:
        assert isinstance(run, RunResult)
        return draw_figure(run, name)


@cache
def get_report_renderer() -> Renderer:
    return ReportRenderer()
