"""Comparison of two dumps whose tokens are paired. The expected numbers are computed in the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.api.compare import sources as pairing
from mismatchctl.api.compare.compare import compare
from mismatchctl.api.compare.sources import ComparedRun
from mismatchctl.data.catalog import ReadUnit
from tests.factories.dump_pairs import BASE, Tokens, k3, make_tokens, pair, spread, write_tokens


def test_tokens_are_paired_one_by_one(tmp_path: Path) -> None:
    other = BASE.scaled(
        lambda index, place, _: np.where((place == 5) & (index % 7 == 0), 20.0, 1.0 + 0.01 * (index % 2))
    )
    found = pair(tmp_path, other).contrasts[0].tokens
    assert found is not None
    before, after = (np.concatenate(t.train) - np.concatenate(t.rollout) for t in (BASE, other))
    change = k3(other) - k3(BASE)
    assert (found.matched_by, found.same_rollout, found.same_train) == ("token_ids", True, False)
    assert found.tokens == len(change)
    assert found.k3_change.value == pytest.approx(change.mean(), rel=1e-9)
    assert found.correlation == pytest.approx(np.corrcoef(before, after)[0, 1], rel=1e-9)
    assert found.abs_log_ratio_change == pytest.approx(np.abs(after - before).mean(), rel=1e-9)
    assert found.largest_log_ratio_change == pytest.approx(np.abs(after - before).max(), rel=1e-12)
    assert found.moved == np.mean(before != after)
    ranked = change[np.argsort(-np.abs(change))]
    for share in found.shares:
        assert share.of_change == pytest.approx(ranked[: share.tokens].sum() / change.sum(), rel=1e-6)
        assert share.of_movement == pytest.approx(np.abs(ranked[: share.tokens]).sum() / np.abs(change).sum(), rel=1e-6)
    # clustered error: sums of the change less the mean, by prompt
    prompts = spread(BASE, BASE.prompt)
    sums = np.array([(change[prompts == prompt] - change.mean()).sum() for prompt in set(BASE.prompt)])
    se = np.sqrt((sums**2).sum() * len(sums) / (len(sums) - 1)) / len(change)
    assert found.k3_change.se == pytest.approx(se, rel=1e-9)
    worst = found.most_moved[0]
    sequence = BASE.name.index(str(worst.sequence_id))
    assert worst.k3_change == pytest.approx(ranked[0], rel=1e-9)
    assert worst.position == 5
    assert worst.token_id == BASE.ids[sequence][5]
    assert worst.context_ids == BASE.ids[sequence][:5]
    assert worst.train_log_prob == (BASE.train[sequence][5], other.train[sequence][5])


@pytest.mark.slow
@pytest.mark.parametrize(("same", "column"), [("rollout", "rollout_log_probs"), ("train", "train_log_probs")])
def test_equal_log_probs_pair_tokens_without_ids(tmp_path: Path, same: str, column: str) -> None:
    """The cases are one rollout with two trainers, and one trainer with two engines."""
    noise = np.random.default_rng(2)
    moved = [np.minimum(row + noise.normal(0, 0.01, len(row)), 0) for row in BASE.rollout]
    other = BASE.scaled(lambda _, __, ___: 2.0) if same == "rollout" else replace(BASE, rollout=moved)
    order = np.random.default_rng(1).permutation(len(BASE.name))
    found = pair(tmp_path, other.chosen(order), leave_out=("token_ids", "sequence_id", "prompt_id"))
    tokens = found.contrasts[0].tokens
    assert tokens is not None
    assert tokens.matched_by == column
    assert (tokens.same_rollout, tokens.same_train) == (same == "rollout", same == "train")
    assert tokens.sequences == len(BASE.name)
    assert tokens.k3_change.value == pytest.approx(k3(other).mean() - k3(BASE).mean(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["same", "shuffled"])
def test_parts_give_the_same_pairs_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    other = BASE.scaled(lambda index, _, __: 1 + 0.1 * (index % 5))
    if order == "shuffled":
        other = other.chosen(np.random.default_rng(3).permutation(len(BASE.name)))
    whole = pair(tmp_path, other).contrasts[0].tokens
    monkeypatch.setattr(pairing, "MAX_TOKENS_IN_MEMORY", 1000)
    pieces = pair(tmp_path, other).contrasts[0].tokens
    assert whole is not None
    assert pieces is not None
    assert pieces.tokens == whole.tokens
    assert pieces.k3_change.value == pytest.approx(whole.k3_change.value, rel=1e-12)
    assert pieces.most_moved == whole.most_moved
    assert [s.of_movement for s in pieces.shares] == pytest.approx([s.of_movement for s in whole.shares], rel=1e-12)


@pytest.mark.usefixtures("row_groups_apart")
def test_dumps_in_the_same_order_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row group is read once for the index and once for the pairs."""
    read: list[tuple[str, int]] = []
    batches = pairing._read_batches

    def counted(source: ComparedRun, unit: ReadUnit) -> Any:
        read.append((source.path, unit.index))
        return batches(source, unit)

    monkeypatch.setattr(pairing, "_read_batches", counted)
    monkeypatch.setattr(pairing, "MAX_TOKENS_IN_MEMORY", 1)
    found = pair(tmp_path, BASE.scaled(lambda _, __, ___: 2.0)).contrasts[0].tokens
    assert found is not None
    assert found.sequences == len(BASE.name)
    assert len(set(read)) > 4
    assert len(read) == 2 * len(set(read))


def test_sequences_without_a_partner_are_counted(tmp_path: Path) -> None:
    other = BASE.scaled(lambda _, __, ___: 1.2).chosen(range(100))
    found = pair(tmp_path, other).contrasts[0].tokens
    assert found is not None
    assert found.sequences == 100
    assert found.unmatched == (len(BASE.name) - 100, 0)


def test_other_tokens_are_not_paired(tmp_path: Path) -> None:
    contrast = pair(tmp_path, make_tokens(9, longest=60)).contrasts[0]
    assert contrast.tokens is None
    assert "have different tokens" in contrast.tokens_status
    assert contrast.clusters_shared == 24
    assert not contrast.same_tokens


@pytest.mark.slow
@pytest.mark.parametrize("runs", [["first", "second"], [3, 4], [3.0, 4.0]])
def test_runs_in_a_column_are_paired_by_token(tmp_path: Path, runs: list[Any]) -> None:
    """The rows of two runs alternate in one file."""
    other = BASE.scaled(lambda _, __, ___: 1.5)
    both = Tokens(**{name: getattr(BASE, name) + getattr(other, name) for name in vars(BASE)})
    count = len(BASE.name)
    order = [row for index in range(count) for row in (index, count + index)]
    path = write_tokens(tmp_path / "both.parquet", both.chosen(order), run=runs * count)
    found = compare([str(path)]).contrasts[0].tokens
    assert found is not None
    assert (found.sequences, found.unmatched) == (count, (0, 0))
    assert found.k3_change.value == pytest.approx(k3(other).mean() - k3(BASE).mean(), rel=1e-9)
