"""One scan of a block gives the extremes, agreements and distances of log-probs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mismatchctl.core.batch import Segments, compute_extent
from mismatchctl.core.scan import scan_log_probs
from mismatchctl.data.blocks import Rows
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.diagnosis.evidence import Evidence, _compute_level_terms, gather_evidence

SPECIAL = (0.0, -0.0, -1e-30, -0.25, -3.0, -199.5, -9999.0, 1.0, 1e30, -1e38, np.inf, -np.inf, np.nan, -np.nan)


def rows_of(lengths: list[int], values: np.ndarray, valid: np.ndarray) -> Rows:
    return Rows(
        segments=Segments.from_lengths(lengths),
        rollout=values[0],
        train=values[1],
        mask=valid,
        columns={"step": np.arange(len(lengths)) // 3, "run": np.full(len(lengths), "r", object)},
        file=np.zeros(len(lengths), np.int64),
        rows=np.arange(len(lengths)),
    )


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    odd=st.lists(st.sampled_from(SPECIAL), max_size=6),
    above=st.booleans(),
    kind=st.sampled_from([np.float32, np.float64]),
    seed=st.integers(0, 999),
)
@example(lengths=[1, 1], odd=[0.0, -1e38, 0.0, 0.0], above=False, kind=np.float32, seed=1)
@example(lengths=[1, 1], odd=[0.0, -199.5, 0.0, 0.0], above=False, kind=np.float32, seed=1)
def test_the_compiled_scan_matches_numpy(
    lengths: list[int], odd: list[float], above: bool, kind: type, seed: int
) -> None:
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    values = -rng.exponential(1.0, (2, tokens)).astype(kind) * (-1 if above else 1)
    if tokens:
        values[rng.integers(0, 2, len(odd)), rng.integers(0, tokens, len(odd))] = odd
        same = rng.random(tokens) < 0.2
        values[1, same] = values[0, same]
    rollout, train = values
    valid, segments = rng.random(tokens) < 0.8, Segments.from_lengths(lengths)
    look = scan_log_probs(train, rollout, valid, segments.offsets)
    for name, column in (("train_log_probs", train), ("rollout_log_probs", rollout)):
        np.testing.assert_array_equal(look.extents[name], compute_extent(column))
    counts, sizes, certain = _compute_level_terms(segments, rollout, train, valid)
    assert look.levels[0].tolist() == counts.tolist()
    np.testing.assert_allclose(look.levels[1], sizes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(look.levels[2], certain, rtol=1e-5, atol=1e-37)  # float32 has no smaller probability
    assert look.identical.tolist() == segments.sum((rollout == train) & valid).tolist()


@pytest.mark.parametrize("bad", [None, np.nan, -9999.0, 1.5])
def test_evidence_is_equal_with_and_without_the_scan(bad: float | None) -> None:
    rng, lengths = np.random.default_rng(5), [3, 0, 1500, 40, 2100, 7]
    tokens = sum(lengths)
    values = -rng.exponential(1.0, (2, tokens)).astype(np.float32)
    values[1, ::7] = values[0, ::7]
    if bad is not None:
        values[0, [2, 1600]] = bad
    rows = rows_of(lengths, values, rng.random(tokens) < 0.9)
    seen = replace(rows, look=scan_log_probs(rows.train, rows.rollout, rows.mask, rows.segments.offsets))
    found: list[Evidence] = [
        gather_evidence(each, (), [cause.flags for cause in CAUSES], 1 << 16, {}, compiled)["r"]
        for each, compiled in ((rows, False), (rows, True), (seen, True), (seen, False))
    ]
    tallies = found[0].tallies
    assert tallies["identical"].sequences == 5
    assert len(tallies) == (1 if bad is None else 2)
    for other in found[1:]:
        assert other.tallies == tallies
        assert (other.tokens, other.sequences) == (found[0].tokens, found[0].sequences)
        assert other.cells.keys() == found[0].cells.keys()
        for key, sums in other.cells.items():
            np.testing.assert_allclose(sums, found[0].cells[key], rtol=1e-5, atol=1e-5)
    for key, sums in found[1].cells.items():
        assert sums.tobytes() == found[2].cells[key].tobytes()  # for every scan


def test_selected_rows_keep_their_part_of_the_scan() -> None:
    rng, lengths = np.random.default_rng(6), [5, 9, 1, 30]
    rows = rows_of(lengths, -rng.exponential(1.0, (2, 45)), np.ones(45, np.bool_))
    rows = replace(rows, look=scan_log_probs(rows.train, rows.rollout, rows.mask, rows.segments.offsets))
    for part in (rows.take(np.array([3, 1])), *rows.pieces(12)):
        anew = scan_log_probs(part.train, part.rollout, part.mask, part.segments.offsets)
        assert part.look is not None
        assert part.look.sums.tobytes() == anew.sums.tobytes()
