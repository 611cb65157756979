"""Whether two Results can be compared, and with which run of the baseline."""

from __future__ import annotations

import re

from mismatchctl.contract import REQUIRED
from mismatchctl.gate.rules import Rule
from mismatchctl.result import Result, RunResult


def matching_run(name: str, baseline: Result) -> tuple[str, RunResult] | None:
    """The baseline's run of that name, or its only one."""
    if name in baseline.runs:
        return name, baseline.runs[name]
    return next(iter(baseline.runs.items())) if len(baseline.runs) == 1 else None


def first_difference(rule: Rule, run: str, result: Result, baseline_run: str, baseline: Result) -> str | None:
    """The first thing that makes a rule's metric another quantity in the baseline; None if there is nothing.

    The definitions of metrics belong to the Result's format, which reading it has checked.
    """
    for column in REQUIRED:
        here, there = _dtypes(result, run, column), _dtypes(baseline, baseline_run, column)
        if here != there:
            return f"{column} is stored as {here} here, as {there} in the baseline"
    if rule.correction is not None:
        found = [
            next((item for item in each.corrections if item.name == rule.correction), None)
            for each in (result, baseline)
        ]
        if found[1] is None:
            return f"the baseline has no correction {rule.correction}"
        if found[0] != found[1]:
            return f"correction {rule.correction} is defined otherwise in the baseline"
    version_here, version_there = result.provenance.framework, baseline.provenance.framework
    if version_here and version_there and version_here != version_there:
        return f"framework version: {version_here} here, {version_there} in the baseline"
    return None


def _dtypes(result: Result, run: str, column: str) -> str:
    """The numbers that a column is stored in, whatever the lists around them; several where files differ."""
    files = [file for file in result.provenance.inputs if file.run == run] or result.provenance.inputs
    found = {_numbers(file.dtypes[column]) for file in files if column in file.dtypes}
    return " and ".join(sorted(found)) or "unknown"


def _numbers(dtype: str) -> str:
    named = re.search(r"\b(halffloat|float|double)\b", dtype)
    return named.group() if named else dtype
