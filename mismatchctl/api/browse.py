"""Read sequences token by token, with log-probs and the effect of each correction."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.scan import OPTIONAL_COLUMNS, find_trims
from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch, experts_per_layer
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.application import CorrectedBlock, apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.data.blocks import Rows
from mismatchctl.data.catalog import DumpFile
from mismatchctl.data.paths import DumpSource
from mismatchctl.data.problems import Problems
from mismatchctl.data.reader import BadDataPolicy, Dump, open_dump
from mismatchctl.data.tokenizer import Vocabulary, load_vocabulary
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import column_aliases
from mismatchctl.results.model import Result

_TOKEN_COLUMNS = ("token_ids", "rollout_experts", "train_experts", "entropy")
MAX_TOKENS = 4_096
"""Maximum number of tokens to show of a sequence. Longer sequences are cut around their largest |log ratio|."""


@dataclass(frozen=True)
class SequenceRow:
    """One sequence to show. Arrays have one value per token [A] or one value per valid token [T]."""

    file: str
    row: int
    run: str
    facts: Mapping[str, Any]  # column -> value, for columns with one value per sequence
    batch: TokenBatch
    mask: Bools  # True for valid tokens [A]
    ids: Ints | None  # token ids [A], if recorded
    position: Ints  # position of each valid token in its response [T]
    experts: Ints | None = None  # number of rollout experts that the trainer did not use [T], if experts are recorded
    first: int = 0  # index of the first valid token that is shown
    last: int = 0  # index after the last valid token that is shown
    texts: list[str] = field(default_factory=list)  # decoded tokens [A]

    @property
    def log_ratio(self) -> Float64s:
        return self.batch.train.astype(np.float64) - self.batch.rollout.astype(np.float64)


def read_rows(
    paths: Sequence[DumpSource],
    places: Sequence[tuple[str, int]],
    rename: Mapping[str, str],
    on_bad: BadDataPolicy = "error",
) -> list[SequenceRow]:
    """Read the sequences at `places`, which are pairs (path of the file, row in the file)."""
    dump = open_dump(
        paths,
        rename=rename,
        aliases=column_aliases(),
        wanted=(*OPTIONAL_COLUMNS, "worker"),
        watched=_TOKEN_COLUMNS,
        on_bad=on_bad,
    )
    wanted = [(_find_file(dump, path), row) for path, row in places]
    found: dict[tuple[int, int], SequenceRow] = {}
    seen: list[Rows] = []
    for unit in dump.units:
        rows = {row for file, row in wanted if file == unit.file and unit.start <= row < unit.start + unit.rows}
        for batch in dump.read(unit, Problems(), seen.append) if rows else ():
            whole = seen.pop()
            seen.clear()
            for row in rows & set(batch.rows.tolist()):
                alone, stored = batch.take(np.flatnonzero(batch.rows == row)), np.flatnonzero(whole.rows == row)
                found[unit.file.index, row] = _build_row(unit.file, row, alone, whole.take(stored))
    for file, row in wanted:
        if (file.index, row) not in found:
            remedy = f"choose a row from 0 to {file.rows - 1:,}"
            raise DataError("the dump does not contain this sequence", file=file.path, row=row, remedy=remedy)
    return [found[key] for key in dict.fromkeys((file.index, row) for file, row in wanted)]


def _find_file(dump: Dump, path: str) -> DumpFile:
    """Return the file whose path is `path` or ends with `path`."""
    same = [file for file in dump.files if file.path == path or file.location == os.path.abspath(path)]
    same = same or [file for file in dump.files if file.location.endswith(os.sep + path.lstrip("./"))]
    if len(same) != 1:
        problem = (
            "several files of the dump have this name" if same else "the dump does not contain a file of this name"
        )
        raise DataError(
            problem, file=path, remedy="pass a file of the dump and a row number, as in dump/step_3.parquet:17"
        )
    return same[0]


def _build_row(file: DumpFile, row: int, batch: TokenBatch, whole: Rows) -> SequenceRow:
    ids = whole.extra_columns.get("token_ids")
    size = np.abs(batch.train.astype(np.float64) - batch.rollout.astype(np.float64))
    first, last = 0, batch.tokens
    if last > MAX_TOKENS:
        first = min(max(0, int(np.argmax(size)) - MAX_TOKENS // 2), last - MAX_TOKENS)
        last = first + MAX_TOKENS
    facts = {name: values[:1].tolist()[0] for name, values in whole.columns.items()}
    facts = {name: value for name, value in facts.items() if value is not None and value == value}
    return SequenceRow(
        file=file.path, row=row, run=str(facts.pop("run", file.run)), facts=facts, batch=batch, mask=whole.mask,
        ids=None if ids is None or ids.ndim != 1 else np.nan_to_num(ids, nan=-1).astype(np.int64),
        position=whole.positions[whole.mask], experts=_unmatched_experts(whole), first=first, last=last,
    )  # fmt: skip


def _unmatched_experts(whole: Rows) -> Ints | None:
    ours, theirs = whole.extra_columns.get("rollout_experts"), whole.extra_columns.get("train_experts")
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.ndim != 2:
        return None
    width = experts_per_layer(ours[whole.mask])
    first, second = (side[whole.mask].reshape(-1, side.shape[1] // width, width) for side in (ours, theirs))
    differ = ((first[:, :, [k]] != second).all(axis=2).sum(axis=1) for k in range(width))
    return np.asarray(sum(differ), np.int64)


STATE_KEPT, STATE_REJECTED, STATE_BOUNDED = range(3)


@dataclass(frozen=True)
class AppliedCorrection:
    """The effect of one correction on each shown sequence."""

    correction: Correction
    states: tuple[NDArray[np.uint8], ...]  # STATE_KEPT, STATE_REJECTED or STATE_BOUNDED per valid token [T]
    weights: tuple[NDArray[np.float64], ...]  # weight of each valid token before normalization [T]
    reasons: tuple[list[str], ...]  # for each valid token, the gates that reject it, or "" if it is kept


def apply_corrections(
    paths: Sequence[DumpSource],
    corrections: Sequence[Correction],
    rows: Sequence[SequenceRow],
    rename: Mapping[str, str],
    on_bad: BadDataPolicy = "error",
) -> Iterator[AppliedCorrection]:
    """Yield the effect of each correction on the sequences. Corrections without a weight or gate are left out."""
    if any(gate.over == "batch" for correction in corrections for gate in correction.gates):
        dump = open_dump(paths, rename=rename, aliases=column_aliases(), wanted=("run", "step"), on_bad=on_bad)
        trims = find_trims(dump, corrections)
        rows = [replace(row, batch=trims.add_to(row.batch, row.run)) for row in rows]
    for correction in corrections if rows else ():
        if correction.weight is not None or correction.gates:
            every = (_apply_to_row(correction, row) for row in rows)
            found = ((_token_states(own), own.token_weights(), _rejection_reasons(own)) for own in every)
            yield AppliedCorrection(correction, *zip(*found, strict=True))


def _apply_to_row(correction: Correction, row: SequenceRow) -> CorrectedBlock:
    if lacking := row.batch.missing_columns(correction.needed_columns):
        raise ConfigError(f"correction {correction.name}: the dump lacks the column {', '.join(lacking)}")
    return apply_correction(correction, compute_ratios(row.batch, correction.sources), row.batch)


def _token_states(applied: CorrectedBlock) -> NDArray[np.uint8]:
    states = np.where(applied.kept.expand(), STATE_KEPT, STATE_REJECTED).astype(np.uint8)
    if applied.weights is not None:
        beyond = applied.weights.low | applied.weights.high
        if not applied.weights.per_token:
            beyond = applied.kept.segments.spread(beyond)
        states[beyond & (states == STATE_KEPT)] = STATE_BOUNDED
    return states


def _rejection_reasons(applied: CorrectedBlock) -> list[str]:
    reasons = [""] * applied.kept.segments.tokens
    for number, outcome in enumerate(applied.gates):
        gate = outcome.gate
        for rejected, word, bound in ((outcome.low, "below", gate.keep[0]), (outcome.high, "above", gate.keep[1])):
            text = f"gate {number}: {gate.statistic} ({gate.level}) {word} {bound:g}" if bound is not None else ""
            for index in np.flatnonzero(rejected.expand()):
                reasons[index] = f"{reasons[index]}; {text}" if reasons[index] else text
    return reasons


MAX_SEQUENCES = 20
"""Maximum number of sequences that are shown if the user does not choose sequences."""
SequencePlace = tuple[str, int]
"""Place of a sequence: the file's path as the user wrote it, and the row in this file."""


