"""Judge a Result by rules: each check is passed, failed or undecided. This module also reads and writes baselines."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.api.analyze.analyze import analyze, round_sums
from mismatchctl.api.gate.coverage import (
    Tolerances,
    check_coverage,
    check_fixed_tokens,
    coverage_notes,
    find_incompatibility,
)
from mismatchctl.api.gate.power import (
    MIN_CLUSTERS,
    SampleSizePlan,
    detectable_factor,
    min_clusters,
    required_sample_size,
)
from mismatchctl.api.gate.rules import BITWISE_RULE, DEFAULT_RULES, Rule, RuleTarget, find_rule_target
from mismatchctl.api.gate.verdict import (
    FIRST_BASELINE_REASON,
    LOWER_KINDS,
    STATISTIC_REASONS,
    BoundKind,
    Check,
    Pairing,
    Verdict,
    add_sentences,
    exceeds_limit,
    worst_outcome,
)
from mismatchctl.api.metrics_log import LoggedValues, read_logged_values
from mismatchctl.api.scan import ReadOptions
from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import format_label
from mismatchctl.corrections.model import Correction
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError, DataError, option, wording
from mismatchctl.frameworks.glossary import find_certain_metric
from mismatchctl.frameworks.registry import find_preset, load_framework
from mismatchctl.io import __version__
from mismatchctl.io.files import NextNumber, write_atomically
from mismatchctl.io.stores import is_remote, normalize_path
from mismatchctl.measure.sums import OVERALL_CAP, Hashes
from mismatchctl.results import model
from mismatchctl.results.model import NOT_RECORDED, Groups, Result, RunResult, Value, find_run
from mismatchctl.results.reader import is_result, read_result
from mismatchctl.results.summary import fit_run_growth, prompt_notes
from mismatchctl.stats.comparison import Allowance, compare_samples, excess_over_value, is_layered
from mismatchctl.stats.resampling import SampleExchange, adjust_holm, p_above_zero, resample_metrics
from mismatchctl.stats.samples import (
    ClusterSample,
    K3Layers,
    build_run_sample,
    build_step_sample,
    build_value_sample,
    compute_interval,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class JudgedPlace:
    """The data that a rule judges: a whole run, one of its steps, or its rows with one value of a column."""

    run: RunResult
    per: str = "overall"
    groups: Groups | None = None
    index: int = 0

    @property
    def name(self) -> str:
        if self.groups is None:
            return "overall"
        label = self.groups.labels[self.index]
        return f"{self.per} {'(none)' if label is None else label}"

    @cached_property
    def sample(self) -> ClusterSample:
        if self.groups is None:
            return build_run_sample(self.run)
        if self.per == "step":
            return build_step_sample(self.run, self.index)
        return build_value_sample(self.run, self.per, self.index)

    def recorded(self, key: str, correction: str | None = None) -> Value:
        if self.groups is None:
            overall = self.run.overall
            known = overall.metrics if correction is None else overall.corrections.get(correction, {})
            return known.get(key, NOT_RECORDED)
        series = self.groups.metrics if correction is None else self.groups.corrections.get(correction, {})
        return series[key].value_at(self.index) if key in series else NOT_RECORDED


def list_places(rule: Rule, run: RunResult) -> list[JudgedPlace]:
    if rule.per == "overall":
        return [JudgedPlace(run)]
    groups = run.groups if rule.per == "step" else run.by.get(rule.per)
    if groups is None:
        problem = f"the Result does not contain metrics by {rule.per}"
        raise DataError(problem, remedy=f"analyze the dump with {option('by', rule.per)}, or pass the dump itself")
    return [JudgedPlace(run, rule.per, groups, index) for index in range(len(groups.labels))]


def _baseline_place(place: JudgedPlace, whole: JudgedPlace) -> JudgedPlace:
    """Return the part of the baseline to compare `place` with: rows with the same column value, or `whole` (all)."""
    if place.per in ("overall", "step") or place.groups is None:
        return whole
    groups, label = whole.run.by.get(place.per), place.groups.labels[place.index]
    if groups is None or label not in groups.labels:
        problem = f"the baseline lacks {place.name}"
        raise DataError(problem, remedy=f"save a new baseline with a rule that contains per={place.per}")
    return JudgedPlace(whole.run, place.per, groups, groups.labels.index(label))


DEFAULT_LEVEL, MAX_LEVEL = 0.05, 0.5
"""Default and maximum of `level`: the accepted probability that any check fails by chance."""
BASELINE_MARGIN = 1.25
"""Factor for p-values in comparisons with a baseline. Without it, up to 6.2% of healthy dumps had p <= 5%."""
_NOISE_REASON = "beyond the limit, but within noise"
_NOT_FINITE_REASON = "the value or its limit is not finite"
_FEW_TOKENS_REASON = (
    "above the limit because of a few tokens. Their effect cannot be judged with this number of sequences"
)
_FAR_FACTOR = 3.0
"""If only a few tokens cause an excess that is not significant, a check passes up to this multiple of its limit."""
_DILUTED_REASON = "above the limit on the baseline's prompts, but the dump's other prompts hide this rise"
_DIFFERENT_TOKENS_REASON = "the dump lacks the tokens of the baseline. Score the same prompts and responses again"
_ACCEPTED_BASELINE_NOTE = "saved as the baseline because of --accept. Later dumps are compared with it"
_BITWISE_BASELINE_NOTE = "the baseline is bit-identical, so every token of the dump must be bit-identical too"
_DILUTED_SHARE = 0.2
"""If more than this share of the dump's clusters is new, clusters that the baseline contains are also judged alone."""


