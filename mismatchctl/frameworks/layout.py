"""What a framework's file looks like, said once: `mismatchctl.dumps.foreign` makes rows of the contract from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

Row = dict[str, Any]


class File(Protocol):
    """A file that is opened as data: nothing that it names is ever run."""

    @property
    def path(self) -> Path:
        """Where it lies."""

    @property
    def step(self) -> int | None:
        """The step that its name tells: the last number in it."""

    def at(self, path: Path) -> File:
        """Another file, opened the same way."""

    def lines(self) -> Iterator[dict[str, Any]]:
        """JSON objects, one per line."""

    def torch(self, content: Any = None) -> Any:
        """What torch saved, tensors as arrays; `content`: bytes of a torch file that lie within it."""

    def holds(self, *names: str) -> bool:
        """Whether torch saved a dict that has these keys."""

    def batch(self, names: Collection[str]) -> Iterator[Row]:
        """Rows of the dict of padded columns that torch saved; of other columns than `names` nothing."""

    def pickle(self, known: Mapping[tuple[str, str], Callable[..., Any] | None]) -> Any:
        """What a pickle holds: plain values and arrays.

        Args:
            known: what else it may ask for, by module and name: what stands for calling it; None: for naming it.
        """

    def array(self, data: Any, dtype: Any, shape: Any) -> Any:
        """An array from its bytes.

        Raises:
            ValueError: they are not as many as that takes.
        """


@dataclass(frozen=True)
class FileLayout:
    """One framework's file.

    A layout that declares no `train_log_probs` is of rollout-only files, which need them joined.

    Attributes:
        framework: its name, as `--from` takes it.
        columns: column of the contract -> name in the raw rows; what is not declared is not converted. `step` and
            `sequence_id` are taken under these names, and need no declaration.
        mask: what the mask's ones mean.
        weighted: whether the mask holds weights, of which those above 0 are of valid tokens; else it is 0 or 1.
        patterns: names of its files, with folders above them where these belong to the name.
        rows: what reads one file, as values of the file's own names.
        prompt: whether the token axis begins with the prompt.
        padding: the side that rows are padded on.
        next_token: columns of the contract whose entry j is about token j + 1; the others are unshifted.
        missing: what stands for a log-prob that there is none of; such tokens are masked out, and counted.
        duplicates: whether several files may hold the same sequence of a step (tensor-parallel ranks).
        keys: of the dict that torch saved, those by which it is one of these.
        recognizes: whether a file whose name fits one of `patterns`, and that has `keys`, is one of these.
    """

    framework: str
    columns: Mapping[str, str]
    mask: str
    patterns: tuple[str, ...]
    rows: Callable[[File], Iterator[Row]] = field(repr=False)
    prompt: bool = False
    padding: Literal["left", "right", "none"] = "none"
    next_token: frozenset[str] = frozenset()
    weighted: bool = False
    missing: tuple[float, ...] = ()
    duplicates: bool = False
    keys: tuple[str, ...] = ()
    recognizes: Callable[[File], bool] = field(default=lambda file: True, repr=False)

    @property
    def rollout_only(self) -> bool:
        """Whether its files hold no train log-probs, so that there is nothing to compare until they are joined."""
        return "train_log_probs" not in self.columns


def array(value: Any) -> Any:
    """An array, of half precision as float32; everything else as it is."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value
