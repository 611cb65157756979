"""Figures as files: pictures, CSV files and captions."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from mismatchctl.core.formatting import escape_markdown, file_stems
from mismatchctl.io.files import CAPTIONS_FILE, TOOL_NAME
from mismatchctl.report.document import Document, Figures
from mismatchctl.report.figures.figure import Figure
from mismatchctl.report.figures.runs import k3_figure, run_figures
from mismatchctl.results.model import Result

ContentMaker = Callable[[], bytes]


def figures_of_result(result: Result) -> dict[str, Figure]:
    """Return all figures of a report by file name. If there are several runs, names begin with the run."""
    overview = k3_figure(result.runs, "all-k3") if len(result.runs) > 1 else None
    found = {} if overview is None else {overview.name: overview}
    several = len(result.runs) > 1
    for stem, run in zip(file_stems(result.runs), result.runs.values(), strict=True):
        for figure in chain(*run_figures(run, stem).values()):
            found[figure.name if several else figure.name.removeprefix(f"{stem}-")] = figure
    return found


def figures_of_page(document: Document) -> dict[str, Figure]:
    found = [figure for part in document.parts(Figures) for figure in part.figures]
    return dict(zip(file_stems([figure.name for figure in found]), found, strict=True))


def figure_files(figures: Mapping[str, Figure], kind: str) -> Iterator[tuple[str, ContentMaker]]:
    """Yield names and contents of files: pictures, CSV files, and a file with all captions."""
    for stem, figure in figures.items():
        yield f"{stem}.{kind}", lambda figure=figure: figure_content(figure, kind)  # type: ignore[misc]
        yield f"{stem}.csv", lambda figure=figure: figure.csv().encode()  # type: ignore[misc]
    yield CAPTIONS_FILE, lambda: _format_captions(figures, kind).encode()


def _format_captions(figures: Mapping[str, Figure], kind: str) -> str:
    lines = [f"<!-- {TOOL_NAME} -->", "", "Shaded bands and error bars are 95% intervals.", ""]
    for stem, figure in figures.items():
        caption = f"{escape_markdown(figure.title)}. {escape_markdown(figure.caption)}".strip()
        heading = f"## [{escape_markdown(figure.subject)}]({stem}.{kind})"
        lines += [heading, "", caption, "", f"[Numbers]({stem}.csv)", ""]
    return "\n".join(lines)


def figure_content(figure: Figure, kind: str) -> bytes:
    """Return the figure as an `svg`, `png` or `pdf` file. The same figure gives the same bytes."""
    from mismatchctl.report.figures.matplotlib_backend import draw_with_matplotlib

    stream = io.BytesIO()
    metadata: dict[str, dict[str, Any]] = {
        "pdf": {"Creator": None, "Producer": TOOL_NAME, "CreationDate": None, "Title": figure.title},
        "svg": {"Creator": TOOL_NAME, "Date": None, "Title": figure.title, "Description": figure.alt},
        "png": {"Software": TOOL_NAME},
    }
    with draw_with_matplotlib(figure) as drawn:
        drawn.savefig(stream, format=kind, metadata=metadata[kind])
    content = stream.getvalue()
    return f"<!-- {TOOL_NAME} -->\n".encode() + content[content.index(b"<svg") :] if kind == "svg" else content
