"""Kernels and tables read the declared columns in the same order."""

import numpy as np
import pytest

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.measure.columns import (
    MISMATCH_NAME,
    PAIR_COLUMNS,
    TOKEN_MAXIMA,
    TOKEN_SUMS,
    column_names,
    pair_columns,
)
from mismatchctl.measure.kernels.compiled_kernel import COMPILED_KERNEL
from mismatchctl.measure.kernels.kernel import NUMPY_KERNEL, Kernel, PairTables, SequencePlaces
from mismatchctl.measure.metrics.evaluation import closed_axis
from mismatchctl.measure.reduction import MeasurePlan, reduce_batch
from mismatchctl.measure.sums import GROUP_CAP, TableAxis

CORRECTIONS: tuple[Correction, ...] = tuple(find_preset(name) for name in ("token_tis", "geo_rs", "miles-moe-2"))


def one_token_each(sequences: int, clusters: int) -> TokenBatch:
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(0.4, sequences)
    train = np.minimum(rollout + 0.01 * rng.normal(size=sequences), 0.0)
    columns = {"step": np.zeros(sequences, np.int64), "prompt_id": np.arange(sequences) % clusters}
    segments = Segments(np.arange(sequences + 1))
    current, advantages = np.minimum(train + 0.001, 0.0), np.ones(sequences)
    return TokenBatch(segments, rollout, train, current, None, advantages, columns, rows=np.arange(sequences))


@pytest.mark.parametrize("kernel", [NUMPY_KERNEL, COMPILED_KERNEL], ids=["plain", "compiled"])
def test_kernels_compute_every_declared_token_column(kernel: Kernel) -> None:
    declared = [column for column in PAIR_COLUMNS if column.scope == "token"]
    assert all(column.compute is None for column in declared)
    assert all(column.compute is not None for column in PAIR_COLUMNS if column.scope == "sequence")
    batch = one_token_each(3, 3)
    ratios = kernel.compute_ratios(batch.train, batch.rollout, batch.segments)
    first = np.arange(3)
    sums, maxima = kernel.reduce_tokens(ratios, None, SequencePlaces(first, first, first), PairTables())
    assert sums.shape == (len(TOKEN_SUMS), 3)
    assert maxima.shape == (len(TOKEN_MAXIMA), 3)
    added, largest = pair_columns(ratios, sums, maxima)
    assert tuple(added) == column_names(PAIR_COLUMNS, "sum")
    assert tuple(largest) == column_names(PAIR_COLUMNS, "largest")
    np.testing.assert_allclose(added["log_ratio"], batch.train - batch.rollout)
    np.testing.assert_allclose(largest["-log_ratio"], batch.rollout - batch.train)


@pytest.mark.parametrize("has", [frozenset(), frozenset({"current_log_probs"})], ids=["pair", "three pairs"])
def test_tables_have_the_width_of_their_axes(has: frozenset[str]) -> None:
    plan = MeasurePlan(CORRECTIONS, available_columns=has)
    for axis in (plan.sequence_columns, plan.sums, plan.maxima, closed_axis(plan)):
        assert len(set(axis.names)) == len(axis)
    (cell,) = reduce_batch(one_token_each(20, 5), "run", plan).cells.values()
    assert cell.table.sums.shape == (5, len(plan.sums))
    assert cell.table.maxima.shape == (5, len(plan.maxima))
    tokens = cell.table.sums[:, plan.sums.position(MISMATCH_NAME, "tokens")]
    layers = [place for name, place in plan.sums.owner_columns(MISMATCH_NAME).items() if name.startswith("tokens@")]
    np.testing.assert_array_equal(tokens, np.full(5, 4.0))
    np.testing.assert_array_equal(cell.table.sums[:, layers].sum(axis=1), tokens)


def test_names_are_looked_up_in_their_source_then_in_the_mismatch() -> None:
    axis = TableAxis(((MISMATCH_NAME, "tokens"), (MISMATCH_NAME, "k3"), ("drift", "k3"), (0, "kept")))
    assert (axis.position("drift", "k3"), axis.position(0, "k3"), axis.position(0, "kept")) == (2, 1, 3)
    assert axis.owner_columns(0) == {"kept": 3}
    with pytest.raises(KeyError):
        axis.position("drift", "kept")


def test_batches_with_too_many_clusters_are_folded() -> None:
    """Without folding, a batch of a million short sequences has a row of all columns for each."""
    plan, batch = MeasurePlan(), one_token_each(3 * GROUP_CAP, 3 * GROUP_CAP)
    (cell,) = reduce_batch(batch, "run", plan).cells.values()
    assert cell.table.is_folded
    assert len(cell.table) <= GROUP_CAP
    k3, tokens = (cell.table.sums[:, plan.sums.position(MISMATCH_NAME, name)].sum() for name in ("k3", "tokens"))
    x = batch.train - batch.rollout
    assert tokens == len(batch)
    assert k3 == pytest.approx(float((np.expm1(x) - x).sum()), rel=1e-9)
