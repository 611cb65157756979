"""Read the Result and its baseline for the gate, plan sample sizes, and write the next baseline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.analyze.builder import round_sums
from mismatchctl.api.gate.judgement import BASELINE_MARGIN, DEFAULT_LEVEL, Baseline, list_places
from mismatchctl.api.gate.power import SampleSizePlan, required_sample_size
from mismatchctl.api.gate.rules import Rule, find_rule_target
from mismatchctl.api.gate.verdict import BoundKind, Check, Verdict, add_sentences, exceeds_limit, worst_outcome
from mismatchctl.api.metrics_log import LoggedValues, read_logged_values
from mismatchctl.api.scan import ReadOptions
from mismatchctl.core.batch import Float64s
from mismatchctl.corrections.model import Correction
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError, DataError, option, wording
from mismatchctl.frameworks.glossary import find_certain_metric
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.io import __version__
from mismatchctl.io.files import NextNumber, write_atomically
from mismatchctl.io.stores import is_remote, normalize_path
from mismatchctl.measure.cluster_table import OVERALL_CAP, Hashes
from mismatchctl.results.model import (
    Acceptance,
    Clusters,
    Distribution,
    Groups,
    InputFile,
    JointDistribution,
    Provenance,
    Result,
    RunResult,
    find_run,
)
from mismatchctl.results.reader import is_result, read_result
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import build_run_sample

if TYPE_CHECKING:
    from typing_extensions import Unpack


def make_baseline(result: Result, verdict: Verdict, rules: Sequence[Rule], *, by_hand: bool) -> Result:
    """Reduce a Result to the values, cluster tables and provenance that later gates need."""
    old = result.provenance
    accepted = Acceptance(verdict=verdict.outcome, by_hand=by_hand, rules=[rule.text for rule in rules])
    provenance = Provenance(
        version=old.version, inputs=_merge_inputs(old.inputs), by=old.by, framework=old.framework,
        accepted=accepted,
    )  # fmt: skip
    runs = {name: _reduce_run(run) for name, run in result.runs.items()}
    return Result(provenance=provenance, corrections=result.corrections, warnings=[], runs=runs)


def _merge_inputs(files: Iterable[InputFile]) -> list[InputFile]:
    found: dict[tuple[str, str, str], InputFile] = {}
    for file in files:
        key = file.run, file.layout, json.dumps(file.dtypes, sort_keys=True)
        before = found.get(key)
        facts = {
            name: getattr(file, name) + (getattr(before, name) if before else 0)
            for name in ("size", "rows", "tokens", "skipped")
        }
        found[key] = file.model_copy(update=facts | {"path": file.run})
    return [found[key] for key in sorted(found)]


def _reduce_run(run: RunResult) -> RunResult:
    sample = build_run_sample(run)
    return RunResult(
        overall=run.overall, groups=Groups(labels=run.groups.labels, metrics={}, corrections={}),
        by={column: _reduce_groups(groups) for column, groups in run.by.items()},
        distribution=Distribution(edges=[], tokens=[], k3=[]), breakdowns={},
        joint=JointDistribution(width=1.0, x=[], y=[], tokens=[]), worst_tokens=[], worst_sequences=[],
        clusters=_fold_table(run.clusters, sample.keys, sample.sums),  # one row per cluster over all steps
        content=None if run.content is None else run.content.model_copy(update={"example": ""}),
    )  # fmt: skip


def _reduce_groups(groups: Groups) -> Groups:
    table = groups.clusters
    if table is None:
        return groups
    keys, values = np.array([int(text, 16) for text in table.hashes], np.uint64), np.array(table.groups, np.uint64)
    small = _fold_table(table, keys, np.array(table.sums), values)
    return groups.model_copy(update={"clusters": small})


def _fold_table(table: Clusters, keys: Hashes, sums: Float64s, values: Hashes | None = None) -> Clusters:
    by_value, folded = values is not None, len(keys) > OVERALL_CAP
    values = np.zeros_like(keys) if values is None else values
    if folded:
        room = np.uint64(max(OVERALL_CAP // len(np.unique(values)), 1))
        (keys, values), where = np.unique(np.stack([keys % room, values]), axis=1, return_inverse=True)
        gathered = np.zeros((len(keys), sums.shape[1]))
        np.add.at(gathered, where.ravel(), sums)
        sums = gathered
    return Clusters(
        by=table.by, columns=table.columns, hashes=[f"{key:016x}" for key in keys.tolist()],
        groups=values.tolist() if by_value else [], folded=table.folded or folded,
        sums=round_sums(sums, table.columns),
    )  # fmt: skip


def write_baseline(baseline: Result, place: Path) -> Path:
    """Write a baseline to a file, or to the next numbered file of a folder."""
    write_atomically(NextNumber(place) if place.is_dir() else place, baseline.to_json().encode())
    return place


IN_MEMORY = "the Result in memory"


def load_result(
    paths: Sequence[DumpSource | Result],
    rules: Sequence[Rule],
    corrections: Sequence[Correction] = (),
    **options: Unpack[ReadOptions],
) -> Result:
    """Read the Result to judge, or analyze dumps with everything that the rules need."""
    dumps: list[DumpSource] = [source for source in paths if not isinstance(source, Result) and not _is_saved(source)]
    if len(dumps) < len(paths):
        given = next(source for source in paths if isinstance(source, Result) or _is_saved(source))
        name = IN_MEMORY if isinstance(given, Result) else given
        if len(paths) > 1:
            raise ConfigError(f"{name}: pass one Result, or dumps")
        if corrections or options.get("rename"):
            unused = f"{option('corrections')} and {option('columns')}"
            raise ConfigError(f"{name}: these options do not work with a Result: leave {unused} out")
        return given if isinstance(given, Result) else read_result(str(given))
    by = dict.fromkeys(rule.per for rule in rules if rule.per not in ("overall", "step"))
    named = {correction.name: correction for correction in corrections}
    for rule in rules:
        if rule.correction is not None and rule.correction not in named:
            try:
                named[rule.correction] = find_preset(rule.correction)
            except ConfigError as error:
                raise ConfigError(f"rule {rule.text}: {error}; `mismatchctl presets` lists the presets") from None
    return analyze(dumps, list(named.values()), by=[*by], every_cluster=True, **options)


def _is_saved(source: DumpSource) -> bool:
    return isinstance(source, str) and is_result(source)


def read_baseline(baseline: str | os.PathLike[str] | Result | None, *, fixed_tokens: bool = False) -> Baseline:
    if baseline is None:
        return Baseline(fixed_tokens=fixed_tokens)
    if isinstance(baseline, Result):
        return Baseline(IN_MEMORY, baseline, fixed_tokens)
    place = os.fspath(baseline)
    if is_remote(place):
        place = normalize_path(place)
    elif not os.path.exists(place):
        remedy = wording(
            python="save a Result there with result.save(FILE)",
            command="save the first one with --save-baseline FILE --accept",
        )
        raise DataError("the baseline does not exist", file=place, remedy=remedy)
    elif os.path.isdir(place):
        remedy = f"name the accepted Result with {option('baseline')}, and pass dumps as arguments"
        raise DataError("this is a folder, not a saved Result", file=place, remedy=remedy)
    return Baseline(place, read_result(place), fixed_tokens)


def plan_sample_sizes(
    result: Result, rules: Sequence[Rule], regression: float, against: Baseline, level: float = DEFAULT_LEVEL
) -> list[SampleSizePlan]:
    """Estimate the number of sequences that is needed to detect a relative rise, for each rule on a rise."""
    found = []
    level /= BASELINE_MARGIN * max(sum(len(rule.bounds) for rule in rules) * len(result.runs), 1)
    for rule in rules:
        target = find_rule_target(rule, result)
        if not target.table.is_resampled or (rule.increase is None and rule.max is None):
            continue
        allowance = rule.increase or Allowance()
        for name, run in result.runs.items():
            accepted = against.result
            matching = None if accepted is None else find_run(accepted, name)
            baseline = None if accepted is None or matching is None else build_run_sample(accepted.runs[matching])
            for place in list_places(rule, run)[:1]:
                found.append(
                    required_sample_size(name, target.table, place.sample, baseline, regression, allowance, level)
                )
    return found


def judge_logs(paths: Sequence[str | Path], rules: Sequence[Rule], level: float) -> Verdict:
    if not rules:
        raise ConfigError(f"{paths[0]} is a metrics log, which needs a rule with max or min, as in --rule k3:max=0.01")
    for rule in rules:
        if rule.increase is not None or rule.decrease is not None or not rule.bounds:
            problem = "only max and min work with a metrics log. To compare with a baseline, pass dumps or Results"
            raise ConfigError(f"rule {rule.text}: {problem}")
        if rule.per not in ("overall", "step") or rule.correction is not None or rule.sequences:
            raise ConfigError(
                f"rule {rule.text}: a metrics log only has values by step. Write a rule for a metric with max or min"
            )
    logs = [run for path in paths for run in read_logged_values(path)]
    checks = [_judge_log(rule, run, kind) for run in logs for rule in rules for kind in rule.bounds]
    verdict = Verdict(
        version=__version__, outcome=worst_outcome([check.outcome for check in checks]), level=level, baseline=None,
        checks=checks, notes=["judged on logged values alone, without intervals: the worst step decides"],
    )  # fmt: skip
    return add_sentences(verdict)


def _judge_log(rule: Rule, run: LoggedValues, kind: BoundKind) -> Check:
    name, limit = _find_name(rule.metric, run), rule.bounds[kind]
    assert isinstance(limit, float)
    check = Check(rule=rule.text, run=run.name, place="overall", metric=rule.metric, title=name or rule.metric,
                  unit="", kind=kind, limit=limit)  # fmt: skip
    if name is None:
        check.reason = f"no name in the log is {rule.metric}"
        return check
    known = [(value, step) for value, step in zip(run.values[name], run.steps, strict=True) if value is not None]
    if not known:
        check.reason = "the log does not contain it"
        return check
    check.value, step = (max if kind == "max" else min)(known, key=lambda pair: pair[0])
    check.place = f"step {step}"
    lost = run.not_finite.get(name, 0)
    check.outcome = "failed" if exceeds_limit(check) else "undecided" if lost else "passed"
    check.reason = f"{lost} values are NaN or infinite" if lost else ""
    return check


def _find_name(metric: str, run: LoggedValues) -> str | None:
    """Find the logged name that a rule means: an equal name, else a name without its prefix, else an equal quantity."""
    if metric in run.values:
        return metric
    same = [name for name in run.values if name.rpartition("/")[2] == metric]
    same = same or [name for name in run.values if find_certain_metric(name) == metric]
    return same[0] if len(same) == 1 else None
