"""Documents in every output format: several results on one page, Markdown, open sections, and advice."""

import json
import re
from pathlib import Path

import pytest

from mismatchctl.api.advise.advice import RankedCorrection, RunAdvice, advice_headline
from mismatchctl.api.analyze.analyze import analyze as run_analyze
from mismatchctl.api.gate.verdict import Check, Verdict
from mismatchctl.api.sweep.result import sweep_from_json
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.core.formatting import cut_phrase
from mismatchctl.report.document import (
    PAGE_ONLY,
    Answers,
    Card,
    Document,
    Explorer,
    Facts,
    Figures,
    Headline,
    Note,
    Section,
    Table,
)
from mismatchctl.report.html import render_html
from mismatchctl.report.markdown import render_markdown
from mismatchctl.report.pages import advise
from mismatchctl.report.pages.analyze import analyze_screen, document
from mismatchctl.report.pages.saved import read_saved
from mismatchctl.results import summary
from mismatchctl.results.model import Finding, Result, RivalCause, RunResult
from mismatchctl.results.reader import read_result
from tests.cli.command import run
from tests.factories.results import HOSTILE, make_corrections, make_result
from tests.paths import SAMPLE_DATA
from tests.report.page_parser import Parsed

MOE = str(SAMPLE_DATA / "moe")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kept")
    verdict = Verdict(
        outcome="failed", level=0.05, baseline=None,
        checks=[Check(rule="k3:max=1", run="run-a", place="overall", metric="k3", title="K3 KL", unit="nats/token",
                      kind="max", value=2.0, limit=1.0, outcome="failed")],
    )  # fmt: skip
    study = Study(make_corrections(2)[1], (ThresholdAxis.parse("weight.truncate", "1.5,2,4"),))
    texts = {
        "a": (result := run_analyze([MOE], make_corrections(3))).to_json(),
        "b": result.to_json(),
        "verdict": json.dumps({"tool": "mismatchctl"} | verdict.model_dump(mode="json")),
        "sweep": sweep([MOE], [study], wishes=[("ess_token", 0.9)]).to_json(),
        "advice": json.dumps({"tool": "mismatchctl"} | RunAdvice(notes=["too little"]).model_dump(mode="json")),
    }
    found = {}
    for name, text in texts.items():
        found[name] = folder / f"{name}.json"
        found[name].write_text(text, encoding="utf-8")
    return found


@pytest.mark.slow
def test_results_of_analyze_share_one_page(files: dict[str, Path], tmp_path: Path) -> None:
    both = (files["a"], files["b"])
    done = run("report", *both, "--html", tmp_path / "all.html", "-o", tmp_path / "all.json", code=0)
    page = Parsed((tmp_path / "all.html").read_text(encoding="utf-8"))
    for words in ("moe (a)", "moe (b)", "Data"):
        assert words in page.text, words
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in page.all("a")} <= set(ids)
    assert "moe (a)" in done.stdout
    assert [*read_result(tmp_path / "all.json").runs] == ["moe (a)", "moe (b)"]
    (tmp_path / "other").mkdir()
    copy = tmp_path / "other" / "a.json"
    copy.write_bytes(files["a"].read_bytes())
    merged, _ = read_saved([files["a"], copy])
    assert isinstance(merged, Result) and [*merged.runs] == [f"moe ({path})" for path in (files["a"], copy)]


def test_long_texts_are_cut_at_the_end_of_a_phrase() -> None:
    text = "K3 rose 91.2x (68.4 to 122) from step 9 on (onset between 8 and 9), from 1.94e-4 to 0.0177, at every step"
    assert cut_phrase(text, len(text)) == text
    assert cut_phrase(text, 82) == "K3 rose 91.2x (68.4 to 122) from step 9 on (onset between 8 and 9) …"
    assert (
        cut_phrase("Bound the lag (verl a_threshold; TRL steps; AReaL lag)", 45)
        == "Bound the lag (verl a_threshold; TRL steps …)"
    )
    assert cut_phrase("words without any phrase in them", 20) == "words without any …"


def test_results_of_other_commands_have_their_own_page(files: dict[str, Path], tmp_path: Path) -> None:
    for name, words in (("verdict", "gate"), ("sweep", "Explore"), ("advice", "advise")):
        run("report", files[name], "--html", tmp_path / "page.html", "--force", "-q", code=0)
        assert words in (tmp_path / "page.html").read_text(), name
    done = run("report", files["a"], files["verdict"], code=4)
    assert "verdict.json: only results of analyze and sweep can share a page" in done.stderr
    figures = [figure for part in read_saved([files["a"], files["sweep"]])[1].parts(Figures) for figure in part.figures]
    assert any(mark.name == "Pareto front of the sweep" for figure in figures for mark in figure.marks)