@dataclass(frozen=True)
class Baseline:
    """The accepted Result to compare with, if there is one, and options of the comparison."""

    name: str | None = None
    result: Result | None = None
    fixed_tokens: bool = False  # True if the dump must contain the baseline's responses with new log-probs
    accept: bool = False  # True if the Result becomes the next baseline, even if a check fails


@dataclass
class _Case:
    """One bound of a rule (such as `max`), applied to one run, step or column value. `check` is the result."""

    rule: Rule
    target: RuleTarget
    bound: float | Allowance
    check: Check
    place: JudgedPlace | None
    accepted: JudgedPlace | None = None  # what `place` is compared with in the baseline

    @property
    def lower(self) -> bool:
        return self.check.kind in LOWER_KINDS

    @property
    def is_resampled(self) -> bool:
        if self.check.kind == "max" and self.bound == 0 and self.target.metric.unit == "fraction":
            return False  # one bad token exceeds a limit of 0, so no test is needed
        return self.target.table.is_resampled


def judge(
    result: Result,
    rules: Sequence[Rule],
    against: Baseline | None = None,
    level: float = DEFAULT_LEVEL,
    limits: Tolerances | None = None,
) -> Verdict:
    """Judge each run of `result` by each rule, and check that the data is complete and plausible."""
    _check_level(level)
    against, limits = against or Baseline(), limits or Tolerances()
    baseline = against.result
    rules, notes = _adapt_rules(rules, baseline)
    named = dict.fromkeys(rule.framework for rule in rules if rule.framework)
    notes += [text for name in named for text in load_framework(name).warnings]
    cases = [case for rule in rules for case in _list_cases(rule, result, against)]
    case_level = level / max(sum(case.is_resampled for case in cases), 1) / BASELINE_MARGIN
    with np.errstate(all="ignore"):  # a value that overflows gets the reason _NOT_FINITE_REASON
        for case in cases:
            _judge_case(case, case_level, fixed_tokens=against.fixed_tokens)
    checks = [case.check for case in cases]
    noisy = [check for check in checks if check.p is not None]
    for check, p in zip(noisy, adjust_holm([check.p or 0.0 for check in noisy]), strict=True):
        check.p = p
        if check.outcome == "failed":
            _confirm_failure(check, significant=p <= level)
    checks += check_coverage(result, rules, baseline, limits)
    if against.fixed_tokens:
        checks += check_fixed_tokens(result, baseline)
    outcome = worst_outcome([check.outcome for check in checks])
    notes += [*coverage_notes(result, baseline, limits), *prompt_notes(result.runs.values())]
    notes += dict.fromkeys(_explain_missing_layers(cases))
    notes += [_ACCEPTED_BASELINE_NOTE] if against.accept and baseline is not None and outcome != "passed" else []
    growth = {name: fit_run_growth(run) for name, run in result.runs.items() if len(run.groups.labels) > 1}
    found = Verdict(
        version=__version__, outcome=outcome, level=level, baseline=against.name, checks=checks, notes=notes,
        growth=growth,
    )  # fmt: skip
    return add_sentences(found)


