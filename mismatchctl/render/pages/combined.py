"""One page of several results: runs side by side, with what was swept, compared, advised and judged of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.advise import Advice
from mismatchctl.compare.model import FORMAT, Comparison
from mismatchctl.errors import DataError
from mismatchctl.gate import Verdict
from mismatchctl.render.document import Card, Document, Headline, Section
from mismatchctl.render.pages import advise, analyze, compare, gate, sweep
from mismatchctl.result import Result, read_result
from mismatchctl.stores import read_whole
from mismatchctl.sweep.model import Sweep
from mismatchctl.sweep.saved import from_json
from mismatchctl.texts import TextError, decoded, parse_json

Kept = Result | Comparison | Verdict | Sweep | dict[str, Advice]
_REMEDY = "name files that analyze, sweep, compare, advise or gate wrote as JSON"


def read(paths: Sequence[Path]) -> list[tuple[str, Kept]]:
    """What verbs wrote as JSON, each under the name of its file; what a Result holds of other verbs follows it.

    Raises:
        DataError: one is something else, or damaged.
    """
    found: list[tuple[str, Kept]] = []
    for path in paths:
        kept = _of(_data(path), path) or read_result(path)
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
        data = _data(path)
        if _of(data, path) is None:
            results.append((path.stem, read_result(path)))
        else:
            others.append(data)
    if not results:
        raise DataError("no Result, to hold the others", file=str(paths[0]), remedy="name what analyze -o wrote")
    made = _side_by_side(results)
    made.sections = [*(section for _, result in results for section in result.sections), *others]
    return made


def _data(path: Path) -> Any:
    try:
        return parse_json(decoded(read_whole(path)))
    except OSError as error:
        raise DataError(error.strerror or str(error), file=str(path), remedy=_REMEDY) from None
    except TextError as error:
        raise DataError(f"not JSON: {error}", file=str(path), remedy=_REMEDY) from None


def _of(data: Any, path: Path) -> Kept | None:
    """What a verb other than analyze wrote, told by what it holds; None where it is of none."""
    try:
        return _told(data) if isinstance(data, dict) and "provenance" not in data else None
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {str(error).splitlines()[0]}", file=str(path), remedy=_REMEDY) from None


def _told(data: Mapping[str, Any]) -> Kept | None:
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


def document(paths: Sequence[Path], *, whole: bool = True) -> Document:
    """The page of all of it; one thing alone has the page of its verb."""
    found = read(paths)
    if len(found) == 1:
        return _alone(found[0][1], whole)
    results = [(name, kept) for name, kept in found if isinstance(kept, Result)]
    others = [kept for _, kept in found if not isinstance(kept, Result)]
    made = analyze.document(_side_by_side(results), whole=whole) if results else Document(Headline(""))
    closing = made.sections[-1:] if results and whole else []
    opening, glossary = made.sections[: len(made.sections) - len(closing)], list(made.glossary)
    for number, kept in enumerate(others):
        own = _alone(kept, whole)
        first = not any(type(kept) is type(before) for before in others[:number])
        inside = [section for section in own.sections if section.anchor != "provenance"]
        section = Section(_TITLES[type(kept)], f"part-{number}", note=own.headline.title)
        if isinstance(kept, Verdict):  # nobody should have to look for it
            told = own.headline.title.replace(kept.outcome, "The gate", 1)
            card = Card(kept.outcome, kept.outcome, told)
            opening.insert(bool(results), Section("", f"verdict-{number}").add(card))
        opening.append(section.add(*(inside if first else (_renamed(part, f"part-{number}") for part in inside))))
        known = {entry.anchor for _, entries in glossary for entry in entries}
        more = [entry for _, entries in own.glossary for entry in entries if entry.anchor not in known]
        glossary.append((_TITLES[type(kept)], more))
    made.sections = [*opening, *closing]
    made.glossary = [(title, entries) for title, entries in glossary if entries]
    if not made.headline.title:
        made.headline = Headline(f"{len(found)} results", what="report")
    return made


_TITLES: dict[type, str] = {
    Comparison: "Compared", Verdict: "The gate", Sweep: "Thresholds", dict: "Which correction", Result: "Runs",
}  # fmt: skip


def _alone(kept: Kept, whole: bool) -> Document:
    if isinstance(kept, Result):
        return analyze.document(kept, whole=whole)
    if isinstance(kept, Comparison):
        return compare.document(kept, whole=whole)
    if isinstance(kept, Verdict):
        return gate.document(kept)
    return sweep.document(kept, whole=whole) if isinstance(kept, Sweep) else advise.document(kept)


def _renamed(part: Any, prefix: str) -> Any:
    """A part whose anchors cannot be those of another file's."""
    if isinstance(part, Section):
        part.anchor = f"{prefix}-{part.anchor}"
        part.parts = [_renamed(inner, prefix) for inner in part.parts]
    return part


def _side_by_side(results: Sequence[tuple[str, Result]]) -> Result:
    """Results as one: every run under its name, those of equal names told apart by their files."""
    if len(results) == 1:
        return results[0][1]
    names = [name for _, result in results for name in result.runs]
    first = results[0][1].model_copy(deep=True)
    first.runs = {
        name if names.count(name) == 1 else f"{name} ({file})": run
        for file, result in results
        for name, run in result.runs.items()
    }
    known = {correction.name for correction in first.corrections}
    for _, result in results[1:]:
        first.provenance.inputs += result.provenance.inputs
        first.provenance.left_out += result.provenance.left_out
        first.warnings += [warning for warning in result.warnings if warning not in first.warnings]
        for correction in result.corrections:
            if correction.name not in known:
                first.corrections.append(correction)
                known.add(correction.name)
    return first
