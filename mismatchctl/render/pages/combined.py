"""One page of several results: runs side by side, with what was swept, compared, advised and judged of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.advise import Advice
from mismatchctl.compare.model import FORMAT, Comparison
from mismatchctl.correction import Correction
from mismatchctl.errors import DataError
from mismatchctl.gate import Verdict
from mismatchctl.render.document import Card, Document, Headline, Section
from mismatchctl.render.pages import advise, analyze, compare, gate, sweep
from mismatchctl.result import Result
from mismatchctl.result.read import read_json, result_of
from mismatchctl.sweep.model import Sweep
from mismatchctl.sweep.saved import from_json

Saved = Result | Comparison | Verdict | Sweep | dict[str, Advice]
_REMEDY = "name files that analyze, sweep, compare, advise or gate wrote as JSON"


def read(paths: Sequence[Path]) -> list[tuple[str, Saved]]:
    """What verbs wrote as JSON, each under the name of its file; what a Result holds of other verbs follows it.

    Raises:
        DataError: one is something else, or damaged.
    """
    found: list[tuple[str, Saved]] = []
    for path in paths:
        data = read_json(path, _REMEDY)
        kept = _of(data, path) or result_of(data, str(path))
        found.append((path.stem, kept))
        for section in kept.sections if isinstance(kept, Result) else ():
            own = _of(section, path)
            if own is None:
                raise DataError("damaged: sections: one is of no verb", file=str(path), remedy=_REMEDY)
            found.append((path.stem, own))
    return found


def gather(paths: Sequence[Path]) -> Result:
    """All of it as one Result: runs side by side, what was swept, compared, advised and judged of them as sections.

    Raises:
        DataError: no file is a Result, or one is none of these.
    """
    results, others = [], []
    for path in paths:
        data = read_json(path, _REMEDY)
        if _of(data, path) is None:
            results.append((path.stem, result_of(data, str(path))))
        else:
            others.append(data)
    if not results:
        raise DataError("no Result, to hold the others", file=str(paths[0]), remedy="name what analyze -o wrote")
    made = _side_by_side(results)
    made.sections = [*(section for _, result in results for section in result.sections), *others]
    return made


def _of(data: Any, path: Path) -> Saved | None:
    """What a verb other than analyze wrote, told by what it holds; None where it is of none."""
    try:
        return _told(data) if isinstance(data, dict) and "provenance" not in data else None
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {str(error).splitlines()[0]}", file=str(path), remedy=_REMEDY) from None


def _told(data: Mapping[str, Any]) -> Saved | None:
    plain = {key: value for key, value in data.items() if key not in ("tool", "version", "format")}
    if "contrasts" in data:
        if data.get("format") != FORMAT:
            raise ValueError(f"comparison format {data.get('format')!r}, this version reads {FORMAT}")
        return Comparison.model_validate(data)
    if "checks" in data:
        return Verdict.model_validate(plain)
    if "studies" in data:
        return from_json(data)
    if "basis" in data:
        return {"": Advice.model_validate(plain)}
    runs = data.get("runs")
    if isinstance(runs, dict) and runs and all(isinstance(run, dict) and "basis" in run for run in runs.values()):
        return {run: Advice.model_validate(found) for run, found in runs.items()}
    return None


def document(paths: Sequence[Path]) -> Document:
    """The page of all of it; one thing alone has the page of its verb."""
    found = read(paths)
    if len(found) == 1:
        return _KINDS[type(found[0][1])][1](found[0][1])
    results = [(name, kept) for name, kept in found if isinstance(kept, Result)]
    made = Document(Headline(f"{len(found)} results", what="report"))
    if results:
        made = analyze.document(_side_by_side(results))
    opening, closing, told = made.sections[:-1], made.sections[-1:], set[type]()
    terms = [made.glossary]
    for number, kept in enumerate(kept for _, kept in found if not isinstance(kept, Result)):
        title, page = _KINDS[type(kept)]
        own, anchor = page(kept), f"part-{number}"
        if isinstance(kept, Verdict):  # nobody should have to look for it
            card = Card(kept.outcome, kept.outcome, own.headline.title.replace(kept.outcome, "The gate", 1))
            opening.insert(bool(results), Section("", f"verdict-{number}").add(card))
        section = Section(title, anchor, note=own.headline.title)
        section.inside = f"{anchor}-" if type(kept) in told else ""
        told.add(type(kept))
        opening.append(section.add(*(part for part in own.sections if getattr(part, "anchor", "") != "provenance")))
        terms.append(own.glossary)
    made.sections, made.glossary = [*opening, *closing], lambda: [entries for each in terms for entries in each()]
    return made


_KINDS: dict[type, tuple[str, Callable[[Any], Document]]] = {
    Result: ("Runs", analyze.document), Comparison: ("Compared", compare.document),
    Sweep: ("Thresholds", sweep.document), Verdict: ("The gate", gate.document),
    dict: ("Which correction", advise.document),
}  # fmt: skip
"""What a section of each is called, and its page."""


def _side_by_side(results: Sequence[tuple[str, Result]]) -> Result:
    """Results as one: every run under its name, those of equal names told apart by their files."""
    if len(results) == 1:
        return results[0][1]
    names, every = [name for _, result in results for name in result.runs], [result for _, result in results]
    made, corrections = every[0].model_copy(deep=True), dict[str, Correction]()
    made.runs = {
        name if names.count(name) == 1 else f"{name} ({file})": run
        for file, result in results
        for name, run in result.runs.items()
    }
    for correction in (correction for result in every for correction in result.corrections):
        corrections.setdefault(correction.name, correction)
    made.corrections = list(corrections.values())
    made.provenance.inputs = [file for result in every for file in result.provenance.inputs]
    made.provenance.left_out = [row for result in every for row in result.provenance.left_out]
    made.warnings = list(dict.fromkeys(warning for result in every for warning in result.warnings))
    return made