def _check_level(level: float) -> None:
    if not 0 < level <= MAX_LEVEL:
        raise ConfigError(f"level must be above 0 and at most {MAX_LEVEL}, found {format_label(level)}")


def _confirm_failure(check: Check, *, significant: bool) -> None:
    """Make a failed check that is not significant undecided, or passed if its value is allowed (see _FAR_FACTOR)."""
    exceeds = exceeds_limit(check)
    if significant:
        check.reason = "" if exceeds else STATISTIC_REASONS.get(check.statistic, "")
    elif check.value is None or check.limit is None:
        check.outcome, check.reason = "undecided", _NOT_FINITE_REASON
    elif not exceeds:
        check.outcome, check.reason = "passed", ""
    else:
        limit = math.inf if check.kind in LOWER_KINDS else max(check.limit, 0.0)
        passes = bool(check.reason) and check.value <= _FAR_FACTOR * limit
        check.outcome, check.reason = "passed" if passes else "undecided", check.reason or _NOISE_REASON


def _adapt_rules(rules: Sequence[Rule], baseline: Result | None) -> tuple[Sequence[Rule], list[str]]:
    shares = [] if baseline is None else [run.overall.metrics.get("bitwise_all") for run in baseline.runs.values()]
    if tuple(rules) != DEFAULT_RULES or not shares or not all(each is not None and each.value == 1 for each in shares):
        return rules, []
    return (DEFAULT_RULES[0], BITWISE_RULE), [_BITWISE_BASELINE_NOTE]


def _list_cases(rule: Rule, result: Result, against: Baseline) -> Iterator[_Case]:
    target = find_rule_target(rule, result)
    for name, run in result.runs.items():
        whole, incomparable = _comparable_run(target, name, result, against)
        places: Sequence[JudgedPlace | None] = [None]
        missing = ""
        try:
            places = list_places(rule, run)
        except DataError as error:
            missing = str(error)
        for place, (kind, bound) in itertools.product(places, rule.bounds.items()):
            check = Check(
                rule=rule.text, run=name, place=rule.per if place is None else place.name, metric=rule.metric,
                title=target.metric.title, unit=target.metric.unit, kind=kind, meaning=target.words, reason=missing,
                clustered_by="" if place is None else run.clusters.by,
            )  # fmt: skip
            case = _Case(rule, target, bound, check, place)
            if isinstance(bound, Allowance):
                check.allowance = str(bound)
                if place is not None:
                    check.reason = incomparable
                    try:
                        case.accepted = None if whole is None else _baseline_place(place, whole)
                    except DataError as error:
                        check.reason = str(error)
            yield case


def no_baseline() -> str:
    remedy = wording(
        python="pass a Result or the path of a Result as baseline",
        command="save one with --save-baseline FILE --accept",
    )
    return f"no baseline: {remedy}"


def _comparable_run(target: RuleTarget, name: str, result: Result, against: Baseline) -> tuple[JudgedPlace | None, str]:
    """Return the baseline's run to compare the run `name` with. If it is missing, return `None` and the reason."""
    baseline = against.result
    if baseline is None:
        return None, FIRST_BASELINE_REASON if against.accept else no_baseline()
    matching = find_run(baseline, name)
    if matching is None:
        difference: str | None = f"it lacks run {name}. Its runs: {', '.join(baseline.runs)}"
    else:
        difference = find_incompatibility(target, name, result, matching, baseline)
    if difference is not None or matching is None:
        return None, f"the baseline is not comparable: {difference}"
    return JudgedPlace(baseline.runs[matching]), ""


