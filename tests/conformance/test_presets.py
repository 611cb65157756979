"""Presets keep the same tokens and give the same weights as the frameworks' own code (conformance/README.md)."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.application import CorrectedBlock, Selection, apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.registry import find_preset, load_presets

pytestmark = pytest.mark.conformance

FOLDER = Path(__file__).parent
FILES = ("verl", "slime")
WITHOUT_GOLDENS = {
    "miles-dense-1",  # does nothing
    "miles-dense-3",  # published without bounds, so no configuration was run
    "miles-dense-4",
}
FLOAT32_ROUNDING = 2e-7  # rounding of log(1e-4), which is 1.3e-7 lower in float32


@cache
def _goldens() -> Mapping[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for file in FILES:
        for row in pq.read_table(FOLDER / f"{file}_goldens.parquet").to_pylist():
            found[row["preset"]].append(row | {"file": file})
    return found


@cache
def _batches(file: str) -> Mapping[tuple[str, int], TokenBatch]:
    rows = defaultdict(list)
    for row in pq.read_table(FOLDER / f"{file}_inputs.parquet").to_pylist():
        rows[row["batch"], row["step"]].append(row)
    return {key: _batch(group) for key, group in rows.items()}


def _batch(rows: list[dict[str, Any]]) -> TokenBatch:
    masks = [np.array(row["response_mask"], np.bool_) for row in rows]

    def valid(column: str) -> Any:
        if column not in rows[0]:
            return None
        return np.concatenate([np.array(row[column], np.float32)[mask] for row, mask in zip(rows, masks, strict=True)])

    return TokenBatch(
        Segments.from_lengths([int(mask.sum()) for mask in masks]),
        valid("rollout_log_probs"),
        valid("train_log_probs"),
        valid("current_log_probs"),
    )


def _apply(correction: Correction, batch: TokenBatch) -> CorrectedBlock:
    pairs = {"train/rollout": Ratios(batch.train, batch.rollout, batch.segments)}
    if batch.current is not None:
        pairs["current/rollout"] = Ratios(batch.current, batch.rollout, batch.segments)
    return apply_correction(correction, pairs, batch)


def _token_weights(
    correction: Correction, applied: CorrectedBlock, batch: TokenBatch, micro_batch_size: int | None
) -> Any:
    """Return the weights of all tokens, divided within each micro-batch by their mean before rejection."""
    weights = applied.token_weights().copy()
    if correction.weight is None or correction.weight.normalize == "none":
        return weights
    assert correction.weight.normalize == "token"
    size = micro_batch_size or len(batch)
    for start in range(0, len(batch), size):
        first, last = batch.segments.offsets[[start, min(start + size, len(batch))]]
        factor = weights[first:last].sum() / max(last - first, 1)
        weights[first:last] /= factor if factor > 1e-8 else 1.0
    return weights


def _on_a_veto(correction: Correction, batch: TokenBatch) -> Any:
    """Return the sequences with a token so close to the veto that float32 rounding decides."""
    near = np.zeros(batch.tokens, np.bool_)
    for gate in correction.gates:
        if gate.is_veto:
            policy = batch.train if gate.source == "train/rollout" else batch.current
            log_ratio = np.subtract(policy, batch.rollout, dtype=np.float64)
            near |= np.abs(log_ratio - np.log(gate.keep[0])) < FLOAT32_ROUNDING
    return batch.segments.sum(near) > 0


OF_FAMILY = [name for name, item in load_presets().items() if item.framework in ("verl", "slime", "miles")]
"""Presets of verl, slime and Miles. test_peers.py covers the presets of other frameworks."""


@pytest.mark.parametrize("name", sorted(name for name in OF_FAMILY if name not in WITHOUT_GOLDENS))
def test_presets_match_the_framework(name: str) -> None:
    correction = find_preset(name)
    goldens = _goldens()[name]
    assert goldens
    for golden in goldens:
        batch = _batches(golden["file"])[golden["batch"], golden["step"]]
        applied = _apply(correction, batch)
        decided = ~_on_a_veto(correction, batch)
        place = f"{golden['config']}, {golden['batch']}, step {golden['step']}"
        if golden["kept_tokens"] is not None:
            np.testing.assert_array_equal(applied.kept.counts[decided], np.array(golden["kept_tokens"])[decided], place)
        if golden["weight_sum"] is not None:
            assert applied.weights is not None
            weights = _token_weights(correction, applied, batch, golden["micro_batch_size"])
            total = Selection.everything(batch.segments).sum(weights)
            np.testing.assert_allclose(total, golden["weight_sum"], rtol=1e-9, atol=0, err_msg=place)
            if golden["kept_weight_sum"] is not None:
                kept = applied.kept.sum(weights)[decided]
                expected = np.array(golden["kept_weight_sum"])[decided]
                np.testing.assert_allclose(kept, expected, rtol=1e-9, atol=0, err_msg=place)
        elif golden["bounded_fraction"] is not None:
            assert applied.weights is not None
            bounded = applied.weights.low | applied.weights.high
            # slime counts a sequence without a valid token as one token.
            share = bounded.sum() / np.maximum(batch.segments.lengths, 1).sum()
            assert share == pytest.approx(golden["bounded_fraction"], rel=1e-6), place
        else:
            assert applied.weights is None


def test_few_sequences_depend_on_rounding() -> None:
    correction = find_preset("slime-mis")
    undecided = {
        (file, *key, int(sequence))
        for file in FILES
        for key, batch in _batches(file).items()
        for sequence in np.flatnonzero(_on_a_veto(correction, batch))
    }
    assert undecided == {("verl", "edge", 1, 8), ("slime", "edge", 0, 6), ("slime", "edge", 0, 9)}
