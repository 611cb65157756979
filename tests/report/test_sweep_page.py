"""The page of a sweep: numbers, configurations that are read back, and its display in a browser."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from mismatchctl.api.sweep.result import ForecastRequest, Sweep
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.frameworks.registry import load_adapters, load_framework
from mismatchctl.report.document import Figures, Section, Table
from mismatchctl.report.html import render_html
from mismatchctl.report.pages import sweep as sweep_explorer
from mismatchctl.report.pages.sweep import document
from tests.cli import command
from tests.factories.results import HOSTILE
from tests.paths import SAMPLE_DATA
from tests.report.browser import OVERLAPS, TOO_WIDE, background, paste, visit
from tests.report.page_parser import Parsed, page_figures, without_libraries

MOE = str(SAMPLE_DATA / "moe")
DENSE = str(SAMPLE_DATA / "dense")
GEOMETRIC = Correction.model_validate({"name": "geo", "gates": [{"level": "geometric", "keep": [0.99, 1.01]}]})
BOTH = Correction.model_validate(
    {"name": "both", "weight": {"clip": [0.5, 2.0]}, "gates": [{"level": "sequence", "keep": [0.5, 2.0]}]}
)
STUDIES = (
    Study(GEOMETRIC, (ThresholdAxis.parse("gates.0.keep", "1.001:1.1:20:log"),)),
    Study(
        BOTH, (ThresholdAxis.parse("weight.clip.1", "1.1:4:5"), ThresholdAxis.parse("gates.0.keep.1", "1.5:50:6:log"))
    ),
)
LEVELS = Study(
    BOTH, (ThresholdAxis.parse("weight.level", "token,sequence"), ThresholdAxis.parse("weight.clip.1", "1.5,4,2"))
)


def _page(found: Sweep) -> str:
    return render_html(document(found))


def sections_of(found: Sweep, run: int) -> list[Section]:
    return [one for one in document(found).parts(Section) if re.fullmatch(rf"thresholds-{run}-\d+", one.anchor)]


def table_of(section: Section, words: str) -> Table | None:
    tables = (part for part in section.parts if isinstance(part, Table))
    return next((table for table in tables if words in f"{table.title} {table.caption}"), None)


def axes_of(section: Section) -> list[int]:
    curves = next(part for part in section.parts if isinstance(part, Figures) and part.axes)
    return [int(name.rpartition("-")[2]) for name in curves.axes]


@pytest.fixture(scope="module")
def found() -> Sweep:
    return sweep(
        [DENSE, MOE],
        STUDIES,
        wishes=[("rejected_tokens", 0.05), ("ess_token", 0.001)],
        outlook=ForecastRequest(64, (2048,), 5),
    )


@pytest.fixture(scope="module")
def page(found: Sweep) -> str:
    return _page(found)


@pytest.fixture(scope="module")
def hostile() -> str:
    name, about, path = HOSTILE[0], HOSTILE[2], "x</script>" + HOSTILE[3]
    correction = GEOMETRIC.model_copy(update={"name": name, "about": about})
    small = sweep([MOE], [Study(correction, STUDIES[0].axes)], wishes=[("rejected_tokens", 0.05)])
    named = pl.lit(path).alias("run")
    targets = tuple(replace(target, run=path) for target in small.targets)
    return _page(
        replace(
            small,
            overall=small.overall.with_columns(named),
            groups=small.groups.with_columns(named),
            targets=targets,
            warnings=HOSTILE,
        )
    )


def data_of(page: str) -> Any:
    return json.loads(re.findall(r'<script type="application/json" id="points">(.*?)</script>', page, re.S)[0])


def read(text: str) -> float | None:
    if text.startswith("–"):
        return None
    near = re.fullmatch(r"1 ([+−]) (\S+)", text)
    if near:
        return 1 + float(near[2]) * (1 if near[1] == "+" else -1)
    share = text.endswith("%")
    grouped = re.fullmatch(r"\((\S+) ± \S+\)(e\S+)", text)
    value = float((grouped[1] + grouped[2]) if grouped else text.rstrip(" %").split(" ±")[0].replace(",", ""))
    return value / 100 if share else value


@pytest.mark.slow
def test_the_explorer_contains_every_point(found: Sweep, page: str) -> None:
    data = data_of(page)
    assert [one["name"] for one in data["runs"]] == ["dense", "moe"]
    for run, (place, study) in itertools.product(data["runs"], enumerate(STUDIES)):
        shown, rows = run["studies"][place]["values"], found.rows(run["name"], study.name).to_dicts()
        keys = [anchor.removeprefix("c-") for _, anchor in data["studies"][place]["titles"]]
        assert {"rejected_tokens", "rejected_sequences", "ess_token", "k3_kept"} <= set(keys)
        for key, texts in zip(keys, shown, strict=True):
            assert len(texts) == len(rows) == len(study.points)
            for text, row in zip(texts, rows, strict=True):
                value = read(text)
                if row[key] is None:
                    assert value is None
                    assert found.reason(row, key) in text
                else:
                    se = row.get(f"{key}_se") or 0.0
                    assert value == pytest.approx(row[key], rel=6e-3, abs=0.1 * se), (key, text, row[key])


def test_configurations_are_read_back_as_their_point(page: str) -> None:
    for study, shown in zip(STUDIES, data_of(page)["studies"], strict=True):
        configs = shown["configs"]
        assert configs["names"][0] == "mismatchctl"
        assert [name.partition("@")[0] for name in configs["names"][1:4]] == ["verl", "slime", "miles"]
        assert len(configs["names"]) == 1 + sum(
            bool(one.load("").native(study.correction_at(0))[0]) for one in load_adapters()
        )
        for point, correction in enumerate(map(study.correction_at, range(len(study.points)))):
            own, verl, slime, *_ = (
                "\n".join(configs["lines"][line] for line in lines) for lines in configs["points"][point]
            )
            assert parse_correction(yaml.safe_load(own)) == correction
            keep = correction.gates[0].keep
            block = yaml.safe_load(verl)["algorithm"]["rollout_correction"]
            reported = load_framework("verl").correction(block).gates[0]
            low, high = (float(bound) for bound in reported.keep)  # type: ignore[arg-type]
            if reported.statistic == "k1":
                low, high = (2.718281828459045**-bound for bound in (high, low))
            assert (low, high) == pytest.approx(keep, rel=1e-9)
            if correction.weight is None:
                assert "slime has no such rule" in slime
            else:
                said = load_framework("slime").correction(yaml.safe_load(slime))
                assert (said.weight.clip, said.gates[0].keep) == (correction.weight.clip, keep)  # type: ignore[union-attr]


@pytest.mark.slow
def test_tables_contain_every_point_and_the_targets(found: Sweep, page: str) -> None:
    for index, run in enumerate(found.runs):
        for study, section in zip(STUDIES, sections_of(found, index), strict=True):
            every, few = table_of(section, "All points of"), table_of(section, "points on the Pareto front")
            assert every is not None and few is not None
            assert len(every.rows) == len(study.points)
            rows = found.rows(run, study.name).to_dicts()
            column = [head.text for head in every.heads].index("rejected tokens")
            shown = [float(row[column].sort_key) for row in every.rows]
            assert shown == pytest.approx([row["rejected_tokens"] for row in rows], rel=1e-5)
            best = {tuple(cell.text for cell in row[: len(study.axes)]) for row in few.rows}
            front = [study.points[row["point"]] for row in rows if row["pareto"]]
            assert best <= {tuple(f"{value:.6g}" for value in values) for values in front}
    text = Parsed(page).text
    for target in found.targets:
        if target.status == "ok":
            assert f"{target.threshold:.6g}" in text
        else:
            assert target.status in text
    assert "5% of tokens rejected" in text
    for targets, shaded in ((found.targets, True), ([replace(t, interval=None) for t in found.targets], False)):
        rules = [
            rule
            for figure in page_figures(_page(replace(found, targets=targets))).values()
            for rule in figure["rules"]
            if rule.get("text", "").startswith("5% of tokens rejected at")
        ]
        assert rules and all(("interval" in rule) == shaded for rule in rules)


def test_predictions_name_model_and_check(found: Sweep, page: str) -> None:
    text = Parsed(page).text
    for words in ("of 64 sequences", "2,048 tokens per response", "+5 steps", "Model: ", "Test on the dump: "):
        assert words in text, words
    tables = [table for table in document(found).parts(Table) if table.title.startswith("Predicted")]
    shown = {row[-1].text for table in tables for row in table.rows} - {""}
    statuses = [one.status for forecast in found.forecasts for one in forecast.predictions]
    assert shown and all(any(status.startswith(text) for status in statuses) for text in shown)
    without = replace(found, forecasts=())
    assert "Predict" not in Parsed(_page(without)).text


def test_figures_mark_presets_and_the_target() -> None:
    (section,) = sections_of(sweep([MOE], DEFAULT_STUDIES[2:3], wishes=[("rejected_tokens", 0.05)]), 0)
    front, curve, *_ = (figure for part in section.parts if isinstance(part, Figures) for figure in part.figures)
    assert [(mark.name, list(mark.labels)) for mark in front.marks][-1] == ("usual default", ["usual default"])
    *presets, target = curve.rules
    marked = {rule.at: rule.text for rule in presets}
    assert marked[1.001].startswith("geo_rs and ") and marked[1.01] == "skyrl-geometric-mask"
    assert target.text.startswith("5% of tokens rejected at ") and target.at and target.interval
    assert target.interval[0] <= target.at <= target.interval[1]


def test_targets_of_other_rules_are_not_drawn() -> None:
    """5% of the tokens are rejected at 0.27 by another rule, which is below the lower bound of this correction."""
    gate = Gate(level="geometric", keep=(0.9, 1.1))
    study = Study(Correction(gates=(gate,)), (ThresholdAxis("gates.0.keep.1", (1.01, 1.1)),))
    (section,) = sections_of(sweep([MOE], [study], wishes=[("rejected_tokens", 0.05)]), 0)
    figures = [figure for part in section.parts if isinstance(part, Figures) for figure in part.figures]
    assert len(figures) > 1 and not any("5% of tokens" in rule.text for one in figures for rule in one.rules)


def test_figures_show_axes(found: Sweep) -> None:
    one, two = sections_of(found, 0)
    front, curves = (part for part in two.parts if isinstance(part, Figures))
    assert [figure.title for part in one.parts if isinstance(part, Figures) for figure in part.figures][1:] == [
        "Rejected", "Effective sample size", "K3 of the kept tokens",
    ]  # fmt: skip
    assert axes_of(two) == [0, 0, 0, 1, 1, 1]
    best = int(found.overall.filter((pl.col("run") == "dense") & (pl.col("correction") == "both"))["pareto"].sum())
    assert front.figures[0].title == f"Pareto front ({best} of 30 points)"
    assert curves.figures[0].x.limits == (1.1, 4.0)


def test_text_axes_and_unordered_lists_are_drawn() -> None:
    (section,) = sections_of(sweep([MOE], [LEVELS]), 0)
    assert axes_of(section) == [1, 1, 1]
    every = table_of(section, "All points of")
    assert every is not None and len(every.rows) == 6


def test_corrections_that_keep_no_token_show_the_reason() -> None:
    nothing = Correction.model_validate({"name": "nothing", "gates": [{"level": "geometric", "keep": [50, None]}]})
    text = Parsed(_page(sweep([MOE], [Study(nothing, (ThresholdAxis.parse("gates.0.keep.0", "50,60,70"),))]))).text
    assert "No point has values of all metrics, so there is no Pareto front" in text
    assert "no token is kept" in text
    alone = Parsed(_page(sweep([MOE], [Study(GEOMETRIC, (ThresholdAxis.parse("gates.0.keep", "1.01"),))]))).text
    assert "1 of the 1 points on the Pareto front" in alone


@pytest.mark.parametrize("name", ["page", "hostile"])
def test_the_structure_is_accessible(request: pytest.FixtureRequest, name: str) -> None:
    text: str = request.getfixturevalue(name)
    parsed = Parsed(text)
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a[key][1:] for _, a in parsed.elements for key in ("href", "xlink:href") if key in a}
    targets |= {a[1:] for study in data_of(text)["studies"] for _, a in study["titles"] for a in [f"#{a}"] if a != "#"}
    assert targets | set(re.findall(r"url\(#([^)]*)\)", without_libraries(text))) <= set(ids)
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert all(attributes.get(key, "#").startswith("#") for key in ("src", "href", "xlink:href", "action"))
        assert not any(key.startswith("on") for key in attributes), (tag, attributes)
    assert len(parsed.all("script")) == 6  # points, figures, d3, Plot, and two scripts of the page
    assert not re.search(r"@import|url\((?!#)", without_libraries(text))
    assert len(text.encode()) < 1_500_000


def test_hostile_strings_stay_text(hostile: str) -> None:
    found = Parsed(hostile)
    assert not found.all("img")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069]", without_libraries(hostile))
    assert "<script>alert(1)</script>" in found.text.replace(" ", "")
    data = data_of(hostile)
    assert data["studies"][0]["name"] == HOSTILE[0]
    assert data["runs"][0]["name"].startswith("x</script>␛[31m")


def test_equal_sweeps_give_equal_bytes(found: Sweep, page: str) -> None:
    assert _page(found) == page


def test_large_studies_name_omitted_points(found: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_explorer, "MAX_EXPLORER_POINTS", 50)
    assert [study["name"] for study in data_of(_page(found))["studies"]] == ["geo"]


def test_the_html_option_writes_and_does_not_overwrite(tmp_path: Path) -> None:
    place = tmp_path / "sweep.html"
    flags = ["sweep", MOE, "--geo", "1.01,1.02", "--html", str(place)]
    command.run(*flags, code=0)
    assert data_of(place.read_text())["studies"][0]["axes"][0]["texts"] == [
        "geometric mean within 1% (x = 1.01)",
        "geometric mean within 2% (x = 1.02)",
    ]
    command.run(*flags, code=0)  # the command may replace its own page
    place.write_text("mine")
    again = command.run(*flags, code=2)
    assert "--force" in again.stderr
    command.run(*flags, "--force", code=0)


@pytest.fixture(scope="module")
def addresses(page: str, hostile: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sweeps")
    found = {}
    for name, text in (("page", page), ("hostile", hostile)):
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
        found[name] = (folder / f"{name}.html").as_uri()
    return found


def part(browser: Any, name: str) -> Any:
    return browser.find_element("css selector", f'[data-part="{name}"]')


def choose(browser: Any, name: str, index: int) -> None:
    part(browser, name).find_elements("css selector", "option")[index].click()


def tiles(browser: Any) -> Iterator[str]:
    return (value.text for value in part(browser, "values").find_elements("css selector", ".value"))


@pytest.mark.browser
def test_dragging_the_slider_shows_its_point(browser: Any, addresses: dict[str, str], page: str) -> None:
    from selenium.webdriver.common.keys import Keys

    data = data_of(page)
    assert visit(browser, addresses["page"]) == []
    start = data["runs"][0]["studies"][0]["start"]
    assert list(tiles(browser)) == [texts[start] for texts in data["runs"][0]["studies"][0]["values"]]
    choose(browser, "run", 1)
    choose(browser, "study", 1)
    sliders = part(browser, "axes").find_elements("css selector", "input")
    sliders[0].send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    sliders[1].send_keys(Keys.END, Keys.ARROW_LEFT)
    point = 2 * 6 + 4
    values = [f"(x = {value:.6g})" for value in STUDIES[1].points[point]]
    shown = [slider.get_attribute("aria-valuetext") for slider in sliders]
    assert all(text.endswith(value) for text, value in zip(shown, values, strict=True)), shown
    assert shown[0].startswith("token weight clipped to [0.5, 2.55]")
    assert list(tiles(browser)) == [texts[point] for texts in data["runs"][1]["studies"][1]["values"]]
    crosses = browser.find_elements(
        "css selector", "figure[data-axis='1-1-0'] .cross, figure[data-axis='1-1-1'] .cross"
    )
    assert len(crosses) == len(browser.find_elements("css selector", ".cross")) == 6
    figure = browser.find_element("css selector", "figure[data-axis='1-1-0']")
    low, high, left, right = browser.execute_script(
        "const scale = figures.get(arguments[0]).plot.scale('x'); return [...scale.domain, ...scale.range];", figure
    )
    assert (low, high) == (1.1, 4.0)
    share = (float(STUDIES[1].points[point][0] or 0) - low) / (high - low)
    at = float(figure.find_element("css selector", ".cross").get_attribute("x1"))
    assert at == pytest.approx(left + share * (right - left), abs=0.1)


@pytest.mark.browser
def test_the_configuration_of_a_point_can_be_copied(browser: Any, addresses: dict[str, str], page: str) -> None:
    data = data_of(page)
    visit(browser, addresses["page"])
    choose(browser, "framework", 1)
    config = part(browser, "config")
    text = config.get_property("textContent")
    configs = data["studies"][0]["configs"]
    lines = configs["points"][data["runs"][0]["studies"][0]["start"]][1]
    assert text == "\n".join(configs["lines"][line] for line in lines)
    assert text.startswith("# geo as verl@")
    assert browser.execute_script("return arguments[0].scrollHeight <= arguments[0].clientHeight + 1", config)
    assert paste(browser, browser.find_element("css selector", '[data-part="config"] + .copy-button')) == text


@pytest.mark.browser
@pytest.mark.parametrize("name", ["page", "hostile"])
def test_the_page_fits_and_makes_no_requests(browser: Any, addresses: dict[str, str], name: str) -> None:
    for width, scripts, dark in ((400, True, True), (1280, False, False)):
        assert visit(browser, addresses[name], width=width, scripts=scripts, dark=dark) == []
        assert browser.find_element("id", "explorer").is_displayed() == scripts
        assert (max(background(browser, "body")) < 60) == dark
        browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        assert browser.execute_script(TOO_WIDE) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERLAPS) == []