def sweep_page(files: dict[str, Path]) -> Document:
    return read_saved([files["sweep"]])[1]


def test_saved_sweeps_are_read_back(files: dict[str, Path]) -> None:
    text = files["sweep"].read_text(encoding="utf-8")
    again = sweep_from_json(json.loads(text))
    assert json.loads(again.to_json()) == json.loads(text)
    made = sweep_page(files)
    assert list(made.parts(Explorer))


def test_a_page_computes_the_summary_of_each_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_analyze([MOE, str(SAMPLE_DATA / "dense")])
    page = result.to_html()
    summarized: list[RunResult] = []
    compute = summary.summarize_run
    monkeypatch.setattr(summary, "summarize_run", lambda run: [summarized.append(run), compute(run)][1])
    for found in result.runs.values():
        found.story = None
    assert result.to_html() == page and len(summarized) == len(result.runs)


def test_unknown_metrics_of_gates_are_shown(files: dict[str, Path], tmp_path: Path) -> None:
    """A Result of a later version may contain metrics that this version lacks."""
    data = json.loads(files["a"].read_text())
    found = next(iter(data["runs"].values()))["overall"]
    for values in (found["metrics"], *found["corrections"].values()):
        values["gate0_odd_side"] = {"value": 1.0, "status": "ok"}
    place = tmp_path / "later.json"
    place.write_text(json.dumps(data))
    assert "gate0_odd_side" in render_html(read_saved([place])[1])


def test_json_contains_the_sentences_of_the_page(files: dict[str, Path]) -> None:
    """Every JSON file starts with format and version and contains the sentences of its page."""
    data = json.loads(files["sweep"].read_text(encoding="utf-8"))
    (said,) = data["says"].values()
    answer = next(part for part in sweep_page(files).parts(Section) if part.anchor == "sweep-answer")
    assert said == [note.text for note in answer.parts] and "rejects least" in said[0].lower()
    verdict = json.loads(run("gate", files["a"], "--rule", "k3:max=1", "--json").stdout)
    for written in (data, verdict):
        assert [*written][:3] == ["format", "tool", "version"] and written["tool"] == "mismatchctl"


def test_saved_sweeps_without_values_are_damaged(files: dict[str, Path], tmp_path: Path) -> None:
    data = json.loads(files["sweep"].read_text(encoding="utf-8"))
    data["studies"][0]["axes"][0]["values"] = []
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert "damaged" in run("report", tmp_path / "x.json", code=4).stderr


def test_files_of_other_tools_are_refused(tmp_path: Path) -> None:
    for text, words in (("{}", "not a mismatchctl result"), ("[1]", "not a mismatchctl result"), ("x", "not JSON"),
                        ('{"checks": 1}', "damaged")):  # fmt: skip
        (tmp_path / "x.json").write_text(text)
        done = run("report", tmp_path / "x.json")
        assert done.exit_code == 4 and words in done.stderr, done.output
    run("report", tmp_path / "none.json", code=4)


def test_markdown_has_a_headline_answers_table_and_findings(files: dict[str, Path], tmp_path: Path) -> None:
    text = run("report", files["a"], "--markdown", "-").stdout
    assert text.startswith("### mismatchctl analyze: moe: mismatch grew 22.2x since step 6")
    assert [line.split("**")[1] for line in text.splitlines() if re.match(r"- \S+ \*\*", line)][:4] == [
        "how bad", "since when", "why", "what to do",
    ]  # fmt: skip
    assert "| correction |" in text and len(text.splitlines()) < 40
    assert "±" in text and text.count("± is half the width of the 95% interval") == 1
    run("report", files["a"], "--markdown", tmp_path / "m.md", "-q", code=0)
    assert (tmp_path / "m.md").read_text(encoding="utf-8") == text


def test_hostile_names_start_no_markup_in_markdown() -> None:
    result = make_result(runs=HOSTILE[:2], corrections=make_corrections(3, HOSTILE), hostile=True)
    text = render_markdown(document(result))
    assert not re.search(r"(?<!\\)<(script|img)", text) and "\x1b" not in text


