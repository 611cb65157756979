"""docs/errors.toml covers every module that raises an error for users."""

import ast

import pytest

from mismatchctl.io.yaml import read_data
from tests.paths import ROOT

FAMILIES = read_data(ROOT / "docs/errors.toml")["families"]
PAGE = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
RAISED = {"ConfigError", "DataError"}
PACKAGE = ROOT / "mismatchctl"


def family_of(module: str) -> str | None:
    fits = [
        (len(prefix), family["title"])
        for family in FAMILIES
        for prefix in family["modules"]
        if f"{module}/".startswith(f"{prefix}/")
    ]
    return max(fits)[1] if fits else None


def raising_modules() -> set[str]:
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in RAISED
    }


def test_every_raising_module_belongs_to_an_error_family() -> None:
    modules = raising_modules()
    assert len(modules) > 50
    assert {module for module in modules if family_of(module) is None} == set()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["title"])
def test_error_families_have_messages_causes_and_fixes(family: dict[str, list[list[str]]]) -> None:
    section = PAGE.partition(f"## {family['title']}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(family["errors"]) > 1
    for row, (_, cause, fix) in zip(rows, family["errors"], strict=True):
        assert cause and fix and row.endswith(f"| {cause} | {fix} |")
