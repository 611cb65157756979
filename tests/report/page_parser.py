"""Parse an HTML page for tests."""

import json
import re
from html.parser import HTMLParser
from typing import Any

_VOID = {"meta", "br", "wbr", "img", "link", "hr", "input"}


def without_libraries(page: str) -> str:
    return re.sub(r"<script>\n// (https://d3js.org|@observablehq/plot) .*?</script>", "", page, flags=re.DOTALL)


def page_figures(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    data = json.loads(found[1]) if found else {"columns": [], "figures": []}
    for figure in data["figures"]:
        for mark in figure["marks"]:
            mark |= {
                key: data["columns"][mark[key]] for key in ("x", "y", "low", "high", "labels", "values") if key in mark
            }
    return {figure["name"]: figure for figure in data["figures"]}


class Parsed(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"{tag} closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]
