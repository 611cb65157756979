"""Figures as files, for papers: a picture and its numbers for each, and what they say in one page of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mismatchctl.escape import markdown
from mismatchctl.marks import CAPTIONS, TOOL
from mismatchctl.render.document import Document, Figures
from mismatchctl.render.figures.figure import Figure
from mismatchctl.render.figures.of_run import overview_figure, run_figures
from mismatchctl.render.text import stems
from mismatchctl.result import Result

Made = Callable[[], bytes]


def figures_of_result(result: Result) -> dict[str, Figure]:
    """Every figure of a report by the name of its file; names begin with the run where there are several."""
    overview = overview_figure(result.runs)
    found = {} if overview is None else {overview.name: overview}
    several = len(result.runs) > 1
    for stem, run in zip(stems(result.runs), result.runs.values(), strict=True):
        for figure in run_figures(run, stem):
            found[figure.name if several else figure.name.removeprefix(f"{stem}-")] = figure
    return found


def figures_of_page(document: Document) -> dict[str, Figure]:
    """Every figure of a page by the name of its file."""
    found = [figure for part in document.parts(Figures) for figure in part.figures]
    return dict(zip(stems([figure.name for figure in found]), found, strict=True))


def files(figures: Mapping[str, Figure], kind: str) -> Iterator[tuple[str, Made]]:
    """Names and what makes their contents: pictures (`svg`, `png` or `pdf`), CSV, and the captions of all."""
    for stem, figure in figures.items():
        yield f"{stem}.{kind}", lambda figure=figure: figure.file(kind)  # type: ignore[misc]
        yield f"{stem}.csv", lambda figure=figure: figure.data.csv().encode()  # type: ignore[misc]
    yield CAPTIONS, lambda: _captions(figures, kind).encode()


def _captions(figures: Mapping[str, Figure], kind: str) -> str:
    lines = [f"<!-- {TOOL} -->", ""]
    for stem, figure in figures.items():
        lines += [f"## [{markdown(figure.subject)}]({stem}.{kind})", ""]
        lines += [f"{markdown(figure.title)}. {markdown(figure.caption)}", "", f"[Numbers]({stem}.csv)", ""]
    return "\n".join(lines)
