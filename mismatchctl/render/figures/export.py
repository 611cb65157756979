"""Figures as files, for papers: a picture and its numbers for each, and what they say in one page of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from mismatchctl.escape import markdown
from mismatchctl.marks import CAPTIONS, TOOL
from mismatchctl.render.figures import Figure, overview_figure, run_figures
from mismatchctl.render.text import short
from mismatchctl.result import Result

Made = Callable[[], bytes]


def figures_of_result(result: Result) -> dict[str, Figure]:
    """Every figure of a report by the name of its file; names begin with the run where there are several."""
    overview = overview_figure(result.runs)
    found = {} if overview is None else {overview.name: overview}
    several = len(result.runs) > 1
    for stem, run in zip(_stems(result.runs), result.runs.values(), strict=True):
        for figure in run_figures(run, stem):
            found[figure.name if several else figure.name.removeprefix(f"{stem}-")] = figure
    return found


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


def _stems(names: Mapping[str, object]) -> list[str]:
    """Each run's name as the beginning of a file's, unlike the others."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9_.]+", "_", short(name, 60)).strip("._") or "run"
        stem = next(s for s in (plain, *(f"{plain}_{n}" for n in range(2, len(names) + 2))) if s not in found)
        found.append(stem)
    return found
