"""The page of a comparison: its text, its requests, and its display in a browser."""

import re
from pathlib import Path
from typing import Any

import pytest

from mismatchctl.api.compare.compare import compare
from mismatchctl.report.html import render_html
from mismatchctl.report.pages.compare import document
from tests.factories.dump_pairs import make_tokens, write_tokens
from tests.factories.results import HOSTILE, make_corrections
from tests.report.browser import OVERLAPS, TOO_WIDE, open_all, visit
from tests.report.page_parser import Parsed, page_figures, without_libraries

BASE = make_tokens(prompts=24, steps=2, longest=80)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("dumps")
    names = [HOSTILE[index % len(HOSTILE)].replace("\0", "") for index in range(len(BASE.name))]
    dumps = [
        write_tokens(folder / f"{name}.parquet", BASE.scaled(change), host=names)
        for name, change in (
            ("base", lambda _, __, ___: 1.0),
            ("one", lambda index, _, __: 3.0 if BASE.worker[index] == 3 else 1.0),
            ("x" * 120, lambda _, place, __: 1.0 + (place > 30)),
        )
    ]
    plain = compare([str(dump) for dump in dumps[:2]], by=["worker"])
    hostile = compare([str(dump) for dump in dumps], corrections=make_corrections(3, HOSTILE[:3]), by=["host"])
    return {"plain": render_html(document(plain)), "hostile": render_html(document(hostile))}


@pytest.fixture(scope="module")
def pages(texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, text in texts.items():
        path = Path(folder / f"{name}.html")
        path.write_text(text, encoding="utf-8")
        found[name] = path.as_uri()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_the_page_is_complete_and_loads_no_resources(texts: dict[str, str], name: str) -> None:
    found = Parsed(texts[name])
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for a in found.all("a")} | set(
        re.findall(r"url\(#([^)]*)\)", without_libraries(texts[name]))
    )
    assert targets <= set(ids)
    assert (len(found.all("script")), len(found.all("style"))) == (4, 1)
    for tag, attributes in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not any(attribute.startswith("on") for attribute in attributes)
        for attribute in ("src", "href", "xlink:href"):
            assert attributes.get(attribute, "#").startswith("#")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069]", without_libraries(texts[name]))


@pytest.mark.slow
def test_the_page_names_the_changes(texts: dict[str, str]) -> None:
    text = Parsed(texts["plain"]).text
    for words in (
        "worse: K3 rose ", "worker 3 causes 100% of the change", "Contributions to the change", "All metrics", "(Holm)",
    ):  # fmt: skip
        assert words in text, words
    assert {"change_by_worker", "distribution", "k3_by_position"} <= set(page_figures(texts["plain"]))


@pytest.mark.browser
@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("scripts", [True, False])
def test_the_page_makes_no_requests_and_logs_no_errors(
    browser: Any, pages: dict[str, str], name: str, scripts: bool
) -> None:
    assert visit(browser, pages[name], scripts=scripts) == []
    open_all(browser) if scripts else None
    assert bool(browser.find_elements("css selector", "figure svg")) == scripts
    assert browser.find_element("css selector", "h1").is_displayed()


@pytest.mark.browser
@pytest.mark.parametrize("name", ["plain", "hostile"])
@pytest.mark.parametrize("width", [400, 1280])
def test_only_tables_scroll_sideways(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    visit(browser, pages[name], width=width)
    browser.execute_script("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert browser.execute_script(TOO_WIDE) == []


@pytest.mark.browser
def test_labels_of_figures_do_not_overlap(browser: Any, pages: dict[str, str]) -> None:
    for name in pages:
        visit(browser, pages[name])
        open_all(browser)
        assert browser.execute_script(OVERLAPS) == []
