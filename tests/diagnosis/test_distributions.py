"""Sampler settings estimated from recorded distributions, with intervals that contain the truth."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatchctl.diagnosis.causes.sampling import _estimate_nucleus
from mismatchctl.recorder.recorder import Recorder
from tests.cli import command
from tests.factories.policies import Policy, log_softmax, tempered, top, truncated

run = partial(command.run, code=0)
WORDS, K, SEQUENCES = 300, 20, 48


def tied(k: int) -> Policy:
    """Keep the top k of coarse logits, and all tokens that tie with the k-th."""

    def policy(logits: np.ndarray) -> np.ndarray:
        coarse = np.round(16 * logits) / 16
        least = np.sort(coarse, axis=-1)[:, -k][:, None]
        return log_softmax(np.where(coarse >= least, coarse, -np.inf))

    return policy


def dump(folder: Path, policy: Policy, seed: int, noise: float = 0.01) -> Path:
    """Sample tokens from a policy that is computed from the trainer's logits, with other noise on each side."""
    rng = np.random.default_rng(seed)
    given: dict[str, list[Any]] = {name: [] for name in ("rollout", "train", "ids", "a", "b")}
    for length in rng.integers(20, 60, SEQUENCES):
        logits = rng.gumbel(0, rng.uniform(0.5, 3.0), (length, WORDS))
        with np.errstate(divide="ignore", invalid="ignore"):
            rollout = policy(logits + noise * rng.standard_normal(logits.shape))
        train = log_softmax(logits + noise * rng.standard_normal(logits.shape))
        tokens = np.array([rng.choice(WORDS, p=np.exp(place) / np.exp(place).sum()) for place in rollout])
        ids, a, b = top(rollout, train, K)
        at = np.arange(length), tokens
        for name, value in zip(given, (rollout[at], train[at], ids, a, b), strict=True):
            given[name].append(value)
    with Recorder(folder) as recorder:
        recorder.write(
            step=0, rollout_log_probs=given["rollout"], train_log_probs=given["train"], rollout_top_ids=given["ids"],
            rollout_top_log_probs=given["a"], train_top_log_probs=given["b"],
        )  # fmt: skip
    return folder


def first(folder: Path) -> dict[str, Any]:
    return dict(json.loads(run("diagnose", folder, "--json").stdout)["findings"][0])


def reported(finding: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(next(fact for fact in finding["evidence"] if fact["name"] == name))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 0.98, 1.02, 1.3])
def test_temperature_is_estimated_from_distributions(temperature: float, tmp_path: Path) -> None:
    inside = 0
    for seed in range(3):
        finding = first(dump(tmp_path / str(seed), tempered(temperature), seed))
        assert (finding["cause"], finding["confidence"]) == ("temperature", "high")
        fact = reported(finding, "temperature")
        inside += fact["interval"][0] - 5e-5 <= temperature <= fact["interval"][1] + 5e-5  # four digits are kept
        assert fact["value"] == pytest.approx(temperature, abs=2e-3)
    assert inside >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "policy"),
    [
        ("top_k", 5, truncated(k=5)),
        ("top_k", 6, tied(6)),
        ("top_p", 0.9, truncated(p=0.9)),
        ("top_p", 0.6, truncated(p=0.6)),
        ("min_p", 0.05, truncated(least=0.05)),
        ("min_p", 0.2, truncated(least=0.2)),
    ],
)
def test_truncation_is_found_in_distributions(name: str, value: float, policy: Policy, tmp_path: Path) -> None:
    finding = first(dump(tmp_path / "dump", policy, 7))
    assert (finding["cause"], finding["confidence"]) == ("truncated_sampling", "high")
    fact = reported(finding, name)
    assert fact["interval"][0] * 0.98 <= value <= fact["interval"][1] * 1.02
    assert fact["value"] == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("policy", [tempered(1.0), lambda logits: log_softmax(3 * np.tanh(logits / 3))])
def test_other_differences_are_not_called_temperature_or_truncation(policy: Policy, tmp_path: Path) -> None:
    finding = first(dump(tmp_path / "dump", policy, 5))
    assert "from its lists" not in json.dumps(finding)
    assert finding["cause"] not in ("temperature", "truncated_sampling") or finding["confidence"] != "high"


@pytest.mark.parametrize("tokens", [12, 100, 3000])
def test_the_interval_of_top_p_contains_it(tokens: int) -> None:
    """The density of tokens that are alone in their nucleus determines the interval."""
    rng = np.random.default_rng(tokens)
    held = []
    for _ in range(300):
        p = rng.uniform(0.5, 0.98)
        certain = np.log(p) + -np.log(p) * rng.random(tokens)
        low, estimate, high = np.exp(_estimate_nucleus(certain))
        held.append(low <= p <= high)
        assert low < estimate <= high
    assert 0.91 <= np.mean(held) <= 0.99
