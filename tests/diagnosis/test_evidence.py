"""The sample that `diagnose` uses does not depend on how the dump is split."""

import math
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.core.batch import Segments
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis import evidence
from mismatchctl.diagnosis.evidence import RowSample, _hash_rows


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
    hashes = _hash_rows(rows)
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
    added = reduce(add, (RowSample.of(_hash_rows(part), part, 200) for part in parts))
    assert sum(rows.segments.tokens for _, rows in added.parts) <= 400


def test_row_hashes_depend_only_on_length_and_values() -> None:
    rows = rows_of([5, 0, 5, 1], 1)
    twice = rows.take(np.array([2, 0, 0, 1, 3]))
    found, again = _hash_rows(rows).tolist(), _hash_rows(twice).tolist()
    assert len(set(found)) == 4
    assert again == [found[2], found[0], found[0], found[1], found[3]]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_level_terms_are_the_sums_of_each_sequence(kind: type, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "compiled_loops_in_use", lambda: compiled)
    rng = np.random.default_rng(5)
    segments = Segments.from_lengths([0, 3000, 1, 0, 40])
    train = -rng.exponential(1.0, segments.tokens).astype(kind)
    rollout = np.minimum(train + rng.normal(0, 0.7, segments.tokens), 0.5).astype(kind)
    sound = rng.random(segments.tokens) < 0.8
    train[100:120] = rollout[100:120]
    train[[3, 4, 5]], rollout[[4, 6, 7]], train[[8, 9]] = (
        (np.nan, -np.inf, -np.inf),
        (-np.inf, np.nan, np.inf),
        (-2000, 3),
    )
    terms = evidence.measure_levels(segments, rollout, train, sound)
    for index, (start, stop) in enumerate(pairwise(segments.offsets.tolist())):
        pairs = [
            (abs(float(t) - float(r)), min(float(t), 0.0))
            for t, r, valid in zip(train[start:stop], rollout[start:stop], sound[start:stop], strict=True)
            if valid and math.isfinite(t) and math.isfinite(r)
        ]
        same = sum(
            bool(v) and t == r for t, r, v in zip(*(of[start:stop] for of in (train, rollout, sound)), strict=True)
        )
        expected = len(pairs), same, sum(min(gap, 1.0) for gap, _ in pairs), sum(math.exp(t) for _, t in pairs)
        assert [term[index] for term in terms] == pytest.approx(expected, rel=1e-12)
