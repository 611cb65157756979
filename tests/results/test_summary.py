"""The summary of a run: growth, level of K3, and the four answers, in every output format."""

import io
import json
import math
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare.compare import compare
from mismatchctl.api.diagnose import diagnose
from mismatchctl.api.gate.gate import judge
from mismatchctl.api.gate.rules import parse_rules
from mismatchctl.api.watch import Snapshot
from mismatchctl.core.formatting import format_number
from mismatchctl.report.document import Document
from mismatchctl.report.html import render_html
from mismatchctl.report.markdown import render_markdown
from mismatchctl.report.pages import gate
from mismatchctl.report.pages.analyze import document
from mismatchctl.report.pages.watch import format_answers
from mismatchctl.report.terminal import print_document
from mismatchctl.results.growth import Growth, fit_growth
from mismatchctl.results.model import Answer, Finding, Result, RivalCause, Value
from mismatchctl.results.reader import read_result
from mismatchctl.results.summary import (
    classify_k3,
    findings_status,
    first_sentence,
    get_summary,
    percent,
    run_status,
    summarize_run,
    summarize_runs,
)
from tests.factories.results import make_result
from tests.paths import SAMPLE_DATA

MOE = str(SAMPLE_DATA / "moe")


def growth(values: list[float | None], errors: float = 0.05, labels: list[object] | None = None) -> Growth:
    return fit_growth(
        labels or list(range(len(values))),  # type: ignore[arg-type]
        values,
        [None if value is None else errors * value for value in values],
    )


def test_k3_class_names_its_range() -> None:
    def text(value: float | None, se: float | None = None) -> str:
        return classify_k3(Value(value=value, se=se, status="ok" if value is not None else "no token")).text

    assert text(None) == "undefined"
    assert text(0.0).startswith("both sides agree")
    assert text(1e-7) == "very low"
    assert text(1e-4) == "normal for a dense model"
    assert "normal for an MoE" in text(1e-2, 1e-4)
    assert text(5.0) == "high for every kind of model"
    assert text(1.1e-3, 1e-4).endswith("; within noise, K3 may also be below 0.001")


def test_a_jump_is_found_at_its_step() -> None:
    values: list[float | None] = [1e-4] * 6 + [5e-4] * 6
    found = growth(values)
    assert found.factor == pytest.approx(5.0, rel=1e-3)
    assert (found.onset, found.onset_interval, found.until) == (6, (6, 6), 6)
    assert (found.verdict, found.value) == ("grew", 5e-4)
    assert found.brief == "▲ 5.00x at step 6"
    assert found.text.startswith("rose by a factor of 5.00 (95% interval ")
    assert found.text.endswith("at step 6: 1.00e-4 before, 5.00e-4 after, and 5.00e-4 at the last step")
    assert (found.shape, found.before, found.after) == ("jump", pytest.approx(1e-4), pytest.approx(5e-4))
    fell = growth(values[::-1])
    assert fell.text.startswith("fell by a factor of 5.00 (") and fell.verdict == "fell"


def test_a_ramp_is_found_with_start_and_end() -> None:
    values = np.exp(np.log(1e-4) + np.clip((np.arange(40) - 10) / 20, 0, 1) * np.log(8))
    found = growth(values.tolist(), 0.02)
    assert found.onset == 11 and found.until == 30
    assert found.factor == pytest.approx(8.0, rel=0.02)


def test_continuing_growth_is_reported() -> None:
    values = (1e-4 * np.exp(0.3 * np.clip(np.arange(16) - 8, 0, None))).tolist()
    found = growth(values)
    assert found.until == 15 and "from step 9 on" in found.text and "up to step" not in found.text


@pytest.mark.parametrize("noise", [0.1, 0.3])
@pytest.mark.parametrize("shape", ["jump", "ramp", "goes on"])
def test_the_onset_interval_covers_the_true_step(shape: str, noise: float) -> None:
    """The 95% interval should contain the true onset. With 120 series, chance allows a coverage of 0.9."""
    draw = np.random.default_rng(5)
    inside = []
    for _ in range(120):
        onset, steps = int(draw.integers(3, 20)), np.arange(24)
        end = {"jump": onset, "ramp": onset + 3, "goes on": 23}[shape]
        height = np.clip((steps - onset + 1) / (end - onset + 1), 0, 1) * math.log(8)
        found = growth((1e-3 * np.exp(height + draw.normal(0, noise, 24))).tolist(), noise)
        if found.onset_interval is not None:
            low, high = (float(end) for end in found.onset_interval)
            inside.append(low <= onset <= high)
    assert len(inside) > 100 and np.mean(inside) >= 0.9


