"""The fenced Python of a page of docs/integrations, and how it runs beside a stub."""

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
    """Python that stands in a page.

    What comes up to and with the creation of the recorder runs once; the rest stands inside the training
    loop and runs for every step.
    """

    code: str

    @classmethod
    def of(cls, page: str, number: int = 0) -> Snippet:
        """The page's snippet of that number."""
        return cls(blocks(page)[number])

    @property
    def lines(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in self.code.splitlines() if line.strip()]

    def setup(self, names: dict[str, Any]) -> None:
        """Run what stands outside the training loop."""
        self._run(names, slice(0, self._created))

    def hook(self, names: dict[str, Any]) -> None:
        """Run what stands inside the training loop."""
        self._run(names, slice(self._created, None))

    def changed(self, old: str, new: str) -> Snippet:
        """The snippet with a mistake in it."""
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
    """The fenced Python of a page."""
    return re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)


@dataclass(frozen=True)
class Case:
    """A snippet, the framework that runs it, and what has to come of it.

    Attributes:
        name: what a test calls it.
        page: the page of docs/integrations.
        number: which of the page's snippets.
        train: runs the snippet in the framework's loop over the steps; it records into `dumps/`.
        columns: what it records besides the pairs of log-probs.
        mistakes: snippets that must not pass for right, as (name, old, new).
        keep: the sequences that it records.
        late: like `train`, with the snippet at a place where the tensors are no longer what the page says.
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
        """As it stands in the page."""
        return Snippet.of(self.page, self.number)