def test_open_needs_a_page(files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    run("report", files["a"], "--open", code=2)
    run("report", files["a"], "--html", tmp_path / "p.html", "--open", "-q", code=0)
    assert opened == [(tmp_path / "p.html").as_uri()]


def test_headlines_of_advice_say_what_to_do() -> None:
    best = RankedCorrection(
        name="token_tis", label="token weight ≤ 2", correction={}, bias2=0.1, bias2_se=0.01, variance=1.0, mse=1.1,
        gain=0.4, gain_se=0.1, rejected_tokens=0.02, rejected_sequences=0.0, ess=0.9, ties=False, why="",
    )  # fmt: skip
    bug = Finding(cause="misaligned", confidence="high", title="Shifted by one", summary="", evidence=[], advice="x")
    none = best.model_copy(update={"name": "none", "ties": True})
    for advice, words in (
        (RunAdvice(advice=[best]), "use token_tis (token weight ≤ 2): 40% less gradient error, rejects 2%"),
        (
            RunAdvice(advice=[none, best], front={"none": (0, 1, 0), "token_tis": (0, 1, 0)}),
            "use no correction: no candidate is significantly better",
        ),
        (RunAdvice(fix_first=bug), "fix this first, because no correction repairs it: Shifted by one"),
        (RunAdvice(notes=["the dump has no rewards"]), "no ranking: the dump has no rewards"),
    ):
        assert words in advice_headline(advice)
    calm = RunAdvice(advice=[none, best], front={"none": (0, 1, 0), "token_tis": (0, 1, 0)}, growth=22.2)
    page = render_markdown(advise.document({"moe": calm, "dense": calm}))
    assert "use no correction: no candidate is significantly better (all 2 runs)" in page
    assert page.count("K3 grew 22.2x within this dump") == 2 and "attention" not in page


def test_parts_appear_only_in_their_formats() -> None:
    everywhere, page_only = Note("said everywhere"), Note("on the page", reach=PAGE_ONLY)
    made = Document(Headline("title")).add(Section("Notes", "notes").add(everywhere, page_only))
    assert "on the page" in render_html(made) and "on the page" not in render_markdown(made)
    assert "said everywhere" in render_html(made) and "said everywhere" in render_markdown(made)
    alone = Document(Headline("title")).add(Section("Here", "here", terminal=True).add(everywhere))
    assert "said everywhere" not in render_html(alone)


def test_empty_sections_are_omitted() -> None:
    made = Document(Headline("title")).add(Section("Empty", "empty").add(Table("", []), None), None)
    assert made.sections == []


def test_each_metric_has_one_title(files: dict[str, Path]) -> None:
    """A metric in two tables of a page has the same title."""
    titles: dict[str, set[str]] = {}
    for table in document(make_result()).parts(Table):
        for head in table.heads:
            if head.anchor.startswith("m-"):
                titles.setdefault(head.anchor, set()).add(head.text)
    assert titles and all(len(found) == 1 for found in titles.values()), titles


def test_findings_are_cards_with_advice() -> None:
    result = make_result()
    result.runs["run-a"].findings = [
        Finding(cause="misaligned", confidence="high", title="Shifted", summary="By one.", evidence=[], advice="Mend.")
    ]
    (card,) = document(result).parts(Card)
    assert ("do", "Mend.") in card.lines and card.level == "high"
    (answers,) = document(result).parts(Answers)
    assert answers.lines[2].key == "misaligned"


def test_the_trend_names_the_step_of_its_last_value() -> None:
    """The last step has no valid token, so that its K3 is undefined."""
    result = make_result(steps=range(16))
    series = result.runs["run-a"].groups.metrics["k3"]
    series.value[-1] = None
    (facts,) = (part for part in analyze_screen(result, ["dumps"]).parts(Facts) if "trend" in dict(part.rows))
    assert "at step 14, onset at step" in dict(facts.rows)["trend"]


def test_possible_causes_of_growth_continue_the_sentence() -> None:
    result = make_result()
    growing = Finding(cause="growing_mismatch", confidence="high", title="Grows", summary="", evidence=[], advice="x.")
    growing.rivals = [RivalCause(cause="stale_policy", tell="record rollout_version")]
    result.runs["run-a"].findings = [growing]
    (facts,) = (part for part in analyze_screen(result, ["dumps"]).parts(Facts) if "cause" in dict(part.rows))
    assert dict(facts.rows)["cause"] == "unknown; possibly stale rollout weights: record rollout_version"
