"""The terms of each sequence are the same with and without compiled loops."""

import math
from itertools import pairwise

import numpy as np
import pytest

from mismatchctl.core.batch import Segments
from mismatchctl.measure import sequence_terms
from mismatchctl.measure.sequence_terms import ValidTokens, compute_sequence_terms, hash_rows, measure_levels


def test_row_hashes_depend_only_on_length_and_values() -> None:
    rng = np.random.default_rng(1)
    first, other, token = (-rng.exponential(1.0, (2, length)).astype(np.float32) for length in (5, 5, 1))
    rollout, train = np.concatenate([first, other, token, first, first], axis=1)
    a, none, b, c, again, twice = hash_rows(Segments.from_lengths([5, 0, 5, 1, 5, 5]), rollout, train).tolist()
    assert len({a, none, b, c}) == 4
    assert again == twice == a


@pytest.mark.parametrize("kinds", [("f2", "f2"), ("f4", "f4"), ("f8", "f8"), ("f4", "f8")])
@pytest.mark.parametrize("share", [1.0, 0.7, 0.05])
def test_compiled_loops_compute_the_same_terms(
    kinds: tuple[str, str], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    segments = Segments.from_lengths(rng.integers(0, 60, 400))
    rollout = -rng.exponential(1.0, segments.tokens) * rng.choice([1e-3, 1.0, 1e5], segments.tokens)
    train = rollout + rng.normal(0.0, 0.1, segments.tokens)
    for value in (np.nan, np.inf, -np.inf, -0.0, 0.0):
        rollout[rng.random(segments.tokens) < 0.02] = value
        train[rng.random(segments.tokens) < 0.02] = value
    with np.errstate(over="ignore"):
        both = rollout.astype(kinds[0]), train.astype(kinds[1])
    valid = rng.random(segments.tokens) < share
    tokens = ValidTokens.of(segments, valid)
    found = []
    for compiled in (True, False):
        monkeypatch.setattr(sequence_terms, "compiled_loops_in_use", lambda compiled=compiled: compiled)
        found.append(compute_sequence_terms(segments, *both, valid, tokens))
    assert np.array_equal(found[0].rows, found[1].rows)
    assert np.array_equal(found[0].contents, found[1].contents)
    assert np.count_nonzero(found[0].contents) == np.count_nonzero(tokens.counts)
    assert np.allclose(found[0].surprise, found[1].surprise, rtol=1e-12, atol=0)
    for own, other in zip(found[0].levels, found[1].levels, strict=True):
        assert np.allclose(own, other, rtol=1e-12, atol=1e-300)


def test_content_hashes_ignore_masked_tokens_and_small_rounding() -> None:
    rng = np.random.default_rng(4)
    one = -rng.exponential(1.0, 30)
    padded = np.concatenate([one, [-7.0, -8.0]])
    rollout = np.concatenate([one, padded, one.astype(np.float32), one[::-1]])
    valid = np.ones(len(rollout), np.bool_)
    valid[60:62] = False
    segments = Segments.from_lengths([30, 32, 30, 30])
    terms = compute_sequence_terms(segments, rollout, rollout, valid, ValidTokens.of(segments, valid))
    plain, masked, rounded, other = terms.contents.tolist()
    assert plain == masked == rounded
    assert plain != other
    assert terms.rows[0] != terms.rows[1]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_level_terms_are_the_sums_of_each_sequence(kind: type) -> None:
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
    terms = measure_levels(segments, rollout, train, sound)
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
