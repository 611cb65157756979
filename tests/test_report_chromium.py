"""The report in a real browser: it loads without a request or a complaint, in the dark, on a phone, without scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chromium import NEEDS_AXE, NEEDS_BROWSER, OVERLAPS, TOO_WIDE, background, contrast, violations, visit
from make_result import HOSTILE, make_corrections, make_result

from mismatchctl.render.pages.analyze import document
from mismatchctl.render.to.html import html

pytestmark = NEEDS_BROWSER


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
    addresses = {}
    for name, result in results.items():
        path = folder / f"{name}.html"
        path.write_text(html(document(result)), encoding="utf-8")
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
@pytest.mark.parametrize("width", [400, 1280])
def test_only_tables_scroll_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    visit(browser, pages[name], width=width)
    browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert browser.execute_script(TOO_WIDE) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


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
def test_axe_finds_nothing_serious(browser: Any, pages: dict[str, str]) -> None:
    visit(browser, pages["plain"], width=390)
    assert violations(browser) == []
