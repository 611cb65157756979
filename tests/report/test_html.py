import itertools
import re

import pytest

from mismatchctl.core.formatting import format_estimate, format_number
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS, correction_metrics
from mismatchctl.report.document import Document, Figures, Section, Table
from mismatchctl.report.html import render_html
from mismatchctl.report.pages.analyze import document
from mismatchctl.results.model import Result, Series, Value
from tests.factories.results import HOSTILE, UNDEFINED, make_corrections, make_result
from tests.report.page_parser import Parsed, page_figures, without_libraries


def _page(result: Result) -> str:
    return render_html(document(result))


@pytest.fixture(scope="module")
def page() -> str:
    return _page(make_result())


@pytest.fixture(scope="module")
def parsed(page: str) -> Parsed:
    return Parsed(page)


@pytest.fixture(scope="module")
def hostile() -> str:
    names = [text[:80] for text in HOSTILE]
    result = make_result(
        runs=HOSTILE[1:3], steps=HOSTILE, corrections=make_corrections(8, names), by=[HOSTILE[1]], hostile=True
    )
    return _page(result)


@pytest.mark.slow
def test_equal_results_give_equal_bytes(page: str) -> None:
    assert _page(make_result()) == page
    assert _page(Result.model_validate_json(make_result().to_json())) == page


def test_the_page_loads_no_resources(page: str, parsed: Parsed) -> None:
    policies = [m["content"] for m in parsed.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policies[0].split("style-src")[0]
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", without_libraries(page))


def test_the_structure_is_accessible(parsed: Parsed) -> None:
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert len(parsed.all("figure")) > 15
    assert all(image["aria-hidden"] == "true" for image in parsed.all("svg"))
    assert all(head.get("scope") in ("col", "row") for head in parsed.all("th"))
    assert parsed.all("html")[0]["lang"] == "en"
    assert len(parsed.all("main")) == 1


@pytest.mark.slow
def test_ids_are_unique_and_links_have_targets(hostile: str, page: str) -> None:
    for text in (page, hostile):
        elements = Parsed(text).elements
        ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        targets = {a[name][1:] for _, a in elements for name in ("href", "xlink:href") if name in a}
        targets |= set(re.findall(r"url\(#([^)]*)\)", without_libraries(text)))
        assert targets <= set(ids), sorted(targets - set(ids))[:5]


def test_every_section_is_present(page: str, parsed: Parsed) -> None:
    for words in (
        "Trend", "Location of the mismatch", "Policy drift", "fresh batch rejects", "Corrections in detail",
        "Kept and rejected sequences", "By worker", "The 20 sequences with the largest",
        "The 20 tokens with the largest", "Data", "Glossary", "rollout_log_probs: list<float>", "miles-moe-2",
        "NaN log-prob",
    ):  # fmt: skip
        assert words in parsed.text, words
    assert {
        "k3", "corrections", "distribution", "joint", "k3_by_position", "k3_by_surprisal",
        "k3_by_length", "drift-k3", "over-weight_mean", "over-loss_scale", "kept-reward",
    } <= set(page_figures(page))  # fmt: skip


def test_only_the_answer_and_the_corrections_are_open(parsed: Parsed) -> None:
    sections = [a for tag, a in parsed.elements if tag == "details" and a.get("class") in ("section", "fold")]
    assert [a["id"] for a in sections if "open" in a] == ["corrections"]
    assert len(sections) > 12


@pytest.mark.slow
def test_every_metric_shown_is_explained(parsed: Parsed) -> None:
    anchors = {a["id"] for _, a in parsed.elements if "id" in a}
    for metric in (*MISMATCH_METRICS, *other_metrics()):
        assert f"m-{metric.key}" in anchors
        assert _plain(metric.definition) in parsed.text, metric.key
        assert _plain(metric.meaning) in parsed.text, metric.key
    shown = {a["href"][3:] for a in parsed.all("a") if a.get("href", "").startswith("#c-")}
    assert {"weight_mean", "rejected_tokens", "ess_token", "loss_scale", "kept_reward", "gate0_tokens_low"} <= shown
    registry = {m.key: m for c in make_result().corrections for m in correction_metrics(c)}
    for key in shown:
        assert _plain(registry[key].definition) in parsed.text
        assert _plain(registry[key].meaning) in parsed.text


def test_numbers_link_to_their_definition_and_command(parsed: Parsed) -> None:
    k3 = next(metric for metric in MISMATCH_METRICS if metric.key == "k3")
    assert {"#m-k3", "#m-abs_diff_mean", "#c-rejected_tokens"} <= {link.get("href") for link in parsed.all("a")}
    assert k3.definition in parsed.text and "mismatchctl metrics k3" in parsed.text


def test_undefined_values_show_their_reason(parsed: Parsed) -> None:
    for reason in (*UNDEFINED.values(), "weights are not normalized"):
        assert reason in parsed.text
    assert "nan" not in parsed.text.lower().replace("nan log-prob", "").split()
    assert "None" not in parsed.text.split()


def test_the_trend_is_described(parsed: Parsed) -> None:
    assert re.search(r"rose by a factor of [\d.]+ \(95% interval [\d.]+ to [\d.]+\) (from|at) step \d+", parsed.text)


def test_hostile_strings_stay_text(hostile: str) -> None:
    found = Parsed(hostile)
    assert len(found.all("script")) == 4  # figures, d3, Plot, and the script of the page
    assert len(found.all("style")) == 1
    assert not found.all("img")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069]", without_libraries(hostile))
    assert "<script>alert(1)</script>" in found.text.replace(" ", "")
    assert "␛[31mred" in found.text
    assert "abc⟨U+202E⟩gnp.exe" in found.text.replace(" ", "")
    assert "{{ 7*7 }}" in found.text
    assert all(not any(name.startswith("on") for name in a) for _, a in found.elements)


