"""Verdicts of the gate: passed, failed and undecided, and the data that it refuses to judge."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mismatchctl.api.gate.gate import Baseline, judge, load_result, make_baseline, plan_sample_sizes, write_baseline
from mismatchctl.api.gate.rules import DEFAULT_RULES, DEFAULT_TOLERANCE, Rule, parse_rules
from mismatchctl.api.gate.verdict import Check, Verdict
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.recorder.recorder import Recorder
from mismatchctl.results.model import Result
from mismatchctl.results.reader import is_result, read_result
from mismatchctl.stats.comparison import Allowance
from tests.factories.cluster_results import noisy, result, table

FEW = settings(derandomize=True, max_examples=8)
ORDER = {"passed": 0, "undecided": 1, "failed": 2}
VALUES = st.lists(st.floats(0, 100), min_size=5, max_size=9)


def verdict(new: Result, base: Result | None = None, rule: str = "k3:increase=25%", **options: Any) -> Verdict:
    against = Baseline() if base is None else Baseline("base.json", base)
    return judge(new, [item for text in rule.split() for item in parse_rules(text)], against, **options)


def only(found: Verdict) -> Check:
    (check,) = found.checks
    return check


RULES = st.sampled_from(
    ["k3:increase=25%", "k3:increase=0%", "k3:max=0.3", "k3:increase=10%+0.05", "k3:max=0.2,increase=50%"]
)


@pytest.mark.parametrize("rule", ["k3:increase=25%", "k3:max=2e-3"])
def test_a_clear_change_fails_among_any_number_of_checks(rule: str) -> None:
    """The level per check is below 1 / the number of relabelings."""
    base, worse = result(noisy(64, 1e-3, 0)), result(noisy(64, 4e-3, 1, first=500))
    found = only(verdict(worse, base, rule, level=1e-9))
    assert (found.outcome, found.p is not None and 0 < found.p <= 1e-9) == ("failed", True)
    same = only(verdict(result(noisy(64, 1e-3, 2, first=900)), base, rule, level=1e-9))
    assert same.outcome == "passed"


@FEW
@given(VALUES, VALUES, RULES, st.data())
def test_a_worse_value_never_improves_a_verdict(
    new: list[float], old: list[float], rule: str, data: st.DataObject
) -> None:
    worse = list(new)
    worse[data.draw(st.integers(0, len(new) - 1))] += data.draw(st.floats(1e-3, 1e6))
    shift = data.draw(st.sampled_from([0, 3, 100]))
    base = result(table(old, hashes=range(shift, shift + len(old))))
    before, after = (verdict(result(table(values)), base, rule) for values in (new, worse))
    for one, two in zip(before.checks, after.checks, strict=True):
        assert ORDER[one.outcome] <= ORDER[two.outcome]
    assert ORDER[before.outcome] <= ORDER[after.outcome]


@FEW
@given(VALUES, st.sampled_from([1.7976931348623157e308, float("inf"), float("nan")]), RULES)
def test_non_finite_values_never_pass(values: list[float], bad: float, rule: str) -> None:
    base = result(table(values))
    if not math.isfinite(bad):  # analyze refuses the dump
        with pytest.raises(ValidationError):
            table([*values[1:], bad])
        return
    assert verdict(result(table([*values[1:], bad])), base, rule).outcome != "passed"


@FEW
@given(VALUES, VALUES, RULES, st.integers(2, 4))
def test_more_bad_data_never_turns_a_failure_into_a_pass(
    new: list[float], old: list[float], rule: str, times: int
) -> None:
    base = result(table(old, hashes=range(1000, 1000 + len(old))))
    before, after = verdict(result(table(new)), base, rule), verdict(result(table(new * times)), base, rule)
    for one, two in zip(before.checks, after.checks, strict=True):
        assert not (one.outcome == "failed" and two.outcome == "passed")


@FEW
@given(st.permutations(list(range(8))))
def test_the_order_of_rows_does_not_change_the_verdict(order: list[int]) -> None:
    new, old = [3.0 + i * i % 5 for i in range(8)], [2.0 + i % 3 for i in range(8)]
    base = result(table(old))
    shuffled = table([new[i] for i in order], hashes=order)
    assert verdict(result(shuffled), base) == verdict(result(table(new)), base)


def test_regressions_fail_and_unchanged_runs_pass() -> None:
    base = result(noisy(24, 1e-3, 0))
    assert only(verdict(result(noisy(24, 1e-3, 1, first=100)), base)).outcome == "passed"
    failed = only(verdict(result(noisy(24, 4e-3, 1, first=100)), base))
    assert (failed.outcome, failed.pairing, failed.clusters) == ("failed", "none", 24)
    assert failed.p is not None and failed.p < 0.05
    assert failed.limit == pytest.approx(1.25 * failed.baseline)
    within = only(verdict(result(noisy(6, 1.6e-3, 4, first=100)), base))
    assert within.outcome == "undecided" and "noise" in within.reason


def test_paired_prompts_find_smaller_regressions() -> None:
    base = result(noisy(8, 1e-3, 0))
    worse = [[*row[:3], row[3] * 1.1, row[4]] for row in base.runs["run"].clusters.sums]
    paired = noisy(8, 1e-3, 0).model_copy(update={"sums": worse})
    apart = paired.model_copy(update={"hashes": [f"{i + 50:016x}" for i in range(8)]})
    found = [only(verdict(result(clusters), base, "k3:increase=5%")) for clusters in (paired, apart)]
    assert [check.outcome for check in found] == ["failed", "undecided"]
    assert [check.pairing for check in found] == ["same tokens", "none"]
    healthy = noisy(8, 1e-3, 0), apart.model_copy(update={"sums": noisy(8, 1e-3, 0).sums})
    least = [only(verdict(result(clusters), base, "k3:increase=5%")).detectable for clusters in healthy]
    assert least[0] is not None and least[1] is not None and least[0] < least[1]


@pytest.mark.slow
def test_many_checks_share_one_level() -> None:
    """A step that fails alone is undecided among forty steps."""
    base = result(noisy(64, 1e-3, 0, first=500))
    steps = noisy(320, 1e-3, 3, groups=40)
    rows = list(zip(steps.sums, steps.groups, strict=True))
    worse = [[*row[:3], row[3] * 1.6, row[4]] if group == 0 else row for row, group in rows]
    many = result(steps.model_copy(update={"sums": worse}), steps=range(40))
    alone = result(table([row[3] for row, group in zip(worse, steps.groups, strict=True) if group == 0]))
    assert only(verdict(alone, base)).outcome == "failed"
    found = verdict(many, base, "k3:increase=25%,per=step")
    assert len(found.checks) == 40
    assert found.checks[0].outcome == "undecided"
    assert found.checks[0].p > only(verdict(alone, base)).p


def test_too_little_data_is_undecided() -> None:
    base = result(noisy(20, 1e-3, 0))
    few = verdict(result(noisy(4, 1.0, 1)), base).checks[0]
    assert few.outcome == "undecided" and "clusters" in few.reason
    wanted = only(verdict(result(noisy(20, 1.0, 1)), base, "k3:increase=25%,sequences=21"))
    assert wanted.outcome == "undecided" and wanted.reason == "the rule needs 21 sequences, found 20"


def test_a_missing_baseline_is_undecided() -> None:
    assert "no baseline" in only(verdict(result(noisy(9, 1e-3, 0)))).reason
    assert only(verdict(result(noisy(9, 1e-3, 0)), rule="k3:max=0.01")).outcome == "passed"
    other = result(noisy(9, 1e-3, 0), name="other")
    other.runs["third"] = other.runs["other"]
    assert "it lacks run run" in only(verdict(result(noisy(9, 1e-3, 0)), other)).reason


def test_incomparable_results_name_the_first_difference() -> None:
    new, base = result(noisy(9, 1e-3, 0)), result(noisy(9, 1e-3, 0))
    for each, dtype in ((new, "list<element: float>"), (base, "large_list<item: float>")):
        for file in each.provenance.inputs:
            file.dtypes.update(rollout_log_probs=dtype, train_log_probs=dtype)
    assert only(verdict(new, base)).outcome == "passed"
    for file in base.provenance.inputs:
        file.dtypes.update(train_log_probs="list<element: halffloat>")
    assert only(verdict(new, base)).reason == (
        "the baseline is not comparable: "
        "train_log_probs is stored as float in the dump and as halffloat in the baseline"
    )
    for file in base.provenance.inputs:
        file.dtypes.update(train_log_probs="list<element: float>")
    new.provenance.framework, base.provenance.framework = "verl@2025-11", "verl@2026-02"
    assert "the framework is verl@2025-11 in the dump" in only(verdict(new, base)).reason
    base.provenance.framework = "verl@2025-11"
    new.corrections = [Correction(name="mine")]
    rule = "rejected_tokens:correction=mine,increase=10%"
    assert "does not have the correction mine" in only(verdict(new, base, rule)).reason
    base.corrections = [Correction(name="mine", about="another")]
    assert "correction mine has another definition" in only(verdict(new, base, rule)).reason


def test_exact_values_are_judged_without_noise() -> None:
    new = result(noisy(9, 1e-3, 0))
    metrics = new.runs["run"].overall.metrics
    metrics["abs_diff_max"].value = 3.0
    assert only(verdict(new, rule="abs_diff_max:max=3")).outcome == "passed"
    assert only(verdict(new, rule="abs_diff_max:max=2.99")).outcome == "failed"
    assert "has no known standard error" in only(verdict(new, new, "abs_diff_max:increase=10%")).reason
    metrics["abs_diff_p99"].value, metrics["abs_diff_p99"].interval = 0.2, (0.15, 0.25)
    outcomes = [only(verdict(new, rule=f"abs_diff_p99:max={limit}")).outcome for limit in (0.14, 0.155, 0.2)]
    assert outcomes == ["failed", "undecided", "passed"]
    metrics["khat_token"].value, metrics["khat_token"].status = None, "fewer than five"
    assert only(verdict(new, rule="khat_token:max=0.7")).reason == "fewer than five"


def test_floors_and_bitwise_rules_work() -> None:
    same = result(noisy(9, 0.0, 0))
    assert only(verdict(same, rule="k3:min=1e-12")).outcome == "failed"
    metrics = same.runs["run"].overall.metrics
    metrics["bitwise_all"].value = 1.0
    found = judge(same, DEFAULT_RULES, Baseline("base", result(noisy(9, 1e-3, 0))))
    assert [check.outcome for check in found.checks] == ["passed", "failed", "undecided"]
    assert found.checks[2].title == "suspiciously good"
    assert verdict(same, rule="bitwise_all:min=1").outcome == "passed"
    assert verdict(result(noisy(9, 1e-3, 0)), rule="bitwise_all:min=1").outcome == "failed"


def test_baselines_are_small_and_reproducible(tmp_path: Path) -> None:
    one, two = (
        result(noisy(40, 1e-3, 0, groups=4), steps=range(4)),
        result(noisy(40, 1e-3, 0, groups=4), steps=range(4)),
    )
    for file in two.provenance.inputs:
        file.path = f"/elsewhere/{file.path}"
    rules = parse_rules("k3:increase=25%")
    paths = [
        write_baseline(make_baseline(each, judge(each, rules), rules, by_hand=True), tmp_path / name)
        for each, name in ((one, "a.json"), (two, "b.json"))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_size < 40_000
    data = json.loads(paths[0].read_text(), parse_constant=pytest.fail)
    assert list(data) == sorted(data)
    lines = {line.strip().rstrip(",") for line in paths[0].read_text().splitlines()}
    (run,) = data["runs"].values()
    assert all(json.dumps(row, separators=(",", ":")) in lines for row in run["clusters"]["sums"])  # for `git diff`
    again = read_result(paths[0])
    assert again.provenance.accepted is not None and again.provenance.accepted.verdict == "undecided"
    new = result(noisy(40, 2e-3, 1, groups=4), steps=range(4))
    direct, saved = only(verdict(new, one)), only(verdict(new, again))
    assert (direct.p, direct.value) == (pytest.approx(saved.p, rel=1e-6), saved.value)
    assert direct.baseline == pytest.approx(saved.baseline, rel=1e-8)


def test_baselines_with_many_corrections_are_results(tmp_path: Path) -> None:
    """The mark of a baseline follows its corrections."""
    whole, rules = result(noisy(8, 1e-3, 0)), parse_rules("k3:max=1")
    gates = [{"keep": [0.5, 2.0]}]
    whole.corrections = [Correction.model_validate({"name": f"c{number}", "gates": gates}) for number in range(200)]
    place = write_baseline(make_baseline(whole, judge(whole, rules), rules, by_hand=False), tmp_path / "ok.json")
    assert is_result(place)


@pytest.mark.slow
def test_baselines_of_many_clusters_are_folded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with Recorder(tmp_path / "run") as recorder:
        rollout = [-rng.exponential(1.0, 4) for _ in range(3000)]
        train = [x + rng.normal(0, 0.05, 4) - 0.2 for x in rollout]
        names = np.arange(3000)
        recorder.write(step=0, rollout_log_probs=rollout, train_log_probs=train, prompt_id=names, worker=names % 2)
    rules = parse_rules("k3:increase=5%") + parse_rules("k3:increase=5%,per=worker")
    new = load_result([str(tmp_path / "run")], rules)
    place = write_baseline(make_baseline(new, judge(new, rules), rules, by_hand=True), tmp_path / "baseline.json")
    saved = read_result(place)
    assert len(saved.runs["run"].clusters.hashes) <= 1024 and saved.runs["run"].clusters.folded
    table = saved.runs["run"].by["worker"].clusters
    assert table is not None and len(table.hashes) <= 1024 and set(table.groups) == {0, 1}
    found = judge(new, rules, Baseline("baseline", saved))
    assert [check.outcome for check in found.checks] == ["passed"] * 3
    for check in found.checks:
        assert check.baseline == pytest.approx(check.value, rel=1e-6)


SAVING = """
import sys
from pathlib import Path
from mismatchctl.api.gate.gate import write_baseline
from mismatchctl.results.reader import is_result, read_result
baselines = [read_result(path) for path in sys.argv[2:]]
print(flush=True)
sys.stdin.read()  # until all processes are ready
for baseline in baselines:
    write_baseline(baseline, Path(sys.argv[1]))