def _judge_case(case: _Case, level: float, *, fixed_tokens: bool) -> None:
    check, place = case.check, case.place
    if place is None:
        return
    try:
        if case.is_resampled:
            _judge_resampled(case, place, level, fixed_tokens=fixed_tokens)
        else:
            _judge_recorded(case, place)
        if check.outcome == "failed" and case.target.key == "bitwise_all" and check.kind == "min":
            check.reason = _locate_differences(place)
    except DataError as error:
        check.outcome, check.reason = "undecided", check.reason or str(error)


def _judge_resampled(case: _Case, place: JudgedPlace, level: float, *, fixed_tokens: bool) -> None:
    check, table, sample, limit = case.check, case.target.table, place.sample, case.bound
    baseline, value = None if case.accepted is None else case.accepted.sample, table.of(sample)
    check.clusters, check.sequences = len(sample), int(sample.column("sequences").sum())
    check.value = _finite_or_none(value)
    check.interval, check.covers = compute_interval(sample, table)
    if baseline is not None:
        before = table.of(baseline)
        check.baseline, check.pairing = _finite_or_none(before), _describe_pairing(sample, baseline)
        check.baseline_interval, check.baseline_covers = compute_interval(baseline, table)
    if check.reason:
        return
    if isinstance(limit, Allowance):
        room = abs(before) * limit.relative + limit.absolute
        limit = before + (-room if case.lower else room)
    check.limit = _finite_or_none(limit)
    check.reason = _reason_too_little(check, case.rule, len(sample) if baseline is None else None)
    if baseline is not None:
        if fixed_tokens and check.pairing != "same tokens":
            check.reason = check.reason or _DIFFERENT_TOKENS_REASON
        check.reason = check.reason or _reason_cannot_fail(SampleExchange(sample.keys, baseline.keys, level), level)
    excess = limit - value if case.lower else value - limit
    if math.isnan(excess) and not check.reason:
        status = place.recorded(case.target.key, case.target.correction).status
        check.reason = "undefined" if status == "ok" else status
    if check.reason:
        return
    if baseline is not None:
        _judge_change(case, sample, baseline, level)
    else:
        draws = (resample_metrics([sample], [table])[0][0] - limit) * (-1.0 if case.lower else 1.0)
        check.p = p_above_zero(draws, excess_over_value(sample, table, limit, lower=case.lower))
        check.outcome = "failed" if excess > 0 else "passed"
    if check.outcome == "passed" and (check.value is None or check.limit is None):
        check.outcome, check.reason = "undecided", _NOT_FINITE_REASON


def _judge_change(case: _Case, sample: ClusterSample, baseline: ClusterSample, level: float) -> None:
    assert isinstance(case.bound, Allowance)
    check, metric = case.check, case.target.table
    found = compare_samples(sample, baseline, metric, case.bound, lower=case.lower, level=level)
    check.p, check.parts, check.statistic = min(found.p * BASELINE_MARGIN, 1.0), found.parts, found.most_significant
    check.outcome = "failed" if any(each.exceeds_limit for each in found.statistics) else "passed"
    check.reason = _FEW_TOKENS_REASON if check.outcome == "failed" and not found.affects_most_tokens else ""
    if check.outcome == "passed" and _is_diluted(case, sample, baseline, level):
        check.outcome, check.reason = "undecided", _DILUTED_REASON
    failed = check.outcome == "failed" and found.p <= level
    if not case.lower and not failed and check.baseline is not None:
        factor = detectable_factor(sample, baseline, metric, case.bound, level)
        check.detectable = None if factor is None else factor * check.baseline


def _is_diluted(case: _Case, sample: ClusterSample, baseline: ClusterSample, level: float) -> bool:
    """Return True if new clusters hide a failure: the clusters that are also in the baseline fail the rule."""
    keys, here, there = np.intersect1d(sample.keys, baseline.keys, assume_unique=True, return_indices=True)
    if not MIN_CLUSTERS <= len(keys) < (1 - _DILUTED_SHARE) * len(sample):
        return False
    assert isinstance(case.bound, Allowance)
    new, old = (replace(each, keys=keys, sums=each.sums[rows]) for each, rows in ((sample, here), (baseline, there)))
    if SampleExchange(new.keys, old.keys, level).least_p > level:
        return False
    found = compare_samples(new, old, case.target.table, case.bound, lower=case.lower, level=level)
    return any(each.exceeds_limit for each in found.statistics) and found.p <= level


