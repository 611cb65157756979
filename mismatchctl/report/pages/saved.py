"""Saved results of several commands on one page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.compare.comparison import FORMAT, Comparison
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.api.sweep.result import Sweep
from mismatchctl.api.sweep.serialization import sweep_from_json
from mismatchctl.errors import DataError
from mismatchctl.report.document import Card, Document, Figures, Headline, Section, iterate_parts
from mismatchctl.report.pages import advise, compare, gate
from mismatchctl.report.pages.analyze import document
from mismatchctl.report.pages.sweep import document as sweep_document
from mismatchctl.results.model import Result
from mismatchctl.results.reader import parse_result, read_json

SavedResult = Result | Comparison | Verdict | Sweep | dict[str, RunAdvice]
SavedFile = tuple[Path, Any, SavedResult]
"""The path, the JSON and the result of a file, or of a section in it."""
_REMEDY = "pass JSON files that analyze, sweep, compare, advise or gate wrote"


def read_saved(paths: Sequence[Path]) -> list[SavedFile]:
    """Read results that commands wrote as JSON. A Result is followed by its sections from other commands."""
    found: list[SavedFile] = []
    for path in paths:
        data = read_json(path, _REMEDY)
        kept = _parse_saved(data, path)
        found.append((path, data, kept))
        for section in kept.sections if isinstance(kept, Result) else ():
            found.append((path, section, _parse_saved(section, path)))
    return found


def combine_results(found: Sequence[SavedFile]) -> Result:
    """Merge the Results. Runs with the same name get the file name as a suffix. Other results become sections."""
    results = [(path.stem, kept) for path, _, kept in found if isinstance(kept, Result)]
    if not results:
        problem = "expected at least one Result, found only results of other commands"
        raise DataError(problem, file=str(found[0][0]), remedy="add a file that analyze -o wrote")
    names, every = [name for _, result in results for name in result.runs], [result for _, result in results]
    merged = every[0].model_copy(deep=True)
    merged.runs = {
        name if names.count(name) == 1 else f"{name} ({file})": run
        for file, result in results
        for name, run in result.runs.items()
    }
    corrections = {each.name: each for result in reversed(every) for each in reversed(result.corrections)}
    merged.corrections = list(reversed(corrections.values()))
    merged.provenance.inputs = [file for result in every for file in result.provenance.inputs]
    merged.provenance.left_out = [row for result in every for row in result.provenance.left_out]
    merged.warnings = list(dict.fromkeys(warning for result in every for warning in result.warnings))
    merged.sections = [data for _, data, kept in found if not isinstance(kept, Result)]
    return merged


def _parse_saved(data: Any, path: Path) -> SavedResult:
    try:
        kept = _parse_sections(data) if isinstance(data, dict) and "provenance" not in data else None
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {str(error).splitlines()[0]}", file=str(path), remedy=_REMEDY) from None
    return parse_result(data, str(path)) if kept is None else kept


def _parse_sections(data: Mapping[str, Any]) -> SavedResult | None:
    plain = {key: value for key, value in data.items() if key not in ("tool", "version", "format")}
    if "contrasts" in data:
        if data.get("format") != FORMAT:
            raise ValueError(
                f"the comparison has format {data.get('format')!r}, but this version reads format {FORMAT}"
            )
        return Comparison.model_validate(data)
    if "checks" in data:
        return Verdict.model_validate(plain)
    if "studies" in data:
        return sweep_from_json(data)
    if "basis" in data:
        return {"": RunAdvice.model_validate(plain)}
    runs = data.get("runs")
    if isinstance(runs, dict) and runs and all(isinstance(run, dict) and "basis" in run for run in runs.values()):
        return {run: RunAdvice.model_validate(found) for run, found in runs.items()}
    return None


def combined_document(found: Sequence[SavedFile]) -> Document:
    """Build one page of several results. A single result gets the page of its command."""
    if len(found) == 1:
        return _SECTION_KINDS[type(found[0][2])][1](found[0][2])
    doc = Document(Headline(f"{len(found)} results", subtitle="report"))
    has_result = any(isinstance(kept, Result) for _, _, kept in found)
    if has_result:
        doc = document(combine_results(found), sweeps=[kept for _, _, kept in found if isinstance(kept, Sweep)])
    opening, closing, seen = doc.sections[:-1], doc.sections[-1:], set[type]()
    for number, kept in enumerate(kept for _, _, kept in found if not isinstance(kept, Result)):
        title, page = _SECTION_KINDS[type(kept)]
        own_page, anchor = page(kept), f"part-{number}"
        if isinstance(kept, Verdict):  # the verdict of the gate comes first
            card = Card(kept.outcome, kept.outcome, own_page.headline.title.replace(kept.outcome, "The gate", 1))
            opening.insert(has_result, Section("", f"verdict-{number}").add(card))
        section = Section(title, anchor, note=own_page.headline.title)
        for part in iterate_parts(own_page.sections) if type(kept) in seen else ():
            if isinstance(part, Section):
                part.anchor = f"{anchor}-{part.anchor}"
            elif isinstance(part, Figures):
                part.axes = ()  # the sliders move the figures of the first sweep
        seen.add(type(kept))
        left_out = ("provenance", f"{anchor}-explore")  # a page has one explorer
        opening.append(section.add(*(part for part in own_page.sections if not part.anchor.endswith(left_out))))
    doc.sections = [*opening, *closing]
    return doc


_SECTION_KINDS: dict[type, tuple[str, Callable[[Any], Document]]] = {
    Result: ("Runs", document), Comparison: ("Compared", compare.document),
    Sweep: ("Thresholds", sweep_document), Verdict: ("The gate", gate.document),
    dict: ("Which correction", advise.document),
}  # fmt: skip
