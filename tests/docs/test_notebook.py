"""Every cell of docs/guides/notebook.ipynb runs and shows its result."""

import ast
import json
from typing import Any

import pytest

from tests.paths import ROOT

NOTEBOOK = ROOT / "docs/guides/notebook.ipynb"


def shown(source: str, names: dict[str, Any]) -> Any:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(NOTEBOOK.parent)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    names: dict[str, Any] = {}
    made = [shown("".join(cell["source"]), names) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    pages = {type(value).__name__: value._repr_html_() for value in made if hasattr(value, "_repr_html_")}
    assert set(pages) >= {"Result", "Sweep", "Comparison", "Verdict", "DataFrame"}
    assert all(page.startswith("<div") for page in pages.values() if page is not None)
    assert names["w"].shape == (2, 3) and (names["w"][names["mask"] == 0] == 0).all()