@dataclass(frozen=True)
class TokenView:
    """The contents of the page that `analyze --tokens` writes: sequences, effects of corrections, and vocabulary."""

    rows: tuple[SequenceRow, ...]
    corrections: tuple[AppliedCorrection, ...]
    vocabulary: Vocabulary


def parse_places(texts: Sequence[str], result: Result) -> list[SequencePlace]:
    """Parse `PATH:ROW` strings. Without strings, return the sequences whose log ratios have the largest |sum|."""
    if not texts:
        worst = [
            (one.file, one.row, abs(one.log_ratio_sum)) for run in result.runs.values() for one in run.worst_sequences
        ]
        ordered = sorted(worst, key=lambda one: -one[2])[:MAX_SEQUENCES]
        return [(file, row) for file, row, _ in ordered]
    found = []
    for text in texts:
        path, colon, row = text.rpartition(":")
        if not (colon and path and row.isdecimal()):
            raise ConfigError(f"--browse {text}: write PATH:ROW with rows counted from 0, as in dump/step_3.parquet:17")
        found.append((path, int(row)))
    return found


def browse(
    paths: Sequence[DumpSource],
    places: Sequence[SequencePlace],
    corrections: Sequence[Correction],
    *,
    rename: Mapping[str, str] | None = None,
    vocabulary: str | Path | None = None,
    on_bad: BadDataPolicy = "error",
) -> TokenView:
    """Read sequences token by token. Without `vocabulary`, tokens are shown as bytes or as numbers."""
    rows = read_rows(paths, places, rename or {}, on_bad)
    found = load_vocabulary(vocabulary, [row.ids for row in rows])
    applied = apply_corrections(paths, corrections, rows, rename or {}, on_bad)
    named = [replace(row, texts=found.texts(row.ids)) for row in rows]
    return TokenView(tuple(named), tuple(applied), found)
