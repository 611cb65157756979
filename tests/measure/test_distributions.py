"""Recorded lists of the k most likely tokens, compared with whole distributions."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mismatchctl.measure.metrics.registry import compare_distributions
from mismatchctl.recorder.recorder import Recorder
from tests.cli import command
from tests.factories.policies import log_softmax, top

WORDS = 12


run = partial(command.run, code=0)


LOGITS = arrays(np.float64, (2, WORDS), elements=st.floats(-8, 8))


@settings(max_examples=60)
@given(LOGITS, st.integers(1, WORDS))
def test_recorded_probabilities_bound_the_full_distribution(logits: np.ndarray, k: int) -> None:
    rollout, train = log_softmax(logits[:1]), log_softmax(logits[1:])
    p, q = np.exp(rollout[0]), np.exp(train[0])
    kl = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    tv = math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    found = {name: values[0] for name, values in compare_distributions(*top(rollout, train, k)[1:]).items()}
    slack = 3e-5  # the rest has at least 1e-6
    assert found["top_kl"] <= kl + slack
    assert found["top_tv"] - slack <= tv <= found["top_tv_most"] + slack
    if k == WORDS:
        assert found["top_kl"] == pytest.approx(kl, abs=slack)
        assert found["top_mass_rollout"] == pytest.approx(1) and found["top_mass_train"] == pytest.approx(1)


def record(folder: Path, k: int, **changed: Any) -> dict[str, Any]:
    """Write 20 sequences of two policies over 12 tokens. Return the dump and the whole distributions."""
    noise = np.random.default_rng(4)
    lengths = noise.integers(3, 30, 20)
    logits = [2 * noise.standard_normal((length, WORDS)) for length in lengths]
    rollout = [log_softmax(one) for one in logits]
    train = [log_softmax(one + 0.3 * noise.standard_normal(one.shape)) for one in logits]
    tokens = [np.array([noise.choice(WORDS, p=np.exp(place)) for place in one]) for one in rollout]
    tops = [top(a, b, k) for a, b in zip(rollout, train, strict=True)]
    given = {
        "rollout_log_probs": [a[np.arange(len(t)), t] for a, t in zip(rollout, tokens, strict=True)],
        "train_log_probs": [b[np.arange(len(t)), t] for b, t in zip(train, tokens, strict=True)],
        "token_ids": tokens,
        "rollout_top_ids": [one[0] for one in tops],
        "rollout_top_log_probs": [one[1] for one in tops],
        "train_top_log_probs": [one[2] for one in tops],
        **changed,
    }
    with Recorder(folder) as recorder:
        recorder.write(step=0, **given)
    return {"rollout": rollout, "train": train}


def metrics(folder: Path) -> dict[str, Any]:
    (found,) = json.loads(run("analyze", folder, "--json").stdout)["runs"].values()
    return found["overall"]["metrics"]


def test_metrics_of_a_dump_match_formulas(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole", WORDS)
    p, q = (np.exp(np.concatenate(whole[side])) for side in ("rollout", "train"))
    found = metrics(tmp_path / "whole")
    expected = {
        "top_kl": (p * np.log(p / q)).sum(axis=1).mean(),
        "top_tv": np.abs(p - q).sum(axis=1).mean() / 2,
        "top_mass_rollout": 1.0,
        "top_agrees": (p.argmax(axis=1) == q.argmax(axis=1)).mean(),
    }
    for name, value in expected.items():
        assert found[name]["value"] == pytest.approx(value, abs=5e-6), name
    assert found["top_kl"]["se"] < found["k3"]["se"]  # without sampling noise
    assert abs(found["k3"]["value"] - found["top_kl"]["value"]) < 4 * found["k3"]["se"]
    record(tmp_path / "part", 4)
    part = metrics(tmp_path / "part")
    assert 0 < part["top_kl"]["value"] < found["top_kl"]["value"]
    assert part["top_tv"]["value"] < found["top_tv"]["value"] < part["top_tv_most"]["value"]
    assert part["top_mass_rollout"]["value"] == pytest.approx(np.sort(p, axis=1)[:, -4:].sum(axis=1).mean(), abs=1e-6)


def test_sequences_without_distributions_are_skipped(tmp_path: Path) -> None:
    whole = record(tmp_path / "dump", WORDS)
    (path,) = (tmp_path / "dump").iterdir()
    table = pq.read_table(path)
    for name in ("rollout_top_log_probs", "train_top_log_probs", "rollout_top_ids"):
        values = table[name].to_pylist()
        values[3:] = [None] * len(values[3:])
        kind = table.schema.field(name).type
        table = table.set_column(table.schema.get_field_index(name), pa.field(name, kind), pa.array(values, kind))
    pq.write_table(table, path)
    p, q = (np.exp(np.concatenate(whole[side][:3])) for side in ("rollout", "train"))
    assert metrics(tmp_path / "dump")["top_kl"]["value"] == pytest.approx(
        (p * np.log(p / q)).sum(axis=1).mean(), abs=5e-6
    )


def test_truncated_rollout_distributions_are_accepted(tmp_path: Path) -> None:
    """Excluded tokens have probability 0 (-inf)."""
    rollout = np.log(np.array([[0.5, 0.5, 0.0]]), where=[[True, True, False]], out=np.full((1, 3), -np.inf))
    train = np.log(np.array([[0.4, 0.4, 0.2]]))
    found = {name: float(values[0]) for name, values in compare_distributions(rollout, train).items()}
    assert found["top_kl"] == pytest.approx(math.log(0.5 / 0.4), abs=1e-5)
    assert found["top_tv"] == pytest.approx(0.2, abs=1e-5)
    assert found["top_mass_train"] == pytest.approx(1.0)


def test_gate_rules_work_on_distributions(tmp_path: Path) -> None:
    record(tmp_path / "dump", WORDS)
    run("gate", tmp_path / "dump", "--rule", "top_agrees:min=0.5")
    run("gate", tmp_path / "dump", "--rule", "top_kl:max=0.001", code=3)


def test_lists_of_different_lengths_are_refused_when_recorded(tmp_path: Path) -> None:
    ragged = [[[-1.0, -2.0], [-1.0]], [[-1.0, -2.0]]]
    sides = {"rollout_log_probs": [[-1.0, -1.0], [-1.0]], "train_log_probs": [[-1.0, -1.0], [-1.0]]}
    with pytest.raises(ValueError, match="rollout_top_log_probs"), Recorder(tmp_path) as recorder:
        recorder.write(step=0, **sides, rollout_top_log_probs=ragged)
