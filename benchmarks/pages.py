"""Measure the size of report pages and the time that a browser takes to open them.

    python benchmarks/pages.py --write benchmarks/results.md

Renders synthetic Results with many steps and corrections, and opens each page several times in headless Chromium.
Writes the section "Report pages".
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from measure import publish  # noqa: E402

from mismatchctl.report.html import render_html  # noqa: E402
from mismatchctl.report.pages.analyze import document  # noqa: E402
from tests.factories.results import make_corrections, make_result  # noqa: E402
from tests.report import browser as chromium  # noqa: E402

CASES = ((1, 16, 5), (1, 1000, 10), (30, 200, 3))
"""Numbers of runs, steps and corrections."""
OPENED = 5
TIMES = """
const [page] = performance.getEntriesByType("navigation"), [paint] = performance.getEntriesByType("paint");
return [paint.startTime / 1000, page.loadEventEnd / 1000];
"""
OPEN = """
const done = arguments[0], start = performance.now();
document.querySelectorAll("details:not(.numbers)").forEach((part) => (part.open = true));
const wait = () => [...document.querySelectorAll("figure[data-figure]")].every((one) => one.querySelector("svg"))
  ? done((performance.now() - start) / 1000) : requestAnimationFrame(wait);
wait();
"""
"""Open every section, and measure the time until all figures are drawn."""
TEXT = """## Report pages

`benchmarks/pages.py` on {cpus} cores (load {load:.1f}): the page is written in one process, then opened {opened}
times in headless Chromium. Medians, with the most in brackets. Times are in seconds. "All sections" is the time to
open every section and draw its figures. The goals for 30 runs of 200 steps are 2 MB, 0.5 s and 3 s.

| runs | steps | corrections | MB | written (CPU) | first picture | loaded | all sections |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure_page(*case, Path(folder)) for case in CASES]
    text = TEXT.format(cpus=os.cpu_count(), load=os.getloadavg()[0], opened=OPENED) + "\n".join(rows) + "\n"
    publish(text, given.write)


def measure_page(runs: int, steps: int, corrections: int, folder: Path) -> str:
    """Render and open one page, and return its row of the table."""
    names = [f"run-{index}" for index in range(runs)]
    result = make_result(runs=names, steps=tuple(range(steps)), corrections=make_corrections(corrections))
    started = time.process_time()
    page = render_html(document(result)).encode()
    spent = time.process_time() - started
    path = folder / f"{runs}-{steps}.html"
    path.write_bytes(page)
    for browser in chromium.start(folder / f"browser-{runs}-{steps}"):
        times = []
        for _ in range(OPENED):
            chromium.visit(browser, path.as_uri())
            chromium.wait(browser, "return performance.getEntriesByType('paint').length")
            times.append([*browser.execute_script(TIMES), browser.execute_async_script(OPEN)])
    cells = [f"{statistics.median(each):.2f} [{max(each):.2f}]" for each in zip(*times, strict=True)]
    return f"| {runs} | {steps:,} | {corrections} | {len(page) / 1e6:.2f} | {spent:.1f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