def _locate_differences(place: JudgedPlace) -> str:
    tokens, share = place.recorded("tokens").value, place.recorded("bitwise_share").value
    if tokens is None or share is None:
        return ""
    count = max(round(tokens * (1 - share)), 1)
    found = f"{count:,} of {tokens:,.0f} tokens differ"
    worst = next((token for token in place.run.worst_tokens if token.log_ratio), None)
    if worst is None or place.groups is not None:
        return found
    where = f"row {worst.row:,}, position {worst.position:,} of {worst.file}"
    return f"{found}, the largest by {abs(worst.log_ratio):.3g} nats at {where}"


def _explain_missing_layers(cases: Sequence[_Case]) -> Iterator[str]:
    for case in cases:
        compared = case.accepted is not None and case.check.p is not None
        if compared and case.place and is_layered(case.target.table, lower=case.lower) and not case.check.parts:
            known = K3Layers.from_sample(case.place.sample)
            lacking, remedy = ("the baseline", "save a new baseline") if known else ("the Result", "pass its dump")
            yield (
                f"{case.check.run}: the gate only compares the mean of K3, so it can miss a rise of few tokens. "
                f"{lacking[:1].upper()}{lacking[1:]} lacks K3 by part (bulk, shoulder and tail), because an earlier "
                f"version of mismatchctl made it or it has too many clusters. To compare the parts, {remedy}"
            )


def _judge_recorded(case: _Case, place: JudgedPlace) -> None:
    """Judge a metric that cannot be resampled, such as a quantile, by the value and interval in the Result."""
    check, found = case.check, place.recorded(case.target.key, case.target.correction)
    check.value, check.interval, check.covers = found.value, found.interval, found.covers
    check.sequences = int(place.recorded("sequences").value or 0)
    check.clusters = int(place.recorded("prompts").value or 0)
    limits = _find_limits(case)
    check.reason = check.reason or _reason_too_little(check, case.rule, None)
    check.reason = check.reason or (found.status if limits is not None and found.value is None else "")
    if limits is None or found.value is None or check.reason:
        return
    check.limit, least, most = limits
    low, high = found.interval or (found.value, found.value)
    surely = high < least if case.lower else low > most
    check.outcome = "passed" if not exceeds_limit(check) else "failed" if surely else "undecided"
    check.reason = _NOISE_REASON if check.outcome == "undecided" else ""


def _find_limits(case: _Case) -> tuple[float, float, float] | None:
    """Return limits for the baseline's value and both ends of its 95% interval (all equal for `max` and `min`)."""
    check, bound = case.check, case.bound
    if not isinstance(bound, Allowance):
        return bound, bound, bound
    if case.target.metric.quantile is None:
        check.reason = check.reason or f"{check.metric} has no known standard error, so write max or min in the rule"
    if case.accepted is None or check.reason:
        return None
    baseline = case.accepted.recorded(case.target.key, case.target.correction)
    check.baseline, check.baseline_interval, check.baseline_covers = baseline.value, baseline.interval, baseline.covers
    if baseline.value is None:
        check.reason = f"the baseline lacks {check.metric}: {baseline.status}"
        return None
    if baseline.interval is None:
        check.reason = f"the baseline lacks a 95% interval of {check.metric}. Save a new baseline"
        return None
    sign = -1 if case.lower else 1
    ends = (baseline.value, *baseline.interval)
    limit, least, most = (end + sign * (abs(end) * bound.relative + bound.absolute) for end in ends)
    return limit, least, most


def _reason_too_little(check: Check, rule: Rule, clusters: int | None) -> str:
    if check.sequences < rule.sequences:
        return f"the rule needs {rule.sequences:,} sequences, found {check.sequences:,}"
    if clusters is not None and clusters < MIN_CLUSTERS:
        return f"the rule needs at least {MIN_CLUSTERS} clusters, found {clusters}"
    return ""


def _reason_cannot_fail(exchange: SampleExchange, level: float) -> str:
    if exchange.least_p <= level:
        return ""
    n, m, paired = len(exchange.new), len(exchange.old), exchange.common
    if paired:
        return f"{paired} common clusters are too few, because {min_clusters(level)} are needed"
    return (
        f"{n} clusters in the dump and {m} in the baseline are too few. A baseline of {max(m, 2)} clusters "
        "needs a dump of "
        f"{min_clusters(level, max(m, 2))}"
    )


