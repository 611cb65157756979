"""A fault that no test covers, or that two causes explain, does not get a finding with high confidence."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.results.model import Finding
from tests.diagnosis.findings import found
from tests.factories import planted_causes as planted
from tests.factories.planted_causes import Planted, by_row, healthy

SURE, LIKELY = ("high",), ("high", "medium")


def claimed(findings: list[Finding], levels: tuple[str, ...]) -> list[str]:
    return [finding.cause for finding in findings if finding.confidence in levels]


def noisy(dump: Planted, size: float) -> Planted:
    random = np.random.default_rng(2)
    return by_row(dump, "rollout", lambda row: np.minimum(row + random.normal(0, size, len(row)), 0))


def lifted(dump: Planted, epsilon: float) -> Planted:
    """Record log(p + epsilon), as code does to avoid log 0."""
    return by_row(dump, "rollout", lambda row: np.log(np.exp(row) + epsilon))


def one_way(dump: Planted) -> Planted:
    """Renormalize the trainer's probabilities by a different factor for each token."""
    kept = np.random.default_rng(4).uniform(0.6, 1.0, 300)[dump.tokens["token_ids"]]
    p = np.exp(dump.tokens["rollout_log_probs"].astype(np.float64))
    dump.tokens["train_log_probs"] = np.log(np.minimum(p / np.maximum(kept, p), 1.0))
    return dump


def halves(rows: int = 80, length: int = 40) -> Planted:
    random = np.random.default_rng(5)
    p = random.choice([0.7, 0.11, 0.03], rows * length, p=[0.5, 0.35, 0.15])
    p = p * np.exp(0.05 * random.standard_normal(len(p)))
    noise = 1 + 1e-3 * random.standard_normal(len(p))
    tokens = {"rollout_log_probs": np.log(p) * noise, "train_log_probs": np.log(p)}
    tokens["response_mask"] = np.ones(len(p), np.bool_)
    return Planted(np.full(rows, length), tokens, {"sequence_id": np.arange(rows)})


def other_rows(dump: Planted, change: Callable[[Planted], Planted]) -> Planted:
    """Change rows that a coin flip chose, which no column shows."""
    changed = change(healthy())
    heads = np.repeat(np.random.default_rng(6).random(len(dump)) < 0.5, dump.lengths)
    for name, values in dump.tokens.items():
        values[heads] = changed.tokens[name][heads]
    return dump


def sure(rows: int = 60, length: int = 12) -> Planted:
    """Make a model that is nearly certain of most tokens, with noise on its logits."""
    random = np.random.default_rng(3)
    doubt = np.where(random.random(rows * length) < 0.85, 1e-3, 0.4) * random.random(rows * length)
    train = np.log1p(-doubt)
    rollout = np.minimum(train + 0.01 * doubt * random.standard_normal(len(train)), 0)
    tokens = {"rollout_log_probs": rollout, "train_log_probs": train, "token_ids": random.integers(0, 50, len(train))}
    tokens["response_mask"] = np.ones(len(train), np.bool_)
    return Planted(np.full(rows, length), tokens, {"sequence_id": np.arange(rows)})


def second_best(dump: Planted) -> Planted:
    """Replace some log-probs by the log-prob of the second most likely token."""
    few = dump.tokens["token_ids"] < 3
    dump.tokens["rollout_log_probs"][few] = dump.tokens["train_log_probs"][few] - 9
    return dump


def unsure(rows: int = 100, length: int = 40) -> Planted:
    """Make a model that is certain of a tenth of its tokens, with equal columns."""
    random = np.random.default_rng(9)
    p = np.where(random.random(rows * length) < 0.1, 0.995, random.uniform(0.02, 0.6, rows * length))
    tokens = {"rollout_log_probs": np.log(p), "train_log_probs": np.log(p)}
    tokens |= {"token_ids": random.integers(0, 300, len(p)), "response_mask": np.ones(len(p), np.bool_)}
    return Planted(np.full(rows, length), tokens, {"sequence_id": np.arange(rows)})


def deeper(dump: Planted, tied: float = 0.0) -> Planted:
    """Add the noise of a slightly deeper model than the bound allows, some of it by token."""
    random, rollout = np.random.default_rng(11), dump.tokens["rollout_log_probs"].astype(np.float64)
    own = random.standard_normal(300)[dump.tokens["token_ids"]] * np.sqrt(tied)
    noise = 0.04 * (own + random.standard_normal(len(rollout)) * np.sqrt(1 - tied)) * -np.expm1(rollout)
    dump.tokens["train_log_probs"] = np.minimum(rollout + noise, 0)
    del dump.tokens["current_log_probs"]
    return dump