@pytest.mark.parametrize("steps", [2, 4, 12, 100])
@pytest.mark.parametrize("scatter", [0.0, 0.3])
def test_noise_is_not_reported_as_growth(steps: int, scatter: float) -> None:
    noise = np.random.default_rng(7)
    alarms = 0
    for _ in range(60):
        values = 1e-3 * np.exp(noise.normal(0, 0.2, steps) + noise.normal(0, scatter, steps))
        alarms += growth(values.tolist(), 0.2).changed
    assert alarms <= 3


def test_excess_scatter_is_uneven() -> None:
    found = fit_growth(list(range(16)), [1e-4, 9e-4] * 8, [1e-6] * 16)
    assert not found.changed and found.verdict == "uneven"
    assert found.text.startswith("goes up and down over 16 steps by more than the standard errors")


def test_series_without_a_trend_give_the_reason() -> None:
    assert growth([1e-3]).text == "measured at one step only"
    assert growth([None, None]).text == "undefined at every step"
    assert growth([0.0, 0.0]).text == "0 at all 2 steps"
    assert growth([0.0, 1e-3]).text == "0 at 1 of 2 steps, up to 0.00100 at others"
    assert growth([1e-3] * 10, 0.1).text.startswith("did not change over 10 steps by more than the standard errors")


def test_step_labels_can_be_text() -> None:
    found = growth([1e-4] * 6 + [5e-4] * 6, labels=[f"night {place}" for place in range(12)])
    assert found.onset == "night 6"


def finding(cause: str, confidence: str = "high", share: float = 0.9) -> Finding:
    return Finding(
        cause=cause, confidence=confidence, title=f"Title of {cause}", summary=f"What shows "
        f"{cause}.",  # type: ignore[arg-type]
        share_k3=share, evidence=[], advice=f"Mend {cause}.",
    )  # fmt: skip


def answers(result: Result) -> dict[str, Answer]:
    return {answer.question: answer for answer in summarize_run(result.runs["run-a"]).answers}


def test_the_summary_has_four_answers_in_order() -> None:
    found = answers(make_result())
    assert list(found) == ["how bad", "since when", "why", "what to do"]
    assert all(answer.text and answer.level in ("good", "fair", "bad", "unknown") for answer in found.values())
    assert found["since when"].key == "grew" and found["since when"].level == "bad"


@pytest.mark.parametrize(
    ("cause", "confidence", "key"),
    [
        ("misaligned", "high", "fix_first"),
        ("misaligned", "medium", "fix"),
        ("temperature", "high", "fix"),
        ("stale_policy", "high", "ask"),
        ("numerical_noise", "high", "nothing"),
    ],
)
def test_the_advice_follows_the_findings(cause: str, confidence: str, key: str) -> None:
    result = make_result(steps=[None])
    run = result.runs["run-a"]
    run.findings = [finding(cause, confidence)]
    found = answers(result)
    assert found["what to do"].key == key
    assert found["why"].key == cause and "90% of the K3" in found["why"].text
    if key == "fix_first":
        assert found["what to do"].text == "fix this first, no correction can repair it: Mend misaligned."
        assert found["what to do"].level == "bad"


@pytest.mark.parametrize(("share", "key"), [(0.04, "ask"), (0.06, "fix_first"), (None, "fix_first")])
def test_a_cause_of_little_k3_is_not_the_headline(share: float | None, key: str) -> None:
    result = make_result(steps=[None])
    run = result.runs["run-a"]
    small, large = finding("misaligned", "high"), finding("weights_differ", "medium")
    small.share_k3, large.share_k3 = share, 0.94
    run.findings = [small, large]
    found = answers(result)
    assert found["what to do"].key == key
    assert found["why"].key == ("weights_differ" if key == "ask" else "misaligned")
    assert run_status(run).status == "FAIL"


