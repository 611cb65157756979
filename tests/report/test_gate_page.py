"""The page of a verdict: headline, values next to the baseline, the statistic that rose, and the next step."""

import pytest

from mismatchctl.api.gate.coverage import undecided_check
from mismatchctl.api.gate.verdict import Check, Verdict
from mismatchctl.report.html import render_html
from mismatchctl.report.pages.gate import advise_next, document
from mismatchctl.stats.comparison import K3Part
from tests.report.page_parser import Parsed, page_figures


def _verdict(outcome: str, *risen: str) -> Verdict:
    up, same = {"rise": 2.0, "interval": (1.0, 3.0), "rose": True}, {"rise": 0.0, "interval": (-0.1, 0.1)}
    names = ("bulk", "shoulder", "tail")
    parts = [K3Part.model_validate({"name": name, "share": 0.3} | (up if name in risen else same)) for name in names]
    check = Check(
        rule="k3:increase=10%", run="a", place="overall", metric="k3", title="K3 KL", unit="nats/token",
        kind="increase", value=0.052, interval=(0.05, 0.054), limit=0.0011, allowance="10%", baseline=0.001,
        baseline_interval=(0.0009, 0.0011), parts=parts, outcome=outcome,
    )  # fmt: skip
    return Verdict(outcome=outcome, level=0.05, baseline="ok.json", checks=[check])


def test_the_headline_states_the_verdict() -> None:
    page = render_html(document(_verdict("failed", "bulk")))
    assert Parsed(page).text.count("failed: K3 is 52.0x the baseline") >= 1
    assert '<h1 class="fail gate">' in page


def test_new_values_are_drawn_next_to_the_baseline() -> None:
    figures = page_figures(render_html(document(_verdict("failed", "tail"))))
    new, baseline = figures["checks"]["marks"]
    assert (new["name"], baseline["name"]) == ("new", "baseline")
    assert new["x"] == pytest.approx([0.052 / 0.0011], rel=1e-3)
    assert baseline["x"] == pytest.approx([0.001 / 0.0011], rel=1e-3)
    assert (new["low"][0], new["high"][0]) == pytest.approx((0.05 / 0.0011, 0.054 / 0.0011), rel=1e-2)
    assert [line["at"] for line in figures["checks"]["rules"]] == [1.0]
    (risen,) = figures["parts-0"]["marks"]
    assert dict(zip(risen["y"], risen["x"], strict=True)) == {
        "most tokens (bulk)": 0,
        "shoulder": 0,
        "rare tokens (tail)": 2,
    }


@pytest.mark.parametrize(
    ("risen", "words"),
    [(("tail",), "K3 rose only for rare tokens"), (("bulk", "tail"), "K3 rose for typical tokens"), ((), "See what")],
)
def test_the_advice_follows_the_part_that_rose(risen: tuple[str, ...], words: str) -> None:
    texts = advise_next(_verdict("failed", *risen))
    assert texts[0].startswith(words)
    assert any("mismatchctl compare ok.json DUMP" in text for text in texts)
    assert words in Parsed(render_html(document(_verdict("failed", *risen)))).text


def test_passed_verdicts_have_no_advice() -> None:
    assert advise_next(_verdict("passed")) == []
    assert "what to do" not in Parsed(render_html(document(_verdict("passed")))).text
    assert "Record more prompts" in advise_next(_verdict("undecided"))[0]


def test_a_missing_run_is_named_once_and_gives_no_empty_advice() -> None:
    verdict = _verdict("undecided")
    verdict.checks.insert(0, undecided_check("dense", "run dense", "the dump lacks this run of the baseline"))
    page = Parsed(render_html(document(verdict))).text
    assert "undecided: run dense: the dump lacks this run of the baseline" in page
    assert "what to do" not in page


def test_each_run_is_drawn_with_its_own_outcome_and_the_failed_run_shows_what_rose() -> None:
    calm, failed = _verdict("passed").checks[0], _verdict("failed", "tail").checks[0].model_copy(update={"run": "b"})
    verdict = Verdict(outcome="failed", level=0.05, baseline="ok.json", checks=[calm, failed])
    figures = page_figures(render_html(document(verdict)))
    assert figures["checks"]["title"] == "1 of 2 checks failed"
    assert [row[:2] for row in figures["checks"]["marks"][0]["y"]] == ["b:", "a:"]
    assert figures["parts-0"]["marks"][0]["x"] == [0, 0, 2]
    assert "parts-0" not in page_figures(render_html(document(_verdict("passed"))))
