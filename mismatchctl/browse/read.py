"""Some sequences of a dump, whole: masked tokens too, and every column that says something of a token."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mismatchctl.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.dumps import Dump, DumpFile, Problems, Rows, Unit, open_dump
from mismatchctl.errors import DataError
from mismatchctl.frameworks import column_aliases

_WANTED = (
    "current_log_probs", "advantages", "reward", "step", "run", "prompt_id", "sequence_id", "rollout_version",
    "train_version", "worker",
)  # fmt: skip
_WATCHED = ("token_ids", "rollout_experts", "train_experts", "entropy")
OnBad = Literal["error", "skip"]
MOST_TOKENS = 4_096
"""Of one sequence; of a longer one, those about its largest log ratio."""


@dataclass(frozen=True)
class SequenceRow:
    """One sequence.

    Attributes:
        file: its path.
        row: its row there.
        run: its run.
        facts: its per-sequence columns by name.
        batch: its valid tokens alone, T of them.
        mask: which of all its tokens are valid, [A].
        ids: token ids of all its tokens [A]; None: not recorded.
        position: place in its list of each valid token [T].
        experts: how many of the experts of both sides differ, per valid token [T]; None: not recorded.
        first: how many valid tokens stand before those shown.
        last: how many valid tokens there are up to the last one shown.
        texts: what its tokens read as, [A].
    """

    file: str
    row: int
    run: str
    facts: Mapping[str, Any]
    batch: TokenBatch
    mask: Bools
    ids: Ints | None
    position: Ints
    experts: Ints | None = None
    first: int = 0
    last: int = 0
    texts: list[str] = field(default_factory=list)

    @property
    def log_ratio(self) -> Float64s:
        """Train minus rollout log-prob of each valid token."""
        return self.batch.train.astype(np.float64) - self.batch.rollout.astype(np.float64)


def rows_of(
    paths: Sequence[str], places: Sequence[tuple[str, int]], rename: Mapping[str, str], on_bad: OnBad = "error"
) -> list[SequenceRow]:
    """The sequences at these places, in this order.

    Raises:
        DataError: a file or row is not there, or has a fault.
    """
    dump = open_dump(paths, rename=rename, aliases=column_aliases(), wanted=_WANTED, watched=_WATCHED, on_bad=on_bad)
    wanted = [(_file(dump, path), row) for path, row in places]
    found: dict[tuple[int, int], SequenceRow] = {}
    for unit in dump.units:
        rows = {row for file, row in wanted if file == unit.file and unit.start <= row < unit.start + unit.rows}
        if rows:
            found |= _read(dump, unit, rows)
    for file, row in wanted:
        if (file.index, row) not in found:
            remedy = f"name one of its rows, 0 to {file.rows - 1:,}"
            raise DataError("there is no such sequence", file=file.path, row=row, remedy=remedy)
    return [found[key] for key in dict.fromkeys((file.index, row) for file, row in wanted)]


def _file(dump: Dump, path: str) -> DumpFile:
    """The file of a path, or the one whose path ends so."""
    same = [file for file in dump.files if file.path == path or file.location == os.path.abspath(path)]
    same = same or [file for file in dump.files if file.location.endswith(os.sep + path.lstrip("./"))]
    if len(same) != 1:
        problem = "several files are called so" if same else "no file of the dump is called so"
        raise DataError(problem, file=path, remedy="name a file of the dump as PATH:ROW")
    return same[0]


def _read(dump: Dump, unit: Unit, wanted: set[int]) -> dict[tuple[int, int], SequenceRow]:
    seen: list[Rows] = []
    found = {}
    for batch in dump.read(unit, Problems(), seen.append):
        rows = seen.pop()
        seen.clear()
        for row in wanted & set(batch.rows.tolist()):
            alone = batch.take(np.flatnonzero(batch.rows == row))
            found[unit.file.index, row] = _row(unit.file, row, alone, rows.take(np.flatnonzero(rows.rows == row)))
    return found


def _row(file: DumpFile, row: int, batch: TokenBatch, whole: Rows) -> SequenceRow:
    ids = whole.tokens.get("token_ids")
    size = np.abs(batch.train.astype(np.float64) - batch.rollout.astype(np.float64))
    first, last = 0, batch.tokens
    if last > MOST_TOKENS:
        first = min(max(0, int(np.argmax(size)) - MOST_TOKENS // 2), last - MOST_TOKENS)
        last = first + MOST_TOKENS
    facts = {name: value for name, values in whole.columns.items() for value in values[:1].tolist() if _said(value)}
    return SequenceRow(
        file=file.path, row=row, run=str(facts.pop("run", file.run)), facts=facts, batch=batch, mask=whole.mask,
        ids=None if ids is None or ids.ndim != 1 else np.nan_to_num(ids, nan=-1).astype(np.int64),
        position=whole.position[whole.mask], experts=_experts(whole), first=first, last=last,
    )  # fmt: skip


def _said(value: Any) -> bool:
    return value is not None and value == value


def _experts(whole: Rows) -> Ints | None:
    """Experts of the rollout that the trainer did not choose, per valid token, as sets."""
    ours, theirs = whole.tokens.get("rollout_experts"), whole.tokens.get("train_experts")
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.ndim != 2:
        return None
    first, second = (np.sort(experts[whole.mask], axis=1) for experts in (ours, theirs))
    return np.asarray((first != second).sum(axis=1), np.int64)