def test_a_hundred_steps_and_ten_corrections_fit(page: str) -> None:
    large = _page(make_result(steps=tuple(range(100)), corrections=make_corrections(10)))
    assert len(large.encode()) < 2_000_000
    assert len(page.encode()) < 1_000_000


@pytest.mark.slow
def test_thirty_two_runs_fit() -> None:
    names = [f"run-{index}" for index in range(32)]
    text = _page(make_result(runs=names, steps=tuple(range(4))))
    found = Parsed(text)
    assert len(text.encode()) < 2_000_000
    cards = [a for _, a in found.elements if a.get("class", "").startswith("run-card ")]
    assert len(cards) == 32
    links = [a["href"] for a in found.all("a") if a.get("href", "").startswith("#trend-")]
    assert {f"#trend-{index}" for index in range(32)} <= set(links)


def test_a_single_step_shows_numbers_without_a_trend() -> None:
    result = make_result(steps=(None,), corrections=[], by=(), drift=False)
    titles = {section.title for section in document(result).parts(Section)}
    assert "Location of the mismatch" in titles
    assert not titles & {"Policy drift", "Corrections", "Corrections in detail"}
    page = _page(result)
    assert "a single step does not show a trend" in Parsed(page).text
    assert {"k3_by_position", "distribution"} <= set(page_figures(page))
    assert not {"k3", "corrections", "kept-reward"} & set(page_figures(page))


def test_runs_without_any_difference_are_called_identical() -> None:
    result = make_result(corrections=[], by=(), drift=False)
    run = result.runs["run-a"]
    for key in ("k3", "abs_diff_mean", "abs_diff_p99", "abs_diff_max"):
        run.overall.metrics[key] = Value(value=0.0, se=0.0)
        run.groups.metrics[key] = Series(value=[0.0] * 16, se=[0.0] * 16)
    run.distribution.edges, run.distribution.tokens, run.distribution.k3 = [-1e-12, 1e-12], [100], [0.0]
    for breakdown in run.breakdowns.values():
        breakdown.k3 = [0.0] * len(breakdown.k3)
    page = _page(result)
    assert "both sides agree to the bit" in Parsed(page).text
    assert "every log ratio is 0" in Parsed(page).text
    assert not {"k3", "k3_by_position", "distribution"} & set(page_figures(page))


def test_the_severity_class_is_the_one_of_advise() -> None:
    """0.99 and 0.9 are the bounds of the effective sample size with token weights up to 2."""
    for ess, expected in ((0.995, "0.5% of the ESS (negligible)"), (0.95, "ESS (moderate)"), (0.5, "ESS (severe)")):
        result = make_result(corrections=[find_preset("token_tis")])
        result.runs["run-a"].overall.corrections["token_tis"]["ess_token"] = Value(value=ess)
        section = next(part for part in document(result).parts(Section) if part.anchor == "corrections")
        assert expected in section.lead
    other = document(make_result(corrections=[find_preset("geo_rs")]))
    assert not next(part for part in other.parts(Section) if part.anchor == "corrections").lead


def test_the_document_can_be_queried() -> None:
    result = make_result()
    made = document(result)
    answer = made.sections[0].parts[0]
    assert [line.question for line in answer.lines] == ["how bad", "since when", "why", "what to do"]
    k3 = result.runs["run-a"].overall.metrics["k3"]
    shown = next(table for table in made.parts(Table) if table.heads[1].text == "value")
    largest = result.runs["run-a"].overall.metrics["abs_diff_max"]
    assert {row[0].text: row[1].text for row in shown.rows}["largest |log-prob difference|"] == format_number(
        largest.value, "nats"
    )
    assert format_estimate(k3.value, k3.se, "nats/token") in answer.lines[0].text
    corrections = next(table for table in made.parts(Table) if "fresh batch" in table.caption)
    column = [head.anchor for head in corrections.heads].index("c-rejected_tokens")
    for row, values in zip(corrections.rows, result.runs["run-a"].overall.corrections.values(), strict=True):
        assert float(row[column].sort_key) == pytest.approx(values["rejected_tokens"].value, rel=1e-5)
    assert list(made.parts(Figures)) and isinstance(made, Document)


def _plain(text: str) -> str:
    return " ".join(text.split())
