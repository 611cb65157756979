"""The sample that `diagnose` uses does not depend on how the dump is split."""

from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.core.batch import Segments
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.evidence import RowSample
from mismatchctl.measure.sequence_terms import hash_rows
from mismatchctl.measure.sums import Hashes


def rows_of(lengths: list[int], seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    values = -rng.exponential(1.0, (2, tokens)).astype(np.float32)
    return Rows(
        segments=Segments.from_lengths(lengths),
        rollout=values[0],
        train=values[1],
        mask=np.ones(tokens, np.bool_),
        columns={"step": np.arange(len(lengths))},
        file=np.zeros(len(lengths), np.int64),
        rows=np.arange(len(lengths)),
    )


def row_hashes(rows: Rows) -> Hashes:
    return hash_rows(rows.segments, rows.rollout, rows.train)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=12),
    size=st.integers(1, 400),
    backwards=st.booleans(),
)
def test_samples_of_parts_merge_to_the_sample_of_all(
    lengths: list[int], cuts: list[int], size: int, backwards: bool
) -> None:
    rows = rows_of(lengths, 3)
    hashes = row_hashes(rows)
    whole = RowSample.of(hashes, rows, size)
    ends = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    parts = [
        RowSample.of(hashes[start:stop], rows.take(np.arange(start, stop)), size) for start, stop in pairwise(ends)
    ]
    added = reduce(add, parts[::-1] if backwards else parts)
    assert added.hashes.tolist() == whole.hashes.tolist()
    assert added.rows.rows.tolist() == whole.rows.rows.tolist()
    assert added.rows.columns["step"].tolist() == whole.rows.columns["step"].tolist()
    assert np.array_equal(added.rows.rollout, whole.rows.rollout)
    assert np.array_equal(added.rows.segments.offsets, whole.rows.segments.offsets)


def test_samples_of_few_long_rows_are_not_empty() -> None:
    """Each part contributes its share, even if none of its 16 rows has a small hash."""
    parts = [rows_of([1, 1000], seed) for seed in range(8)]
    highest = np.array([2**64 - 2, 2**64 - 1], np.uint64)
    added = reduce(add, (RowSample.of(highest, part, 1000, tokens=8008) for part in parts))
    assert added.rows.segments.tokens >= 1000


@pytest.mark.parametrize("number", [1, 40])
def test_samples_of_many_parts_stay_bounded(number: int) -> None:
    parts = [rows_of([100, 100], seed) for seed in range(number)]
    added = reduce(add, (RowSample.of(row_hashes(part), part, 200) for part in parts))
    assert sum(rows.segments.tokens for _, rows in added.parts) <= 400
