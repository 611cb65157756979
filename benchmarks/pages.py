"""Measure the size of pages and the time that a browser takes to open them.

    python benchmarks/pages.py --write docs/methods/benchmarks.md

Results made by hand, of many steps and corrections, as pages; each is opened several times in Chromium, alone.
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

CASES = ((16, 5), (100, 10), (1000, 10))
"""Steps and corrections."""
OPENED = 5
TIMES = """
const [page] = performance.getEntriesByType("navigation"), [paint] = performance.getEntriesByType("paint");
return [paint.startTime / 1000, page.loadEventEnd / 1000];
"""
TEXT = """## Report pages

`benchmarks/pages.py` on {cpus} cores (load {load:.1f}): the page of one run, written in one process, then
opened {opened} times in headless Chromium. Medians, with the most in brackets.

| steps | corrections | MB | written, processor seconds | first picture, seconds | all of it, seconds |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(steps, corrections, Path(folder)) for steps, corrections in CASES]
    text = TEXT.format(cpus=os.cpu_count(), load=os.getloadavg()[0], opened=OPENED) + "\n".join(rows) + "\n"
    publish(text, given.write)


def row(steps: int, corrections: int, folder: Path) -> str:
    """A line of the table."""
    result = make_result(steps=tuple(range(steps)), corrections=make_corrections(corrections))
    started = time.process_time()
    page = render_html(document(result)).encode()
    spent = time.process_time() - started
    place = folder / f"{steps}.html"
    place.write_bytes(page)
    for browser in chromium.start(folder / f"browser-{steps}"):
        times = []
        for _ in range(OPENED):
            chromium.visit(browser, place.as_uri())
            times.append(browser.execute_script(TIMES))
    cells = [f"{statistics.median(each):.2f} [{max(each):.2f}]" for each in zip(*times, strict=True)]
    return f"| {steps:,} | {corrections} | {len(page) / 1e6:.2f} | {spent:.1f} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
