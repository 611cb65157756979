"""Whether two Results can be compared, and with which run of the baseline."""

from __future__ import annotations

from mismatchctl.gate.names import RuleTarget
from mismatchctl.result import Result, RunResult, storage_of


def matching_run(name: str, baseline: Result) -> tuple[str, RunResult] | None:
    """The baseline's run of that name, or its only one."""
    if name in baseline.runs:
        return name, baseline.runs[name]
    return next(iter(baseline.runs.items())) if len(baseline.runs) == 1 else None


def first_difference(target: RuleTarget, run: str, result: Result, baseline_run: str, baseline: Result) -> str | None:
    """The first thing that makes what is judged another quantity in the baseline; None if there is nothing.

    The definitions of metrics belong to the Result's format, which reading it has checked.
    """
    stored = storage_of(baseline, baseline_run)
    for column, here in storage_of(result, run).items():
        if here != stored[column]:
            return f"{column} is stored as {here} here, as {stored[column]} in the baseline"
    if target.correction is not None:
        found = [
            next((item for item in each.corrections if item.name == target.correction), None)
            for each in (result, baseline)
        ]
        if found[1] is None:
            return f"the baseline has no correction {target.correction}"
        if found[0] != found[1]:
            return f"correction {target.correction} is defined otherwise in the baseline"
    version_here, version_there = result.provenance.framework, baseline.provenance.framework
    if version_here and version_there and version_here != version_there:
        return f"framework version: {version_here} here, {version_there} in the baseline"
    if target.logged_by and version_there is None:
        return f"the baseline holds no numbers as {target.logged_by} logs them: save it from a gate with such a rule"
    if target.logged_by and result.provenance.replay != baseline.provenance.replay:
        return f"{target.logged_by} is replayed in another way in the baseline"
    return None
