"""Run the Python blocks of docs/integrations with a stub of the framework."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.paths import ROOT
from tests.recorder.integrations.canonical import Sampled, Step

PAGES = ROOT / "docs" / "integrations"


@dataclass(frozen=True)
class Snippet:
    """Python code of a page. Lines up to the creation of the recorder run once, other lines in every step."""

    code: str

    @classmethod
    def of(cls, page: str, number: int = 0) -> Snippet:
        return cls(blocks(page)[number])

    @property
    def lines(self) -> list[str]:
        return [line for line in self.code.splitlines() if line.strip()]

    def setup(self, names: dict[str, Any]) -> None:
        self._run(names, slice(0, self._created))

    def hook(self, names: dict[str, Any]) -> None:
        self._run(names, slice(self._created, None))

    def changed(self, old: str, new: str) -> Snippet:
        assert old in self.code, f"{old!r} is not in the snippet"
        return replace(self, code=self.code.replace(old, new))

    @property
    def _created(self) -> int:
        creates = ["Recorder(" in ast.unparse(statement) for statement in ast.parse(self.code).body]
        assert creates.count(True) == 1
        return creates.index(True) + 1

    def _run(self, names: dict[str, Any], part: slice) -> None:
        tree = ast.parse(self.code)
        exec(compile(ast.Module(tree.body[part], tree.type_ignores), "snippet", "exec"), names)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A snippet, the framework's stub that runs it, and the expected dump.

    train: runs the snippet in the loop of the stub, which records into `dumps/`.
    columns: columns that the snippet records besides the log-probs.
    mistakes: wrong snippets, as (name, old, new), which the test must detect.
    late: like `train`, with the snippet at a place where the tensors have already changed.
    """

    name: str
    page: str
    train: Callable[[Snippet, Sequence[Step]], None] = field(repr=False)
    columns: tuple[str, ...] = ()
    mistakes: tuple[tuple[str, str, str], ...] = ()
    number: int = 0
    keep: Callable[[Sampled], bool] = field(default=lambda _: True, repr=False)
    late: Callable[[Snippet, Sequence[Step]], None] | None = field(default=None, repr=False)

    @property
    def snippet(self) -> Snippet:
        return Snippet.of(self.page, self.number)