def gained(dump: Planted, least: float) -> Planted:
    """Raise the trainer's log-prob of every token, and of some tokens of the vocabulary more."""
    kept = np.random.default_rng(4).uniform(least, 1.0, 300)[dump.tokens["token_ids"]]
    rollout = dump.tokens["rollout_log_probs"].astype(np.float64)
    dump.tokens["train_log_probs"] = np.minimum(rollout - np.log(kept) * -np.expm1(rollout), 0)
    return dump


def loud(times: float, *, lost: float = 0.0) -> Planted:
    """Make the trainer's logits noisier in half of the rows."""
    dump, random = healthy(), np.random.default_rng(1)
    rollout = dump.tokens["rollout_log_probs"].astype(np.float64)
    heads = np.repeat(random.random(len(dump)) < 0.5, dump.lengths)
    noise = 0.002 * np.where(heads, times, 1.0) * random.standard_normal(len(rollout))
    moved = (noise - np.log1p(-lost) * heads) * -np.expm1(rollout)
    dump.tokens["train_log_probs"] = np.minimum(rollout + moved, 0)
    return dump


def coincidences(rows: int = 64, length: int = 14) -> Planted:
    """Make unrelated columns of few likely values, so that short rows agree by chance."""
    random = np.random.default_rng(0)
    values = (
        np.where(random.random(rows * length) < 0.7, -1e-3, -4 + 0.5 * random.standard_normal(rows * length))
        for _ in range(2)
    )
    tokens = dict(zip(("rollout_log_probs", "train_log_probs"), values, strict=True))
    tokens["response_mask"] = np.ones(rows * length, np.bool_)
    return Planted(np.full(rows, length), tokens, {"sequence_id": np.arange(rows)})


CASES: dict[str, tuple[Callable[[], Planted], str, tuple[str, ...]]] = {
    "noise beside logits: weights": (lambda: noisy(healthy(), 0.3), "weights_differ", LIKELY),
    "noise beside logits: a draft": (lambda: noisy(healthy("moe"), 0.05), "other_model", LIKELY),
    "noise beside logits: quantized": (lambda: noisy(healthy("moe"), 0.05), "quantized_rollout", LIKELY),
    "log(p + epsilon): truncated": (lambda: lifted(healthy(), 0.01), "truncated_sampling", LIKELY),
    "log(p + epsilon): a factor": (lambda: lifted(halves(), 0.01), "wrong_log_base", LIKELY),
    "noise beside logits: a cache": (lambda: noisy(unsure(), 0.03), "cache_quantization", LIKELY),
    "a larger model's noise: a cache": (lambda: deeper(healthy()), "cache_quantization", LIKELY),
    "a larger model's noise: weights": (lambda: deeper(healthy(), 0.1), "weights_differ", LIKELY),
    "the trainer truncates": (lambda: one_way(healthy()), "weights_differ", LIKELY),
    "the trainer gives more to all": (lambda: gained(healthy(), 0.8), "weights_differ", LIKELY),
    "the trainer gives a little more to all": (lambda: gained(healthy(), 0.9), "quantized_rollout", LIKELY),
    "a temperature in noise": (lambda: planted.temperature(healthy(), 0.99), "cache_quantization", LIKELY),
    "raw log-probs, slightly": (lambda: planted.raw_logprobs(healthy(), 1.1).rows(np.arange(20)), "temperature", SURE),
    "raw log-probs, hardly": (lambda: planted.raw_logprobs(healthy(), 1.05).rows(np.arange(40)), "temperature", SURE),
    "unrelated rows that agree by chance": (coincidences, "swapped_rows", SURE),
    "raw log-probs of experts": (
        lambda: planted.raw_logprobs(healthy("moe"), 1.2).rows(np.arange(20)), "temperature", SURE,
    ),
    "negated": (lambda: by_row(sure(), "rollout", lambda row: -row), "probabilities_not_logs", LIKELY),
    "second best": (lambda: second_best(sure(200)), "logit_bias", SURE),
}  # fmt: skip


