"""The page of each type of result, and the reader of saved results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.api.advise.advice import Advice, RunAdvice
from mismatchctl.api.compare.comparison import FORMAT, Comparison
from mismatchctl.api.gate.verdict import Verdict
from mismatchctl.api.sweep.result import Sweep, sweep_from_json
from mismatchctl.diagnosis.diagnosis import Diagnosis
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.io.stores import first_error_line
from mismatchctl.report.document import Document
from mismatchctl.report.pages import advise, analyze, compare, diagnose, gate, sweep
from mismatchctl.results.model import Result
from mismatchctl.results.reader import parse_result, read_json
from mismatchctl.results.views import View

PAGES: dict[type, Callable[[Any], Document]] = {
    Result: analyze.document, Sweep: sweep.document, Comparison: compare.document, Verdict: gate.document,
    Diagnosis: diagnose.document, Advice: advise.document,
}  # fmt: skip
_REMEDY = "pass JSON files that analyze, sweep, compare, advise or gate wrote"


def read_saved(paths: Sequence[Path]) -> tuple[View, Document]:
    """Read saved results, merge them and build their page. If run names are equal, append file names to them."""
    found = [(path, _parse_saved(read_json(path, _REMEDY), path)) for path in paths]
    if len(found) == 1:
        return found[0][1], PAGES[type(found[0][1])](found[0][1])
    other = next((path for path, kept in found if not isinstance(kept, (Result, Sweep))), None)
    results = {path: kept for path, kept in found if isinstance(kept, Result)}
    if other is not None or not results:
        problem = "only results of analyze and sweep can share a page, and at least one must be of analyze"
        raise DataError(problem, file=str(other or paths[0]), remedy="run report on this file only")
    names, stems = [name for result in results.values() for name in result.runs], [path.stem for path in results]
    every = list(results.values())
    merged = every[0].model_copy(deep=True)
    merged.runs = {
        name if names.count(name) == 1 else f"{name} ({path.stem if stems.count(path.stem) == 1 else path})": run
        for path, result in results.items()
        for name, run in result.runs.items()
    }
    corrections = {each.name: each for result in reversed(every) for each in reversed(result.corrections)}
    merged.corrections = list(reversed(corrections.values()))
    merged.provenance.inputs = [file for result in every for file in result.provenance.inputs]
    merged.provenance.left_out = [row for result in every for row in result.provenance.left_out]
    merged.warnings = list(dict.fromkeys(warning for result in every for warning in result.warnings))
    return merged, analyze.document(merged, [kept for _, kept in found if isinstance(kept, Sweep)])


def _parse_saved(data: Any, path: Path) -> View:
    try:
        kept = _parse_sections(data) if isinstance(data, dict) and "provenance" not in data else None
    except (ValidationError, KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(f"this file is damaged: {first_error_line(error)}", file=str(path), remedy=_REMEDY) from None
    return parse_result(data, str(path)) if kept is None else kept


def _parse_sections(data: Mapping[str, Any]) -> View | None:
    plain = {key: value for key, value in data.items() if key not in ("tool", "version", "format")}
    if "contrasts" in data:
        if data.get("format") != FORMAT:
            raise ValueError(f"the comparison has format {data.get('format')!r}; this version reads format {FORMAT}")
        return Comparison.model_validate(data)
    if "checks" in data:
        return Verdict.model_validate(plain)
    if "studies" in data:
        return sweep_from_json(data)
    if "basis" in data:
        return Advice({"": RunAdvice.model_validate(plain)})
    runs = data.get("runs")
    if isinstance(runs, dict) and runs and all(isinstance(run, dict) and "basis" in run for run in runs.values()):
        return Advice({run: RunAdvice.model_validate(found) for run, found in runs.items()})
    return None