"""


@pytest.mark.process
def test_concurrent_saves_never_share_a_number(tmp_path: Path) -> None:
    """Twelve processes save four baselines each at the same time."""
    rules = parse_rules("k3:increase=25%")
    found = [result(noisy(9, level * 1e-3, 0)) for level in range(1, 49)]
    paths = [tmp_path / f"given-{number}.json" for number in range(len(found))]
    for each, path in zip(found, paths, strict=True):
        write_baseline(make_baseline(each, judge(each, rules), rules, by_hand=True), path)
    folder = tmp_path / "accepted"
    folder.mkdir()
    reader, writer = os.pipe()
    saving = [
        subprocess.Popen([sys.executable, "-c", SAVING, folder, *paths[first::12]], stdin=reader,
                         stdout=subprocess.PIPE)
        for first in range(12)
    ]  # fmt: skip
    for process in saving:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
    os.close(writer)
    os.close(reader)
    assert [process.communicate(timeout=60) and process.returncode for process in saving] == [0] * 12
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:04d}.json" for number in range(1, 49)]
    values = {each.runs["run"].overall.metrics["k3"].value for each in map(read_result, folder.iterdir())}
    assert values == {each.runs["run"].overall.metrics["k3"].value for each in found}


def test_planned_rises_shrink_with_the_root_of_the_size() -> None:
    base = result(noisy(40, 1e-3, 0))
    rules = parse_rules("k3:increase=0%")
    small, large = (plan_sample_sizes(base, rules, rise, Baseline())[0] for rise in (0.1, 0.21))
    assert small.clusters / large.clusters == pytest.approx(4, rel=0.1)  # log 1.21 is twice log 1.1
    allowed = plan_sample_sizes(base, parse_rules("k3:increase=25%"), 0.2, Baseline())[0]
    assert (allowed.clusters, allowed.status) == (None, "the rule already allows a rise of 25%")
    zero = plan_sample_sizes(result(table([0.0] * 40)), rules, 0.2, Baseline())[0]
    assert (zero.clusters, zero.status) == (None, "k3 is not above 0")
    assert plan_sample_sizes(base, rules, 0.1, Baseline("itself", base))[0].clusters == 5


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("k3", {"increase": Allowance(relative=DEFAULT_TOLERANCE)}),
        ("ess_sequence", {"metric": "ess_sequence", "decrease": Allowance(relative=DEFAULT_TOLERANCE)}),
        ("k3:max=0.01,per=step", {"max": 0.01, "per": "step"}),
        ("k3:increase=1e-4,sequences=9", {"increase": Allowance(absolute=1e-4), "sequences": 9}),
        ("k3:increase=20% + 1e-5", {"increase": Allowance(relative=0.2, absolute=1e-5)}),
        ("k3:increase=1e+2", {"increase": Allowance(absolute=100.0)}),
        ("kept_tokens:correction=mine,max=5", {"metric": "kept_tokens", "correction": "mine", "max": 5.0}),
        ("rejected_tokens:correction=mine,max=5%", {"metric": "rejected_tokens", "correction": "mine", "max": 0.05}),
        ("ESS_token:min=95%", {"metric": "ess_token", "min": 0.95}),
        ("{metric: k2, max: 1}", {"metric": "k2", "max": 1.0}),
    ],
)
def test_rules_are_parsed_from_text(text: str, means: dict[str, Any]) -> None:
    (rule,) = parse_rules(text)
    assert rule == Rule(**means)
    assert parse_rules(rule.text) == [rule]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("k33:max=1", "k3"),
        ("k3:maxx=1", "max"),
        ("k3:max", "KEY=VALUE"),
        ("k3:max=1,max=2", "twice"),
        ("k3:max=many", "max"),
        ("k3=0.1", "^rule 'k3=0.1': write METRIC:KEY=VALUE, for example k3:max=0.1$"),
        ("k3<0.01", "^rule 'k3<0.01': write METRIC:KEY=VALUE, for example k3:max=0.1$"),
        ("k3:max=20%", "k3 is measured in nats/token, so a percentage is not allowed. Write max=0.2, or increase=20%"),
        ("abs_diff_p99:min=1%", "measured in nats,"),
        ("kept_tokens:correction=none,max=5%", "measured in tokens,"),
        ("{metric: k3, max: 20%}", "nats/token"),
        ("{metric: k3, max: yes}", "true is not a number"),
        ("{metric: k3, max: true}", "true is not a number"),
        *(
            (f"{{metric: k3, max: {number}}}", "plain decimal number")
            for number in ("1:30", "010", "0b1", "1_0", "0x1")
        ),
        *((f"k3:increase={number}", "plain decimal number") for number in ("yes", "1:30", "010", "1_0%", "0b1")),
        ("k3:max=1,sequences=010", "plain decimal number"),
        ("k3:max=nan", "max"),
        ("k3:increase=-5%", "increase"),
        ("k3:increase=20%%", "increase"),
        ("k3:min=2,max=1", "above"),
        ("ratio_mean", "too high or too low"),
        ("rejected_tokens:max=1", "correction=NAME"),
        ("{metric: [}", "YAML"),
        ("absent.yaml", "absent.yaml"),
    ],
)
def test_contradictory_rules_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        judge(result(noisy(9, 1e-3, 0)), parse_rules(text))


def test_rules_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules:\n  - {metric: k3, increase: 20%, per: step}\n  - metric: k2\n")
    (tmp_path / "rules.toml").write_text('[[rules]]\nincrease = "20%"\nper = "step"\n[[rules]]\nmetric = "k2"\n')
    found = [parse_rules(str(tmp_path / name)) for name in ("rules.yaml", "rules.toml")]
    assert found[0] == found[1]
    assert [rule.text for rule in found[0]] == ["k3:per=step,increase=20%", "k2:increase=25%"]
    for text, problem in (("rules: []", "empty"), ("rules: [{metric: k3}]\nrule: [{metric: k2}]", "'rule'")):
        (tmp_path / "rules.yaml").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            parse_rules(str(tmp_path / "rules.yaml"))


def test_runs_without_clusters_are_undecided() -> None:
    empty, some = result(table([])), result(table([1.0] * 8))
    for new, base in ((empty, empty), (empty, some), (some, empty)):
        check = only(verdict(new, base))
        assert check.outcome == "undecided" and "clusters" in check.reason


@pytest.mark.parametrize("rule", ["k3:min=1e-12", "k3:decrease=5%", "k3:increase=5%"])
def test_overflowing_values_never_pass(rule: str) -> None:
    huge, usual = result(table([1.7e308] * 8)), result(table([1.0] * 8))
    assert verdict(huge, usual, rule).outcome != "passed"
    if rule != "k3:min=1e-12":
        assert verdict(usual, huge, rule).outcome != "passed"