def _describe_pairing(sample: ClusterSample, other: ClusterSample) -> Pairing:
    if sample.equal_sides(other):
        return "same tokens"
    shared = sample.count_common(other)
    return "none" if not shared else "same clusters" if shared == len(sample) == len(other) else "some clusters"


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_baseline(result: Result, verdict: Verdict, rules: Sequence[Rule], *, by_hand: bool) -> Result:
    """Return a smaller copy of `result` to save as the baseline. It only contains what later gates compare."""
    old = result.provenance
    accepted = model.Acceptance(verdict=verdict.outcome, by_hand=by_hand, rules=[rule.text for rule in rules])
    provenance = model.Provenance(
        version=old.version, inputs=_merge_inputs(old.inputs), by=old.by, framework=old.framework,
        accepted=accepted,
    )  # fmt: skip
    runs = {name: _reduce_run(run) for name, run in result.runs.items()}
    return Result(provenance=provenance, corrections=result.corrections, warnings=[], runs=runs)


def _merge_inputs(files: Iterable[model.InputFile]) -> list[model.InputFile]:
    found: dict[tuple[str, str, str], model.InputFile] = {}
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
        distribution=model.Distribution(edges=[], tokens=[], k3=[]), breakdowns={},
        joint=model.JointDistribution(width=1.0, x=[], y=[], tokens=[]), worst_tokens=[], worst_sequences=[],
        clusters=_fold_table(run.clusters, sample.keys, sample.sums),  # one row per cluster, summed over all steps
        content=None if run.content is None else run.content.model_copy(update={"example": ""}),
    )  # fmt: skip


def _reduce_groups(groups: Groups) -> Groups:
    table = groups.clusters
    if table is None:
        return groups
    keys, values = np.array([int(text, 16) for text in table.hashes], np.uint64), np.array(table.groups, np.uint64)
    small = _fold_table(table, keys, np.array(table.sums), values)
    return groups.model_copy(update={"clusters": small})


