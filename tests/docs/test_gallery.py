"""The figures of docs/guides/reports.md equal the figures that docs/gallery.py draws from sample_data."""

import re
import runpy
from typing import Any

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "gallery.py"))


@pytest.fixture(scope="module")
def made(script: dict[str, Any]) -> dict[str, str]:
    pictures = {f"gallery/{name}": content.decode() for name, content in script["pictures"]()}
    return pictures | {"reports.md": script["page"]()}


def test_the_gallery_page_is_up_to_date(made: dict[str, str]) -> None:
    assert (DOCS / "guides/reports.md").read_text(encoding="utf-8") == made["reports.md"], "run `make gallery`"


def test_gallery_pictures_are_up_to_date(made: dict[str, str]) -> None:
    """The folder contains exactly the pictures of the page. Their bytes depend on the matplotlib version."""
    shown = re.findall(r"\]\((gallery/[^)]+)\)", made["reports.md"])
    held = {f"gallery/{place.name}": place.read_text("utf-8") for place in (DOCS / "guides/gallery").iterdir()}
    assert sorted(shown) == sorted(held) == sorted(set(made) - {"reports.md"})
    for name, content in held.items():
        titles = [re.findall("<dc:title>(.*?)</dc:title>|<title>(.*?)</title>", text) for text in (content, made[name])]
        assert titles[0] == titles[1], name
    assert sum(map(len, held.values())) < 1_000_000
    assert "nats/token" in held["gallery/terminal.svg"]


def test_pictures_need_no_network(made: dict[str, str]) -> None:
    for name, content in made.items():
        if name.endswith(".svg"):
            assert not re.search(r"url\((?!#)|href=(?!.#|.data:)|@import|<script", content), name


@pytest.mark.parametrize("verb", ["swept", "compared"])
def test_figures_of_every_command_have_alternative_text_and_data(script: dict[str, Any], verb: str) -> None:
    figures = script[verb]()
    assert len(figures) > 6
    for name, figure in figures.items():
        assert figure.title and len(figure.alt) > 20, name
        heads, rows = figure.table()
        assert rows and {len(row) for row in rows} == {len(heads)}, name
        assert len(figure.csv().splitlines()) == len(rows) + 1, name
