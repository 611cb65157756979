"""A figure: title, text, data, and a drawing that is made on first use."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from mismatchctl.core.formatting import escape_csv
from mismatchctl.io.files import TOOL_NAME
from mismatchctl.report.figures.svg import FIGURE_WIDTH, Canvas, Drawing, FigureLayout, file_css, render_elements

DataCell = float | int | str | None


@dataclass(frozen=True)
class FigureData:
    """The numbers behind a figure. Missing values become empty cells."""

    heads: tuple[str, ...]
    rows: tuple[tuple[DataCell, ...], ...]

    @classmethod
    def of(cls, heads: Iterable[str], *columns: Iterable[DataCell] | NDArray[Any]) -> FigureData:
        """Build a table from columns of the same length."""
        cells = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
        return cls(tuple(heads), tuple(zip(*cells, strict=True)))

    def csv(self) -> str:
        """Return the table as CSV. Text that a spreadsheet could run as a formula is quoted."""
        return "".join(_csv_line(row) for row in (self.heads, *self.rows))

    def texts(self) -> list[list[str]]:
        """Return the rows as strings."""
        return [[str(_csv_cell(cell)) for cell in row] for row in self.rows]


def _csv_line(cells: Sequence[DataCell]) -> str:
    stream = io.StringIO()
    csv.writer(stream).writerow(map(_csv_cell, cells))  # quotes the characters of its line end, CR and LF
    return stream.getvalue().removesuffix("\r\n") + "\n"


def _csv_cell(cell: DataCell) -> int | str:
    if isinstance(cell, str):
        return escape_csv(cell)
    if cell is None or not math.isfinite(cell):
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else cell


@dataclass(frozen=True)
class Figure:
    """One figure, drawn on first use.

    Attributes:
        name: unique on its page, also the file name.
        title: the message.
        subject: the quantity, with units.
        caption: how to read the figure.
        alt: alternative text.
        data: the numbers in the figure.
        paint: draws on a canvas.
        steps: limits of the step axis, if the figure has one, for the page's cursor.
    """

    name: str
    title: str
    subject: str
    caption: str
    alt: str
    data: FigureData
    paint: Callable[[Canvas], None]
    layout: FigureLayout = field(default_factory=FigureLayout)
    steps: tuple[float, float] | None = None

    @cached_property
    def svg(self) -> Markup:
        """An inline SVG element that uses the CSS classes of the page."""
        return Markup(f'<svg viewBox="{self._box}" role="img" aria-label="{escape(self.alt)}">{self._elements}</svg>')

    @property
    def cursor(self) -> str:
        """Position of the axes and the step limits, for the page's script."""
        return " ".join(f"{number:g}" for number in (*self.layout.box, *(self.steps or ())))

    @property
    def _box(self) -> str:
        return f"0 0 {FIGURE_WIDTH:g} {self.layout.height:g}"

    @property
    def drawing(self) -> Drawing:
        """The shapes and axes of the figure."""
        canvas = Canvas(self.layout)
        self.paint(canvas)
        return canvas.drawing

    @cached_property
    def _elements(self) -> str:
        return render_elements(self.drawing)

    def svg_file(self) -> bytes:
        """Return the figure as a standalone SVG file."""
        style = f"text {{ font-family: DejaVu Sans, sans-serif }}\n{file_css()}"
        size = f'width="{FIGURE_WIDTH:g}" height="{self.layout.height:g}"'
        return (
            f"<!-- {TOOL_NAME} -->\n"
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{self._box}" {size} role="img">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.alt)}</desc>\n<style>{style}</style>\n"
            f"{self._elements}</svg>\n"
        ).encode()