def _fold_table(table: model.Clusters, keys: Hashes, sums: Float64s, values: Hashes | None = None) -> model.Clusters:
    by_value, folded = values is not None, len(keys) > OVERALL_CAP
    values = np.zeros_like(keys) if values is None else values
    if folded:
        room = np.uint64(max(OVERALL_CAP // len(np.unique(values)), 1))
        (keys, values), where = np.unique(np.stack([keys % room, values]), axis=1, return_inverse=True)
        gathered = np.zeros((len(keys), sums.shape[1]))
        np.add.at(gathered, where.ravel(), sums)
        sums = gathered
    return model.Clusters(
        by=table.by, columns=table.columns, hashes=[f"{key:016x}" for key in keys.tolist()],
        groups=values.tolist() if by_value else [], folded=table.folded or folded,
        sums=round_sums(sums, table.columns),
    )  # fmt: skip


def write_baseline(baseline: Result, place: Path) -> Path:
    """Write a baseline as JSON to the file `place`. If `place` is a folder, add a numbered file such as 0001.json."""
    content = "".join(_format_lines(baseline.to_data())) + "\n"
    write_atomically(NextNumber(place) if place.is_dir() else place, content.encode())
    return place


def _format_lines(data: Any, indent: str = "") -> Iterator[str]:
    """Yield JSON with one line per field and per table row, so that `git diff` shows what changed."""
    inner = f"{indent} "
    if isinstance(data, dict) and data:
        for number, key in enumerate(sorted(data)):
            yield f"{',' if number else '{'}\n{inner}{_format_flat(key)}: "
            yield from _format_lines(data[key], inner)
        yield f"\n{indent}}}"
    elif isinstance(data, list) and data and isinstance(data[0], (list, dict)):
        yield "[\n" + ",\n".join(inner + _format_flat(item) for item in data) + f"\n{indent}]"
    else:
        yield _format_flat(data)


def _format_flat(data: Any) -> str:
    return json.dumps(data, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


IN_MEMORY = "the Result in memory"


def load_result(
    paths: Sequence[DumpSource | Result],
    rules: Sequence[Rule],
    corrections: Sequence[Correction] = (),
    **options: Unpack[ReadOptions],
) -> Result:
    """Read a saved Result, or analyze dumps with `corrections` and with every column and preset that a rule uses."""
    dumps = [source for source in paths if not isinstance(source, Result)]
    saved = [each for each in paths if isinstance(each, Result) or (isinstance(each, str) and is_result(each))]
    if saved:
        given = saved[0]
        name = IN_MEMORY if isinstance(given, Result) else given
        if len(paths) > 1:
            raise ConfigError(f"{name}: a Result must be the only argument. Pass one Result, or only dumps")
        if corrections or options.get("rename"):
            unused = f"{option('corrections')} and {option('columns')}"
            raise ConfigError(f"{name}: leave out {unused}, which do not work with a Result")
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
            command="save the first baseline with --save-baseline FILE --accept",
        )
        raise DataError("the baseline does not exist", file=place, remedy=remedy)
    elif os.path.isdir(place):
        remedy = f"pass the file of the baseline with {option('baseline')}, and the dumps as arguments"
        raise DataError("this is a folder, not a saved Result", file=place, remedy=remedy)
    return Baseline(place, read_result(place), fixed_tokens)


def plan_sample_sizes(
    result: Result, rules: Sequence[Rule], regression: float, against: Baseline, level: float = DEFAULT_LEVEL
) -> list[SampleSizePlan]:
    """Estimate how much data each rule with `max` or `increase` needs to detect a rise by `regression` (0.1 is 10%)."""
    _check_level(level)
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
    _check_level(level)
    if not rules:
        raise ConfigError(f"{paths[0]} is a metrics log, which needs a rule with max or min, as in --rule k3:max=0.01")
    for rule in rules:
        if rule.increase is not None or rule.decrease is not None or not rule.bounds:
            problem = "only max and min work with a metrics log. To compare with a baseline, pass dumps or Results"
            raise ConfigError(f"rule {rule.text}: {problem}")
        if rule.per not in ("overall", "step") or rule.correction is not None or rule.sequences:
            raise ConfigError(f"rule {rule.text}: for a metrics log, leave out correction, sequences and per=COLUMN")
    logs = [run for path in paths for run in read_logged_values(path)]
    checks = [_judge_log(rule, run, kind) for run in logs for rule in rules for kind in rule.bounds]
    verdict = Verdict(
        version=__version__, outcome=worst_outcome([check.outcome for check in checks]), level=level, baseline=None,
        checks=checks, notes=["a metrics log has no intervals, so each rule only checks the step with the worst value"],
    )  # fmt: skip
    return add_sentences(verdict)


def _judge_log(rule: Rule, run: LoggedValues, kind: BoundKind) -> Check:
    name, limit = _find_name(rule.metric, run), rule.bounds[kind]
    assert isinstance(limit, float)
    check = Check(rule=rule.text, run=run.name, place="overall", metric=rule.metric, title=name or rule.metric,
                  unit="", kind=kind, limit=limit)  # fmt: skip
    if name is None:
        check.reason = f"the log does not contain {rule.metric}"
        return check
    known = [(value, step) for value, step in zip(run.values[name], run.steps, strict=True) if value is not None]
    if not known:
        check.reason = f"every value of {name} in the log is missing, NaN or infinite"
        return check
    check.value, step = (max if kind == "max" else min)(known, key=lambda pair: pair[0])
    check.place = f"step {step}"
    lost = run.not_finite.get(name, 0)
    check.outcome = "failed" if exceeds_limit(check) else "undecided" if lost else "passed"
    check.reason = f"{lost} values of {name} are NaN or infinite" if lost else ""
    return check


def _find_name(metric: str, run: LoggedValues) -> str | None:
    """Find the name of `metric` in a log: the same name, PREFIX/name, or a framework's name for the same metric."""
    if metric in run.values:
        return metric
    same = [name for name in run.values if name.rpartition("/")[2] == metric]
    same = same or [name for name in run.values if find_certain_metric(name) == metric]
    return same[0] if len(same) == 1 else None
