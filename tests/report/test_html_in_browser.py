"""The report in a real browser: it loads without a request or a complaint, in the dark, on a phone, without scripts."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.report.document import EVERYWHERE, Document, Facts, Headline, Note, Section, Table
from mismatchctl.report.html import render_html
from mismatchctl.report.pages.analyze import document
from mismatchctl.results.model import Example, Finding
from tests.factories.results import HOSTILE, make_corrections, make_result
from tests.report.browser import (
    BROKEN,
    NEEDS_AXE,
    OVERLAPS,
    TOO_WIDE,
    background,
    contrast,
    violations,
    visit,
)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    names = [text[:80] for text in HOSTILE]
    results = {
        "plain": make_result(),
        "hostile": make_result(
            runs=[HOSTILE[0], "x" * 300],
            steps=HOSTILE,
            corrections=make_corrections(8, names),
            by=[HOSTILE[1]],
            hostile=True,
        ),
    }
    long = Example(file=f"/{'checkpoints_of_a_run_with_a_long_name/' * 4}step_00015.parquet", row=29)
    results["plain"].runs["run-a"].findings = [
        Finding(cause="stale_policy", confidence="high", title="Older", summary="Older.", evidence=[], examples=[long],
                advice="Bound the lag.")
    ]  # fmt: skip
    addresses = {}
    for name, result in results.items():
        path = folder / f"{name}.html"
        path.write_text(render_html(document(result)), encoding="utf-8")
        addresses[name] = path.as_uri()
    return addresses


@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("scripts", [True, False])
def test_nothing_is_asked_for_and_nothing_complains(
    browser: Any, pages: dict[str, str], name: str, scripts: bool
) -> None:
    assert visit(browser, pages[name], scripts=scripts) == []
    assert browser.find_element("css selector", "h1").is_displayed()
    assert browser.find_element("css selector", "figure svg").is_displayed()
    assert len(browser.find_elements("css selector", ".sort")) == 0 if not scripts else True


@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("width", [390, 1280])
def test_only_tables_scroll_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    visit(browser, pages[name], width=width)
    browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("width", "printed"), [(390, False), (718, True)])
def test_a_number_stands_on_one_line(browser: Any, tmp_path: Path, width: int, printed: bool) -> None:
    text = " ".join(f"{'w' * (size % 20 + 1)} {size}.2345e-05" for size in range(200))
    cells = Table.of("Many", [text.split()[1::2][:12]] * 2, [
        (f"column {place}", lambda row, place=place: row[place]) for place in range(12)
    ])  # fmt: skip
    section = Section("Numbers", "numbers").add(Note(text, "quiet"), Facts([("found", text)], reach=EVERYWHERE), cells)
    page = tmp_path / "numbers.html"
    page.write_text(render_html(Document(Headline("", subtitle="numbers")).add(section)), encoding="utf-8")
    visit(browser, page.as_uri(), width=width, printed=printed)
    assert browser.execute_script(BROKEN) == []
    assert len(browser.find_elements("css selector", ".whole")) == 400 + 24


def test_dark_is_dark_and_print_is_light(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"], dark=True)
    assert max(background(browser, "body")) < 60
    line = "return getComputedStyle(document.querySelector('figure svg path.l-s0')).stroke"
    dark = browser.execute_script(line)
    visit(browser, pages["plain"])
    assert min(background(browser, "body")) > 230
    assert browser.execute_script(line) != dark
    visit(browser, pages["plain"], dark=True, printed=True)
    assert min(background(browser, "body")) > 230


def test_text_stands_out(browser: Any, pages: dict[str, str]) -> None:
    for dark in (False, True):
        visit(browser, pages["plain"], dark=dark)
        for selector, behind in (
            ("h1", "body"),
            (".meaning", ".tiles > div"),
            ("figcaption", "figure"),
            (".tiles a", ".tiles > div"),
        ):
            color = browser.find_element("css selector", selector).value_of_css_property("color")
            front = tuple(int(float(part)) for part in color.strip("rgba()").split(",")[:3])
            assert contrast(front, background(browser, behind)) >= 4.5, (selector, dark)


def test_labels_of_figures_do_not_overlap(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"])
    overlaps = browser.execute_script(OVERLAPS)
    assert overlaps == []


def test_tables_sort(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["hostile"])
    column = """
      const table = [...document.querySelectorAll("table.sortable")][0];
      const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.includes("K3 KL"));
      table.tHead.rows[0].cells[at].querySelector(".sort").click();
      const values = [...table.tBodies[0].rows].map((row) => Number(row.cells[at].dataset.v));
      return [table.tHead.rows[0].cells[at].ariaSort, values];
    """
    direction, values = browser.execute_script(column)
    assert direction == "descending"
    assert values == sorted(values, reverse=True)
    direction, values = browser.execute_script(column)
    assert direction == "ascending"
    assert values == sorted(values)


def test_print_holds_what_is_folded(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"], printed=True, scripts=False)
    folded = browser.find_elements("css selector", "details.fold:not([open]) table")
    assert folded
    assert all(table.size["height"] > 0 for table in folded)


def test_the_file_is_small_enough_to_mail(pages: dict[str, str]) -> None:
    assert all(Path(address.removeprefix("file://")).stat().st_size < 3_000_000 for address in pages.values())


@NEEDS_AXE
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(browser: Any, pages: dict[str, str], dark: bool) -> None:
    visit(browser, pages["plain"], width=390 if dark else 1280, dark=dark)
    assert violations(browser) == []


def test_what_a_number_means_stands_beside_it(browser: Any, pages: dict[str, str]) -> None:
    """On hover and on focus: title, definition, source and command of the glossary; Escape and leaving close it."""
    visit(browser, pages["plain"])
    link, tip = (
        browser.find_element("css selector", selector) for selector in ('.tiles a[href="#m-chi2_token"]', ".tip")
    )
    assert not tip.is_displayed()
    entry = browser.find_element("css selector", "#m-chi2_token").text
    for show in ("arguments[0].focus()", _OVER):
        browser.execute_script(show, link)
        assert tip.is_displayed() and tip.text == entry
        assert (
            "mean of exp(x)^2, x clamped to +-20, over tokens, minus 1" in entry
            and "mismatchctl metrics chi2_token" in entry
        )
        assert link.get_attribute("aria-describedby") == tip.get_attribute("id") and tip.aria_role == "tooltip"
        browser.execute_script(_OVER, tip)
        assert tip.is_displayed()
        browser.execute_script('document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}))')
        assert not tip.is_displayed()


_OVER = 'arguments[0].dispatchEvent(new MouseEvent("mouseover", {bubbles: true}))'


def test_the_keyboard_reaches_everything(browser: Any, pages: dict[str, str]) -> None:
    """What a click opens, sorts or saves has focus; the arrows move the cursor over the steps."""
    from selenium.webdriver.common.keys import Keys

    visit(browser, pages["plain"])
    assert browser.execute_script(_UNREACHED) == []
    figure = browser.find_element("css selector", "figure[data-steps]")
    svg, said = (figure.find_element("css selector", selector) for selector in ("svg", ".subject"))
    before = said.text
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert said.text.startswith("step 1: ")
    assert len(browser.find_elements("css selector", ".cursor")) > 5  # in every figure over the steps
    browser.execute_script("arguments[0].blur()", svg)
    assert said.text == before and not browser.find_elements("css selector", ".cursor")


_UNREACHED = """
return [...document.querySelectorAll("a[href], button, summary, select, .scroll, pre, figure[data-steps] svg")]
  .filter((element) => element.checkVisibility() && (element.focus(), document.activeElement !== element))
  .map((element) => element.outerHTML.slice(0, 120));
