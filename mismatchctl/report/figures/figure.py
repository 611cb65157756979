"""A figure: its title, text, data, and a drawing that is made when needed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from mismatchctl.core.formatting import escape_csv as safe_cell
from mismatchctl.io.files import TOOL_NAME
from mismatchctl.report.figures.svg import FIGURE_WIDTH, Canvas, Drawing, FigureLayout, render_elements
from mismatchctl.report.figures.theme import file_css

DataCell = float | int | str | None


@dataclass(frozen=True)
class FigureData:
    """The numbers behind a figure: heads with units, rows; None or NaN where a value is not known."""

    heads: tuple[str, ...]
    rows: tuple[tuple[DataCell, ...], ...]

    @classmethod
    def of(cls, heads: Iterable[str], *columns: Iterable[DataCell] | NDArray[Any]) -> FigureData:
        """Those of some columns of the same length."""
        cells = (column.tolist() if isinstance(column, np.ndarray) else column for column in columns)
        return cls(tuple(heads), tuple(zip(*cells, strict=True)))

    def csv(self) -> str:
        """As CSV; text that a spreadsheet would run as a formula is quoted."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([[_csv_cell(cell) for cell in row] for row in (self.heads, *self.rows)])
        return stream.getvalue()

    def texts(self) -> list[list[str]]:
        """Rows as a page shows them."""
        return [[str(_csv_cell(cell)) for cell in row] for row in self.rows]


def _csv_cell(cell: DataCell) -> int | str:
    if isinstance(cell, str):
        return safe_cell(cell)
    if cell is None or not math.isfinite(cell):
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else cell


@dataclass(frozen=True)
class Figure:
    """One figure; nothing is drawn before it is asked for.

    Attributes:
        name: unique on its page, and its name as a file.
        title: its message, in a sentence.
        subject: what it shows, with units.
        caption: how to read it.
        alt: what a reader who does not see it is told.
        data: the numbers behind it.
        paint: paints it on a canvas of this layout.
        steps: where its axis of steps runs from and to, for a cursor over all of them; None: it has no such axis.
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
        """As an element of a page, whose style has the theme's classes."""
        return Markup(f'<svg viewBox="{self._box}" role="img" aria-label="{escape(self.alt)}">{self._elements}</svg>')

    @property
    def cursor(self) -> str:
        """Where the axes lie, and between what steps, as a page's script reads it."""
        return " ".join(f"{number:g}" for number in (*self.layout.box, *(self.steps or ())))

    @property
    def _box(self) -> str:
        return f"0 0 {FIGURE_WIDTH:g} {self.layout.height:g}"

    @property
    def drawing(self) -> Drawing:
        """What it consists of."""
        canvas = Canvas(self.layout)
        self.paint(canvas)
        return canvas.drawing

    @cached_property
    def _elements(self) -> str:
        return render_elements(self.drawing)

    def file(self, kind: str) -> bytes:
        """As a file of its own, `svg`, `png` or `pdf`; the same figure gives the same bytes."""
        if kind == "svg":
            return self._svg_file().encode()
        from mismatchctl.report.figures.matplotlib_backend import draw_with_matplotlib

        stream = io.BytesIO()
        made: dict[str, Any] = {"Creator": None, "Producer": TOOL_NAME, "CreationDate": None, "Title": self.title}
        with draw_with_matplotlib(self.drawing) as figure:
            figure.savefig(stream, format=kind, metadata=made if kind == "pdf" else {"Software": TOOL_NAME})
        return stream.getvalue()

    def _svg_file(self) -> str:
        style = f"text {{ font-family: DejaVu Sans, sans-serif }}\n{file_css()}"
        size = f'width="{FIGURE_WIDTH:g}" height="{self.layout.height:g}"'
        return (
            f"<!-- {TOOL_NAME} -->\n"
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{self._box}" {size} role="img">\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.alt)}</desc>\n<style>{style}</style>\n"
            f"{self._elements}</svg>\n"
        )
