"""Code never reads memory that it has not written, and results do not share reused buffers."""

from typing import Any

import numpy as np
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.core.batch import Segments
from mismatchctl.core.bins import new_layer_table
from mismatchctl.measure.kernels import MIN_COMPILED_TOKENS, choose_kernel
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import PairTables, RunTables, SequencePlaces
from tests.paths import SAMPLE_DATA

SAMPLE = SAMPLE_DATA / "dense"


def poisoned(values: np.ndarray) -> np.ndarray:
    """Return an array of values that change every sum: NaN, the largest number, or True."""
    values[...] = np.nan if values.dtype.kind == "f" else True if values.dtype.kind == "b" else 0
    if values.dtype.kind in "iu":
        values[...] = np.iinfo(values.dtype).max
    return values


def poison_what_is_free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make numpy's new arrays contain poison, and count the arrays."""
    asked, empty, empty_like = [0], np.empty, np.empty_like

    def filled(made: np.ndarray) -> np.ndarray:
        asked[0] += 1
        return poisoned(made) if made.dtype.kind in "fiub" else made

    monkeypatch.setattr(np, "empty", lambda *given, **named: filled(empty(*given, **named)))
    monkeypatch.setattr(np, "empty_like", lambda *given, **named: filled(empty_like(*given, **named)))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_uninitialized_memory_does_not_change_results(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if compiled:  # compiled loops, the page reader and scans
        monkeypatch.setattr("mismatchctl.measure.kernels.MIN_COMPILED_TOKENS", 0)
        assert choose_kernel(1) is COMPILED_KERNEL
    else:
        assert choose_kernel(MIN_COMPILED_TOKENS - 1) is not COMPILED_KERNEL
    expected = analyze([str(SAMPLE)]).to_json()
    asked = poison_what_is_free(monkeypatch)
    assert analyze([str(SAMPLE)]).to_json() == expected
    assert asked[0] > 0


def columns(lengths: list[int], seed: int, wild: bool = False) -> tuple[np.ndarray, np.ndarray, Segments]:
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    rollout = -rng.exponential(300.0 if wild else 0.5, tokens).astype(np.float32)
    train = rollout + rng.standard_t(2, tokens).astype(np.float32) * (200 if wild else 0.05)
    return np.minimum(train, 0), rollout, Segments.from_lengths(lengths)


def test_tile_buffers_do_not_leak_between_sequences() -> None:
    """Buffers are reused between sequences of very different lengths."""
    lengths = [1, 7, 1023, 1024, 1025, 3000, 2]
    wild, calm = columns(lengths, 1, wild=True), columns(lengths, 2)
    both = (*(np.concatenate(pair) for pair in zip(wild[:2], calm[:2], strict=True)), joined(wild[2], calm[2]))
    alone, after = summed(calm), summed(both)
    for found, expected in zip(after, alone, strict=True):
        np.testing.assert_array_equal(found[:, -len(lengths) :], expected)


def joined(first: Segments, second: Segments) -> Segments:
    return Segments(np.append(first.offsets, first.offsets[-1] + second.offsets[1:]))


def summed(given: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    ratios = COMPILED_KERNEL.compute_ratios(*given)
    first = np.zeros(len(given[2]), np.int64)
    return COMPILED_KERNEL.reduce_tokens(
        ratios, None, SequencePlaces(first, first, first), PairTables(), RunTables(new_layer_table(1))
    )
