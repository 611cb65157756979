"""The report in a browser: first screen, figures, phone, dark mode, print, keyboard, and without scripts."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

import mismatchctl as mm
from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.api.compare.compare import compare
from mismatchctl.api.sweep.study import Study, ThresholdAxis
from mismatchctl.api.sweep.sweep import sweep
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.report.document import EVERYWHERE, Column, Document, Facts, Headline, Note, Section, Table
from mismatchctl.report.html import render_html
from mismatchctl.report.pages import compare as compare_page
from mismatchctl.report.pages import diagnose as diagnose_page
from mismatchctl.report.pages import gate as gate_page
from mismatchctl.report.pages import sweep as sweep_page
from mismatchctl.report.pages.analyze import document
from mismatchctl.results.model import Example, Finding, Result
from tests.factories.results import HOSTILE, make_corrections, make_result
from tests.paths import SAMPLE_DATA
from tests.report.browser import (
    BROKEN,
    NEEDS_AXE,
    OVERLAPS,
    TOO_WIDE,
    background,
    contrast,
    open_all,
    paste,
    violations,
    visit,
    wait,
)

pytestmark = pytest.mark.browser

DENSE, MOE = str(SAMPLE_DATA / "dense"), str(SAMPLE_DATA / "moe")


def _hostile() -> Result:
    names = [text[:80] for text in HOSTILE]
    corrections, runs = make_corrections(8, names), [HOSTILE[0], "x" * 300]
    return make_result(runs=runs, steps=HOSTILE, corrections=corrections, by=[HOSTILE[1]], hostile=True)


def _plain() -> Result:
    result = make_result()
    long = Example(file=f"/{'checkpoints_of_a_run_with_a_long_name/' * 4}step_00015.parquet", row=29)
    result.runs["run-a"].findings = [
        Finding(cause="stale_policy", confidence="high", title="Older", summary="Older.", evidence=[], examples=[long],
                advice="Bound the lag.")
    ]  # fmt: skip
    return result


def _gaps() -> Result:
    result = make_result(steps=tuple(range(30)))
    groups = result.runs["run-a"].groups
    for series in groups.metrics.values():
        series.value[3] = series.value[29] = None
    groups.metrics["ratio_mean"].value = [None] * 30
    return result


RESULTS = {
    "plain": _plain,
    "hostile": _hostile,
    "gaps": _gaps,
    "one step": lambda: make_result(steps=(0,)),
    "no corrections": lambda: make_result(corrections=[]),
    "40 corrections": lambda: make_result(corrections=make_corrections(40)),
    "8 runs": lambda: make_result(runs=[f"run-{index}" for index in range(8)], steps=tuple(range(20))),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, addresses = tmp_path_factory.mktemp("pages"), {}
    for name, make in RESULTS.items():
        (folder / f"{name}.html").write_text(render_html(document(make())), encoding="utf-8")
        addresses[name] = (folder / f"{name}.html").as_uri()
    return addresses


@pytest.fixture(scope="module")
def verbs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("verbs")
    presets = [find_preset(name) for name in ("token_tis", "geo_rs", "miles-moe-2")]
    result = analyze([DENSE, MOE], presets)
    (folder / "moe.json").write_text(analyze([MOE]).to_json(), encoding="utf-8")
    study = Study(presets[1], (ThresholdAxis.parse("gates.0.keep.1", "1.0005:1.02:12:log"),))
    documents = {
        "analyze": document(result),
        "sweep": sweep_page.document(sweep([MOE], [study], wishes=[("rejected_tokens", 0.05)])),
        "compare": compare_page.document(compare([DENSE, MOE])),
        "gate": gate_page.document(mm.gate(MOE, folder / "moe.json", rules=["k3:increase=10%", "k3:max=1e-4"])),
        "diagnose": diagnose_page.document(mm.diagnose(MOE)),
    }
    addresses = {}
    for name, made in documents.items():
        (folder / f"{name}.html").write_text(render_html(made), encoding="utf-8")
        addresses[name] = (folder / f"{name}.html").as_uri()
    return addresses


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_is_drawn_without_requests_or_errors(browser: Any, pages: dict[str, str], name: str) -> None:
    assert visit(browser, pages[name]) == []
    open_all(browser)
    assert browser.get_log("browser") == []
    assert browser.find_element("css selector", "h1").is_displayed()
    assert (
        browser.execute_script("return [...document.querySelectorAll('svg')].some((s) => /NaN/.test(s.outerHTML))")
        is False
    )
    assert browser.execute_script(OVERLAPS) == []


@pytest.mark.parametrize("name", RESULTS)
def test_the_page_shows_answer_and_tables_without_scripts(browser: Any, pages: dict[str, str], name: str) -> None:
    assert visit(browser, pages[name], scripts=False) == []
    answers = browser.find_elements("css selector", "#main > .answers dd, .run-card summary")
    assert answers and all(answer.is_displayed() for answer in answers)
    browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    tables = browser.find_elements("css selector", "table")
    assert len(tables) > 3 and all(table.is_displayed() for table in tables)
    assert not browser.find_elements("css selector", "figure svg, .sort, .pin")


@pytest.mark.parametrize("name", ["plain", "hostile", "8 runs"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_only_tables_scroll_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    visit(browser, pages[name], width=width)
    open_all(browser)
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["plain", "8 runs"])
def test_the_first_screen_shows_every_answer_and_the_k3_onset(browser: Any, pages: dict[str, str], name: str) -> None:
    """The screen is 900 pixels high."""
    visit(browser, pages[name], width=1440)
    for element in browser.find_elements("css selector", ".run-cards > li, #main > .answers > div"):
        assert element.rect["y"] + element.rect["height"] < 600
    figure = browser.find_element("css selector", "figure.wide svg")
    assert figure.rect["y"] + figure.rect["height"] <= 900 and figure.rect["width"] > 1000
    assert browser.execute_script(
        "return page.figures.find((one) => one.name === 'k3').rules.some((r) => r.axis === 'x')"
    )
    onset = 'figure.wide [data-mark="rule"][stroke-dasharray="5 3"], figure.wide [data-mark="dot"] path'
    assert browser.find_elements("css selector", onset)


def test_figures_are_drawn_when_their_section_opens(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"])
    drawn = "return document.querySelectorAll('#trend figure svg').length"
    assert browser.execute_script(drawn) == 0
    browser.find_element("css selector", "#trend > summary").click()
    open_all(browser)
    assert browser.execute_script(drawn) > 5


def test_runs_can_be_filtered_and_pinned(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["8 runs"])
    lines = "return document.querySelectorAll('figure[data-runs] [data-mark=line] path').length"
    assert browser.execute_script(lines) == 8
    browser.find_element("css selector", ".sidebar input").send_keys("run-3")
    assert [card.is_displayed() for card in browser.find_elements("css selector", ".run-cards > li")].count(True) == 1
    assert browser.execute_script(lines) == 1
    browser.find_element("css selector", ".sidebar input").clear()
    browser.find_element("css selector", ".sidebar input").send_keys(" ", "\ue003")
    browser.find_elements("css selector", ".pin")[5].click()
    first = browser.find_element("css selector", ".run-link")
    assert first.find_element("css selector", ".pin").get_attribute("aria-pressed") == "true"
    browser.find_element("css selector", "input[value=pinned]").click()
    assert browser.execute_script(lines) == 1


def test_figures_have_a_table_and_a_csv(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"])
    k3 = RESULTS["plain"]().runs["run-a"].groups.metrics["k3"].value
    browser.execute_script(
        "window.saved = []; URL.createObjectURL = (blob) => { blob.text().then((t) => saved.push(t)); return '#'; };"
    )
    figure = browser.find_element("css selector", "figure.wide")
    figure.find_element("css selector", ".numbers summary").click()
    wait(browser, "return arguments[0].querySelector('.numbers tbody tr')", figure)
    rows = figure.find_elements("css selector", ".numbers tbody tr")
    shown = [float(row.find_elements("css selector", "td")[1].text) for row in rows]
    assert shown == pytest.approx(k3, rel=1e-3)
    figure.find_element("css selector", ".numbers button").click()
    text = wait(browser, "return saved[0]")
    assert text.splitlines()[0] == "step,K3 (nats/token),from,to" and len(text.splitlines()) == len(k3) + 1


@pytest.mark.parametrize(("width", "printed"), [(390, False), (718, True)])
def test_numbers_do_not_wrap(browser: Any, tmp_path: Path, width: int, printed: bool) -> None:
    text = " ".join(f"{'w' * (size % 20 + 1)} {size}.2345e-05" for size in range(200))
    cells = Table.of("Many", [text.split()[1::2][:12]] * 2, [
        Column(f"column {place}", lambda row, place=place: row[place]) for place in range(12)
    ])  # fmt: skip
    section = Section("Numbers", "numbers").add(Note(text, "quiet"), Facts([("found", text)], reach=EVERYWHERE), cells)
    page = tmp_path / "numbers.html"
    page.write_text(render_html(Document(Headline("", subtitle="numbers")).add(section)), encoding="utf-8")
    visit(browser, page.as_uri(), width=width, printed=printed)
    assert browser.execute_script(BROKEN) == []
    assert len(browser.find_elements("css selector", ".whole")) == 400 + 24


def test_dark_mode_is_dark_and_print_is_light(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"], dark=True)
    assert max(background(browser, "body")) < 60
    line = "return getComputedStyle(document.querySelector('figure [data-mark=line] path')).stroke"
    dark = browser.execute_script(line)
    visit(browser, pages["plain"])
    assert min(background(browser, "body")) > 230
    assert browser.execute_script(line) != dark
    visit(browser, pages["plain"], dark=True, printed=True)
    assert min(background(browser, "body")) > 230


def test_text_has_contrast(browser: Any, pages: dict[str, str]) -> None:
    for dark in (False, True):
        visit(browser, pages["plain"], dark=dark)
        for selector, behind in (("h1", "body"), ("figcaption", "figure"), (".section small", ".section > summary")):
            color = browser.find_element("css selector", selector).value_of_css_property("color")
            front = tuple(int(float(part)) for part in color.strip("rgba()").split(",")[:3])
            assert contrast(front, background(browser, behind)) >= 4.5, (selector, dark)


def test_tables_can_be_sorted(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["hostile"])
    open_all(browser)
    column = """
      const table = document.querySelector("#corrections table.sortable");
      const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.includes("K3 left"));
      table.tHead.rows[0].cells[at].querySelector(".sort").click();
      const values = [...table.tBodies[0].rows].map((row) => Number(row.cells[at].dataset.v)).filter(Number.isFinite);
      return [table.tHead.rows[0].cells[at].ariaSort, values];
    """
    for expected, reverse in (("descending", True), ("ascending", False)):
        direction, values = browser.execute_script(column)
        assert direction == expected and values == sorted(values, reverse=reverse) and len(values) > 2


@NEEDS_AXE
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["analyze", "sweep", "compare", "gate", "diagnose"])
def test_axe_reports_no_violations(browser: Any, verbs: dict[str, str], name: str, dark: bool) -> None:
    visit(browser, verbs[name], width=390 if dark else 1280, dark=dark)
    assert violations(browser) == []


@pytest.mark.parametrize("name", ["analyze", "sweep", "compare", "gate", "diagnose"])
def test_each_page_loads_no_resources_and_fits(browser: Any, verbs: dict[str, str], name: str) -> None:
    assert visit(browser, verbs[name], width=390) == []
    open_all(browser)
    assert browser.get_log("browser") == [] and browser.execute_script(TOO_WIDE) == []


def test_the_demo_is_small_and_prints_on_six_pages(browser: Any, verbs: dict[str, str]) -> None:
    assert Path(verbs["analyze"].removeprefix("file://")).stat().st_size <= 1_000_000
    visit(browser, verbs["analyze"], printed=True, dark=True)
    content = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert content.startswith(b"%PDF") and 1 <= content.count(b"/Type /Page\n") <= 6
    hidden = "return [...document.querySelectorAll('.sidebar, .sort, .skip, #glossary, #trend')]"
    assert set(browser.execute_script(f"{hidden}.map((e) => e.checkVisibility())")) == {False}
    shown = browser.find_elements("css selector", ".run-card summary, #corrections table")
    assert shown and all(element.is_displayed() for element in shown)


@pytest.mark.parametrize("width", [1280, 1440])
def test_the_corrections_of_the_demo_fit(browser: Any, verbs: dict[str, str], width: int) -> None:
    visit(browser, verbs["analyze"], width=width)
    open_all(browser)
    table = browser.find_element("css selector", "#corrections .scroll")
    assert table.find_elements("css selector", "thead th")[-2].text.startswith("loss")
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")


@pytest.mark.slow
def test_thirty_runs_of_two_hundred_steps_take_two_megabytes(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "many.html"
    result = make_result(
        runs=[f"run-{index}" for index in range(30)], steps=tuple(range(200)), corrections=make_corrections(3)
    )
    page.write_text(render_html(document(result)), encoding="utf-8")
    assert page.stat().st_size <= 2_000_000
    assert visit(browser, page.as_uri(), width=1440) == []
    open_all(browser)
    assert browser.get_log("browser") == []


def test_tooltips_explain_numbers(browser: Any, pages: dict[str, str]) -> None:
    """Hover and focus show title, definition, source and command. Escape closes the tooltip."""
    visit(browser, pages["plain"])
    open_all(browser)
    link, tip = (
        browser.find_element("css selector", selector) for selector in ('#corrections a[href="#c-ess_token"]', ".tip")
    )
    assert not tip.is_displayed()
    entry = browser.find_element("css selector", "#c-ess_token").text
    for show in ("arguments[0].focus()", _OVER):
        browser.execute_script(show, link)
        assert tip.is_displayed() and tip.text == entry
        assert "mismatchctl metrics ess_token" in entry
        assert link.get_attribute("aria-describedby") == tip.get_attribute("id") and tip.aria_role == "tooltip"
        browser.execute_script(_OVER, tip)
        assert tip.is_displayed()
        browser.execute_script('document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}))')
        assert not tip.is_displayed()


_OVER = 'arguments[0].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}))'


def test_links_open_their_section(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"])
    assert not browser.find_element("css selector", "#glossary").get_attribute("open")
    browser.execute_script("location.hash = '#m-k3'")
    wait(browser, "return document.querySelector('#m-k3').checkVisibility()")


def test_commands_can_be_copied(browser: Any, verbs: dict[str, str]) -> None:
    visit(browser, verbs["analyze"])
    command = browser.find_element("css selector", ".action code.command")
    assert paste(browser, browser.find_element("css selector", ".action .copy-button")) == command.text
    assert command.text.startswith("mismatchctl advise ")


def test_every_control_is_reachable_by_keyboard(browser: Any, pages: dict[str, str]) -> None:
    """Every control can have focus. The arrow keys move the cursor over the steps."""
    from selenium.webdriver.common.keys import Keys

    visit(browser, pages["plain"])
    open_all(browser)
    assert browser.execute_script(_UNREACHED) == []
    figure = browser.find_element("css selector", "figure.wide")
    svg, readout = (figure.find_element("css selector", selector) for selector in ("svg", ".readout"))
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    k3 = RESULTS["plain"]().runs["run-a"].groups.metrics["k3"].value[1]
    assert readout.text.startswith("step 1: K3 ") and readout.text.endswith(" nats/token")
    assert float(readout.text.split()[3]) == pytest.approx(k3, rel=6e-3)
    assert len(browser.find_elements("css selector", ".cursor")) > 5  # in every figure over the steps
    browser.execute_script("arguments[0].blur()", svg)
    assert readout.text == "" and not browser.find_elements("css selector", ".cursor")


_UNREACHED = """
return [...document.querySelectorAll("a[href], button, summary, select, .scroll, pre, figure svg[tabindex]")]
  .filter((element) => element.checkVisibility() && (element.focus(), document.activeElement !== element))
  .map((element) => element.outerHTML.slice(0, 120));
"""


def test_page_data_is_strict_json(pages: dict[str, str]) -> None:
    text = Path(pages["hostile"].removeprefix("file://").replace("%20", " ")).read_text(encoding="utf-8")
    data = text.split('id="figures">')[1].split("</script>")[0]
    assert json.loads(data)["figures"] and "<" not in data