"""


TABLES = """
return [...document.querySelectorAll(".table table")].map((table) => [table.rows[0].cells.length, table.scrollWidth]);
"""
"""Columns of each table, and how wide it is."""


def test_printed_pages_are_whole_and_readable(browser: Any, pages: dict[str, str]) -> None:
    """As PDF: the answer, what is folded and the glossary; nothing is wider than the paper."""
    visit(browser, pages["plain"], dark=True, printed=True, width=718)
    shown = browser.find_elements("css selector", ".answers dd, #glossary, .glossary dt")
    assert len(shown) > 40 and all(element.is_displayed() for element in shown)
    assert not any(
        element.is_displayed() for element in browser.find_elements("css selector", "nav, .sort, .tip, .skip")
    )
    content = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert content.startswith(b"%PDF") and 3 < content.count(b"/Type /Page\n") < 60
    papers = {tuple(map(float, box.split())) for box in re.findall(rb"/MediaBox \[([^\]]*)\]", content)}
    assert papers == {(0, 0, 612, 792), (0, 0, 792, 612)}, "tables of many columns lie across"
    wide = {}
    for width in (718, 980):  # what margins leave of the paper, upright and across
        visit(browser, pages["plain"], printed=True, width=width)
        wide[width] = browser.execute_script(TABLES)
    assert [table for table in wide[718] if table[1] > 718 and table[0] < 12] == []
    assert [table for table in wide[980] if table[1] > 980] == [] != [table for table in wide[718] if table[0] > 11]
