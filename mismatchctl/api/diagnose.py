"""Find the causes of the mismatch of a dump."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.scan import DumpReading, ReadOptions
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.reader import open_dump
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.diagnosis import DIAGNOSIS_COLUMNS, Diagnosis, make_collector
from mismatchctl.diagnosis.evidence import Evidence
from mismatchctl.diagnosis.layer_reports import LogitNoise, estimate_logit_noise
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.io.files import natural_key
from mismatchctl.results.growth import Growth
from mismatchctl.results.summary import fit_run_growth

if TYPE_CHECKING:
    from typing_extensions import Unpack


def diagnose(paths: Sequence[DumpSource], *, by: Sequence[str] = (), **options: Unpack[ReadOptions]) -> Diagnosis:
    """Find the causes of the mismatch in each run. Invalid values, such as NaN, do not raise errors but are evidence.

    For each column in `by`, also find values with an unusual mismatch, such as one worker of many.
    """

    @cache
    def growths() -> dict[str, Growth]:
        """Measure how K3 changes over the steps. Most diagnoses do not need this second pass over the dump."""
        try:
            measured = analyze(paths, rename=rename, engine=reading.engine, findings=False)
            return {name: fit_run_growth(run) for name, run in measured.runs.items()}
        except (DataError, ConfigError):
            return {}

    rename = options.get("rename")
    dump = open_dump(paths, rename=rename, aliases=column_aliases(), by=by, watched=DIAGNOSIS_COLUMNS)
    collector, reading = make_collector(dump, by), DumpReading(dump, **options)
    for found, _ in reading.parts(collector.empty()):
        collector.add(found)
    problems = reading.problems
    held = (evidence.sample and evidence.sample.rows.segments.tokens for evidence in collector.runs.values())
    if not any(held) and not any(evidence.unfit for evidence in collector.runs.values()):
        problem = "the dump does not contain tokens"
        nothing = DataError(problem, file=dump.files[0].path, remedy="pass a dump with tokens")
        raise problems.no_tokens_error() or nothing
    files = dump.paths
    judged = {
        run: collector.findings(run, files, partial(lambda name: growths().get(name), run))
        for run in sorted(collector.runs, key=natural_key)
    }
    runs = {run: findings for run, (findings, _) in judged.items()}
    sides = {run: side for run, (_, side) in judged.items() if side is not None}
    noise = {run: known for run in runs if (known := _estimate_noise(collector.runs[run])) is not None}
    masked = [run for run in runs if not collector.runs[run].tokens and collector.runs[run].sequences]
    remedy = "check that response_mask is 1 on the tokens that the policy sampled"
    if masked and len(masked) == len(runs) and not any(runs.values()):
        raise problems.no_tokens_error() or DataError("no valid token found", file=dump.files[0].path, remedy=remedy)
    warnings = [*dump.warnings, *(f"{run}: no valid token found; {remedy}" for run in masked)]
    return Diagnosis(runs, sides, noise, warnings, problems)


def _estimate_noise(evidence: Evidence) -> LogitNoise | None:
    if evidence.sample is None:
        return None
    case = Case.of(evidence, evidence.sample.rows)
    return estimate_logit_noise(case.rollout[case.sound], case.train[case.sound])