@pytest.mark.parametrize(
    ("cause", "confidence", "share", "said"),
    [
        ("numerical_noise", "low", 0.9, "cause uncertain, possibly title of numerical_noise"),
        ("misaligned", "low", None, "cause uncertain, possibly title of misaligned"),
        ("misaligned", "high", 0.01, "main cause unknown"),
        ("unexplained", "high", 0.9, "cause not identified"),
        ("growing_mismatch", "low", 0.9, "cause not identified"),
    ],
)
def test_the_headline_agrees_with_the_first_finding(
    cause: str, confidence: str, share: float | None, said: str
) -> None:
    run = make_result().runs["run-a"]
    run.findings = []
    before = run_status(run)
    assert before.text.endswith(", cause not identified")
    run.findings, run.story = [finding(cause, confidence)], None
    run.findings[0].share_k3 = share
    after = run_status(run)
    assert after.text == before.text.replace("cause not identified", said) and after.status == before.status
    judged = findings_status(run.findings)
    assert said in judged.text or cause == "unexplained"
    assert judged.status != "OK"


@pytest.mark.parametrize(
    ("confidence", "level", "said"), [("high", "good", "no correction is needed"), ("low", "unknown", "so far")]
)
def test_little_data_does_not_give_an_all_clear(confidence: str, level: str, said: str) -> None:
    result = make_result(steps=[None])
    result.runs["run-a"].findings = [finding("numerical_noise", confidence)]
    answer = answers(result)["what to do"]
    assert (answer.key, answer.level) == ("nothing", level) and said in answer.text


def test_the_first_sentence_has_no_parentheses_even_if_they_are_nested() -> None:
    advice = "Replay the routing (slime --replay (R3); NeMo-RL (R3)), and use float32. Then (later) measure again."
    assert first_sentence(advice) == "Replay the routing, and use float32."


def test_uncertain_findings_name_the_deciding_measurement() -> None:
    result = make_result(steps=[None])
    unsure = finding("moe_routing", "low")
    unsure.rivals = [RivalCause(cause="numerical_noise", tell="record rollout_experts")]
    result.runs["run-a"].findings = [unsure]
    text = answers(result)["what to do"].text
    assert text.endswith("the cause is uncertain. To find out, record rollout_experts")


@pytest.mark.parametrize(
    ("k3", "se", "level"),
    [(9e-4, 1e-5, "good"), (9e-4, 1e-4, "fair"), (1.1e-5, 1e-6, "good"), (9e-6, 1e-6, "good"), (1.1e-3, 1e-4, "fair")],
)
def test_an_interval_above_the_dense_range_gives_no_all_clear(k3: float, se: float, level: str) -> None:
    result = make_result(steps=[None])
    result.runs["run-a"].overall.metrics["k3"] = Value(value=k3, se=se)
    result.runs["run-a"].findings = [finding("numerical_noise")]
    found = answers(result)
    assert found["how bad"].level == level
    assert found["what to do"].key == ("nothing" if level == "good" else "ask")


def test_growing_mismatch_always_needs_action() -> None:
    result = make_result()
    result.runs["run-a"].findings = [finding("numerical_noise")]
    assert answers(result)["what to do"].key == "ask"


def test_k3_shows_its_interval_and_the_baseline() -> None:
    result, before = make_result(steps=[None]), make_result(steps=[None], level=1e-5)
    result.runs["run-a"].overall.metrics["k3"] = Value(value=4e-4, se=4e-5)
    before.runs["run-a"].overall.metrics["k3"] = Value(value=1e-4, se=1e-5)
    summarize_runs(result, ("night.json", before))
    first = get_summary(result.runs["run-a"]).answers[0]
    facts = {fact.name: fact for fact in first.evidence}
    assert facts["k3"].interval == pytest.approx((4e-4 - 1.959964 * 4e-5, 4e-4 + 1.959964 * 4e-5))
    spread = 1.959964 * math.sqrt(0.1**2 + 0.1**2)
    assert facts["over_baseline"].interval == pytest.approx((4 * math.exp(-spread), 4 * math.exp(spread)))
    assert first.level == "bad" and "4.00 times the baseline's 1.00e-4" in first.text
    summarize_runs(result, ("night.json", result))
    assert "no significant change" in get_summary(result.runs["run-a"]).answers[0].text


