"""The report in a real browser: it loads without a request or a complaint, in the dark, on a phone, without scripts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_result import HOSTILE, make_corrections, make_result

from mismatchctl.render.report import render_report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None and not os.environ.get("CI"), reason="no Chromium here")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
)
TOO_WIDE = """
const wide = [];
for (const element of document.body.querySelectorAll("*")) {
  if (element.closest("svg") && element.tagName !== "svg") continue;
  if (element.closest(".scroll, pre, .skip") && !element.matches(".scroll, pre")) continue;
  const box = element.getBoundingClientRect();
  if (box.width && box.right > document.documentElement.clientWidth + 0.5) wide.push(element.outerHTML.slice(0, 120));
}
return wide;
"""


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
        path.write_text(render_report(result), encoding="utf-8")
        addresses[name] = path.as_uri()
    return addresses


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = shutil.which("chromedriver")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=found))
    yield driver
    driver.quit()


def visit(
    browser: Any, address: str, *, width: int = 1280, dark: bool = False, scripts: bool = True, printed: bool = False
) -> list[str]:
    """Load the page; gives every address that was asked for beside its own, and every complaint."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print" if printed else "", "features": scheme})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not scripts})
    browser.get(address)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    asked = [r["request"]["url"] for r in requests if r["documentURL"] == address]
    complaints = [str(entry["message"]) for entry in browser.get_log("browser")]
    return [url for url in asked if url != address] + complaints


def background(browser: Any, selector: str) -> tuple[int, ...]:
    element = browser.find_element("css selector", selector)
    return tuple(
        int(float(part)) for part in element.value_of_css_property("background-color").strip("rgba()").split(",")[:3]
    )


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
    line = "return getComputedStyle(document.querySelector('figure svg path[style*=\"--s0\"]')).stroke"
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
    overlaps = browser.execute_script("""
      const found = [];
      for (const svg of document.querySelectorAll("figure svg")) {
        const boxes = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
        const frame = svg.getBoundingClientRect();
        boxes.forEach(([text, a], i) => {
          if (a.left < frame.left - 1 || a.right > frame.right + 1) found.push([svg.ariaLabel, text, "cut"]);
          boxes.slice(i + 1).forEach(([other, b]) => {
            const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            if (across > 1 && down > 3) found.push([svg.ariaLabel, text, other]);
          });
        });
      }
      return found;
    """)
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


def contrast(front: tuple[int, ...], behind: tuple[int, ...]) -> float:
    """The contrast ratio of the WCAG."""

    def luminance(color: tuple[int, ...]) -> float:
        parts = [c / 255 for c in color]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(front), luminance(behind)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