@pytest.mark.parametrize(("make", "cause", "levels"), CASES.values(), ids=CASES)
def test_unknown_faults_are_not_called_a_known_cause(
    make: Callable[[], Planted], cause: str, levels: tuple[str, ...], tmp_path: Path
) -> None:
    findings = found(make(), tmp_path)
    assert findings and cause not in claimed(findings, levels)


def test_noise_outside_logits_is_unexplained(tmp_path: Path) -> None:
    first = found(noisy(healthy(), 0.3), tmp_path)[0]
    assert first.cause == "unexplained" and "probability near 1 differ like all others" in first.summary


def test_negated_log_probs_of_a_certain_model_are_found(tmp_path: Path) -> None:
    assert claimed(found(by_row(sure(), "rollout", lambda row: -row), tmp_path), SURE)[0] == "wrong_log_base"


@pytest.mark.parametrize("temperature", [0.99, 1.01])
def test_a_small_temperature_change_is_found(temperature: float, tmp_path: Path) -> None:
    assert claimed(found(planted.temperature(healthy(), temperature), tmp_path), LIKELY) == ["temperature"]


@pytest.mark.parametrize("temperature", [0.7, 0.8])
def test_two_kinds_of_rows_are_found_without_a_column(temperature: float, tmp_path: Path) -> None:
    dump = other_rows(healthy(), lambda one: planted.temperature(one, temperature))
    findings = found(dump, tmp_path)
    first = findings[0]
    share = next(fact for fact in first.evidence if fact.name == "sequences").value
    truth = float((np.random.default_rng(6).random(len(dump)) < 0.5).mean())
    assert first.cause == "unexplained" and first.confidence == "high" and "two kinds" in first.summary
    assert isinstance(share, float) and abs(share - truth) < 0.1
    assert claimed(findings, LIKELY) == ["unexplained"]


def test_another_vocabulary_must_affect_every_row(tmp_path: Path) -> None:
    findings = found(loud(1, lost=0.01), tmp_path)
    assert claimed(findings, LIKELY) == ["unexplained"] and "two kinds" in findings[0].summary


@pytest.mark.parametrize(("times", "kinds"), [(4, 1), (10, 2)])
def test_two_kinds_of_rows_need_distant_levels(times: float, kinds: int, tmp_path: Path) -> None:
    """The noise of the halves differs by a factor: their log levels vary by (ln factor / 2)^2, 0.48 and 1.3."""
    findings = found(loud(times), tmp_path)
    assert any("two kinds" in finding.summary for finding in findings) == (kinds == 2)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_rows_of_one_kind_are_not_reported(kind: str, tmp_path: Path) -> None:
    dump = healthy(kind)
    assert all("two kinds" not in finding.summary for finding in found(dump, tmp_path))


def test_one_row_gives_no_high_confidence(tmp_path: Path) -> None:
    """A single edited, shifted or wrongly joined row looks the same."""
    dump = healthy()
    dump.tokens["rollout_log_probs"][[40, 44]] -= 9
    findings = found(dump, tmp_path)
    assert claimed(findings, SURE) == [] and claimed(findings, LIKELY)[0] == "unexplained"


def two_policies(sampled: bool) -> Planted:
    """Return log-probs of two unrelated policies, for tokens that the rollout sampled or nobody did."""
    random = np.random.default_rng(8)
    rows, length, words = 60, 25, 12
    rollout, train = random.dirichlet(np.ones(words), (2, rows * length))
    drawn = (rollout.cumsum(axis=1) > random.random((rows * length, 1))).argmax(axis=1)
    token = drawn if sampled else random.integers(0, words, rows * length)
    columns = (np.log(np.maximum(p[np.arange(len(p)), token], 1e-6)) for p in (rollout, train))
    tokens = dict(zip(("rollout_log_probs", "train_log_probs"), columns, strict=True))
    tokens["response_mask"] = np.ones(rows * length, np.bool_)
    return Planted(np.full(rows, length), tokens, {"sequence_id": np.arange(rows)})


@pytest.mark.parametrize(("sampled", "confidence"), [(True, "medium"), (False, "high")])
def test_columns_of_two_policies_can_share_tokens(sampled: bool, confidence: str, tmp_path: Path) -> None:
    finding = next(one for one in found(two_policies(sampled), tmp_path) if one.cause == "unexplained")
    assert "nearly unrelated" in finding.summary
    assert finding.confidence == confidence
    assert ("very different" in finding.summary) == sampled