@pytest.mark.parametrize(("error", "level"), [(0.05, "bad"), (0.09, "bad"), (0.12, "fair")])
def test_a_rise_is_judged_by_a_one_sided_bound(error: float, level: str) -> None:
    """K3 is 24% higher. The bound at 1.645 errors excludes 1 in the second case, the bound at 1.96 does not."""
    result, before = make_result(steps=[None]), make_result(steps=[None], level=1e-5)
    result.runs["run-a"].overall.metrics["k3"] = Value(value=1.24e-4, se=1.24e-4 * error)
    before.runs["run-a"].overall.metrics["k3"] = Value(value=1e-4, se=1e-4 * error)
    summarize_runs(result, ("night.json", before))
    first = get_summary(result.runs["run-a"]).answers[0]
    assert (first.level == "bad", "no significant change" in first.text) == (level == "bad", level != "bad")


def test_a_baseline_of_other_runs_is_not_compared() -> None:
    result, before = make_result(), make_result(runs=["x", "y"])
    summarize_runs(result, ("b.json", before))
    assert get_summary(result.runs["run-a"]).against is None


@pytest.fixture(scope="module")
def moe() -> Result:
    return analyze([MOE])


def test_a_result_starts_with_its_format_and_contains_its_summary(moe: Result, tmp_path: Path) -> None:
    assert moe.to_json().startswith('{"format":')
    moe.save(tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text())["runs"]["moe"]["story"]
    assert stored["growth"]["onset"] == 6 and len(stored["answers"]) == 4
    assert read_result(tmp_path / "r.json").runs["moe"].story == moe.runs["moe"].story


def test_summary_finding_and_diagnosis_state_the_same_growth(moe: Result) -> None:
    run = moe.runs["moe"]
    story = get_summary(run)
    said = next(found for found in run.findings if found.cause == "stale_policy")
    (alone,) = diagnose([MOE]).runs.values()
    again = next(found for found in alone if found.cause == "stale_policy")
    for found in (said, again):
        facts = {fact.name: fact for fact in found.evidence}
        assert facts["factor"].value == pytest.approx(story.growth.factor, rel=1e-3)
        assert (facts["onset"].value, facts["onset"].interval) == (story.growth.onset, story.growth.onset_interval)
        assert story.growth.text in found.summary
    assert story.growth.text in story.answer("since when").text
    assert story.growth.text not in story.answer("why").text  # one sentence is shown once


@pytest.mark.slow
def test_all_commands_and_formats_state_the_same_growth(moe: Result) -> None:
    """The texts come from the gate, compare, watch, the terminal, Markdown and the page."""
    growth = get_summary(moe.runs["moe"]).growth
    verdict = judge(moe, parse_rules("k3:max=0.1"))
    assert verdict.growth == {"moe": growth}
    assert [side.growth for side in compare([MOE, MOE]).sides] == [growth, growth]
    watched = Snapshot(moe, (), frozenset(), ("moe",), None, ())
    (line,) = format_answers(watched, watched.answered)
    assert f"grew {format_number(growth.factor)}x since step {growth.onset}" in line
    said = {
        **{f"gate {name}": write(gate.document(verdict)) for name, write in WRITERS.items()},
        **{f"analyze {name}": write(document(moe)) for name, write in WRITERS.items()},
    }
    for name, text in said.items():
        plain = " ".join(unescape(re.sub(r"<[^>]*>|\\", "", text)).split())
        assert f"K3 {growth.text}" in plain, name


def in_terminal(document: Document) -> str:
    console = Console(width=4000, file=(written := io.StringIO()))
    print_document(document, console, whole=True)
    return written.getvalue()


WRITERS: dict[str, Callable[[Document], str]] = {
    "terminal": in_terminal,
    "Markdown": render_markdown,
    "page": render_html,
}


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "–"),
        (0.0, "0%"),
        (2e-6, "<0.001%"),
        (0.1234, "12.3%"),
        (0.9996, "100%"),
        (1.5, "150%"),
        (-223.4, "-22,340%"),
    ],
)
def test_shares_are_written_as_percentages(share: float | None, text: str) -> None:
    assert percent(share) == text
