"""Start a real browser, load pages in it, and check how they look."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

AXE = Path(os.environ.get("AXE", ROOT / "tests" / "node_modules" / "axe-core" / "axe.min.js"))
NEEDS_AXE = pytest.mark.skipif(
    not AXE.is_file() and not os.environ.get("CI"),
    reason="no axe-core here: npm install --no-save --prefix tests axe-core",
)
"""`.ci/run` installs axe-core. On a machine without an npm registry, tests that need it are skipped."""
VIOLATIONS = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations
  .map(({id, nodes}) => [id, nodes.length, nodes[0].html.slice(0, 200), nodes[0].failureSummary])));
"""
"""Findings of axe-core: rule, number, first element and summary."""

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
BROKEN = """
const found = [], range = document.createRange();
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  for (const hit of texts.currentNode.data.matchAll(/(^|[\\d.)])e-\\d+/g)) {
    range.setStart(texts.currentNode, hit.index);
    range.setEnd(texts.currentNode, hit.index + hit[0].length);
    const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.bottom)));
    if (lines.size > 1) found.push(texts.currentNode.data.slice(0, 120));
  }
}
return found;
"""
"""Numbers that a line break splits."""
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll("figure svg")) {
  if (!svg.getBoundingClientRect().width) continue;
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
"""
"""Labels of figures that overlap or are cut."""


def find_browser() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def reason_to_skip() -> str:
    """Return the missing program, or an empty string. In CI, tests fail instead of being skipped."""
    needed = {"Chromium": find_browser(), "chromedriver": shutil.which("chromedriver")}
    missing = " and ".join(name for name, path in needed.items() if path is None)
    return f"no {missing} here" if missing and not os.environ.get("CI") else ""


def start(folder: Path) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = find_browser() or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    )
    driver.execute_cdp_cmd(
        "Emulation.setFocusEmulationEnabled", {"enabled": True}
    )  # another way, because there is no window
    yield driver
    driver.quit()


def visit(
    browser: Any, address: str, *, width: int = 1280, dark: bool = False, scripts: bool = True, printed: bool = False
) -> list[str]:
    """Load the page. Return the addresses that it requested and the messages in its console."""
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


def open_all(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('details:not(.numbers)').forEach((part) => (part.open = true))")
    wait(browser, ALL_DRAWN)


def wait(browser: Any, script: str, *given: Any) -> Any:
    """Wait until a script returns a true value, and return the value."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 60, 0.05).until(lambda page: page.execute_script(script, *given))


def paste(browser: Any, button: Any) -> str:
    from selenium.webdriver.common.keys import Keys

    button.click()
    wait(browser, "return arguments[0].textContent === 'copied'", button)
    browser.execute_script("document.body.append(Object.assign(document.createElement('textarea'), {id: 'probe'}))")
    probe = browser.find_element("id", "probe")
    probe.send_keys(Keys.CONTROL, "v")
    return str(probe.get_property("value"))


ALL_DRAWN = "return [...document.querySelectorAll('figure[data-figure]')].every((f) => f.querySelector('svg'))"
"""Whether each figure is drawn."""


def violations(browser: Any) -> list[Any]:
    browser.set_script_timeout(240)
    open_all(browser)
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found: list[Any] = browser.execute_async_script(VIOLATIONS)
    return found


def background(browser: Any, selector: str) -> tuple[int, ...]:
    element = browser.find_element("css selector", selector)
    return tuple(
        int(float(part)) for part in element.value_of_css_property("background-color").strip("rgba()").split(",")[:3]
    )


def contrast(front: tuple[int, ...], behind: tuple[int, ...]) -> float:
    def luminance(color: tuple[int, ...]) -> float:
        parts = [c / 255 for c in color]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(front), luminance(behind)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
