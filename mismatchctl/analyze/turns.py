"""`--by turn`: a response's turns, as a column per token tells them, else as masked tokens part them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatchctl.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.contract import TURN
from mismatchctl.correction.gates import adjacent_runs
from mismatchctl.dumps import Dump
from mismatchctl.errors import ConfigError, option
from mismatchctl.measure.hashes import cluster_hashes


def are_within(dump: Dump) -> bool:
    """Whether turns are parts of sequences, and not something that the dump says of each whole sequence.

    Raises:
        ConfigError: its column `turn` holds something else.
    """
    for file in dump.files:
        if TURN in file.ignored:
            problem = f"{option('by', TURN)}: the column turn {file.ignored[TURN]} in {file.path}"
            raise ConfigError(f"{problem}; give turns as numbers, or the column another name")
    return all(
        TURN not in file.partition and (TURN not in file.columns or file.is_per_token(TURN)) for file in dump.files
    )


def by_turns(batch: TokenBatch) -> TokenBatch:
    """A sequence of its own for each turn, which its column `turn` names, in the cluster of the whole one."""
    told, offsets = batch.others.get(TURN), batch.segments.offsets
    turns = adjacent_runs(batch).offsets if told is None else np.union1d(_changes(told), offsets)
    starts = turns[:-1]
    sequence = np.searchsorted(offsets, starts, side="right") - 1
    number = np.arange(len(starts)) - np.searchsorted(sequence, sequence) + 1 if told is None else told[starts]
    columns = {name: values[sequence] for name, values in batch.columns.items() if name != "sequence_id"}
    columns |= {TURN: number, "prompt_id": cluster_hashes(batch)[sequence]}
    return replace(
        batch, segments=Segments(turns), columns=columns, file=batch.file[sequence], rows=batch.rows[sequence]
    )


def _changes(values: Float64s) -> Ints:
    """Tokens whose value differs from that of the one before, NaN being a value."""
    before, after = values[:-1], values[1:]
    return np.flatnonzero((before != after) & ~(np.isnan(before) & np.isnan(after))) + 1
