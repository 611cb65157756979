"""Compiled templates are kept as Python keeps modules; what is kept changes no page, whatever becomes of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mismatchctl.report import html
from mismatchctl.report.pages.analyze import document
from tests.factories.results import make_result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Templates of one's own, of which nothing is kept yet."""
    copy = tmp_path / "templates"
    shutil.copytree(html.find_templates(), copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(html, "find_templates", lambda: copy)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield copy
    html._jinja_environment.cache_clear()


def page() -> str:
    """A page as a new process makes it."""
    html._jinja_environment.cache_clear()
    return html.render_html(document(make_result()))


def test_what_is_kept_gives_the_same_page(folder: Path) -> None:
    first = page()
    kept = {place: place.stat().st_mtime_ns for place in (folder / "__pycache__").iterdir()}
    assert {place.name.partition(".")[0] for place in kept} == {"base", "document", "macros"}
    assert page() == first
    assert {place: place.stat().st_mtime_ns for place in (folder / "__pycache__").iterdir()} == kept


@pytest.mark.slow
def test_what_is_broken_is_made_again(folder: Path) -> None:
    first = page()
    for broken in (b"", b"no checksum", b"\n\0", None):
        for place in (folder / "__pycache__").iterdir():
            held = place.read_bytes()
            place.write_bytes(held[: len(held) // 2] if broken is None else broken)
        assert page() == first


def test_a_template_that_changed_is_compiled_again(folder: Path) -> None:
    assert "<footer hidden>" not in page()
    base = folder / "base.html.j2"
    base.write_text(base.read_text().replace("</body>", "<footer hidden></footer></body>"))
    assert "<footer hidden>" in page()


def test_nothing_is_kept_where_python_keeps_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    page()
    assert not (folder / "__pycache__").exists()


def test_a_folder_that_cannot_be_written_is_no_hindrance(folder: Path) -> None:
    (folder / "__pycache__").write_text("a file where the folder would be")
    assert "<figure" in page()
