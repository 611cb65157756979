"""Sampler settings estimated from sampled tokens, with intervals that contain the truth."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.api.diagnose import diagnose
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.causes import sampling
from mismatchctl.diagnosis.distributions import TemperatureFit, estimate_temperature
from mismatchctl.results.model import Fact, Finding
from tests.diagnosis.findings import found
from tests.factories import planted_causes as planted
from tests.factories import sampled as models
from tests.factories.planted_causes import Planted, healthy
from tests.factories.policies import Policy, log_softmax, tempered, truncated

WORDS = 300

SEQUENCES, SEEDS = 48, 4


def sampled(policy: Policy, seed: int, *, raw: bool = False, trainer: Policy = log_softmax) -> Planted:
    """Sample tokens from certain and uncertain contexts, with a little noise on the trainer's side."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 60, SEQUENCES)
    logits = rng.gumbel(0, rng.uniform(0.5, 3.0, (int(lengths.sum()), 1)), (int(lengths.sum()), WORDS))
    with np.errstate(divide="ignore", invalid="ignore"):
        chosen_by = policy(logits)
    tokens = np.array([rng.choice(WORDS, p=np.exp(place) / np.exp(place).sum()) for place in chosen_by])
    at = np.arange(len(tokens)), tokens
    said = (log_softmax(logits) if raw else chosen_by)[at]
    train = trainer(logits + 0.01 * rng.standard_normal(logits.shape))[at]
    columns = {"sequence_id": np.arange(SEQUENCES), "step": np.arange(SEQUENCES) % 4}
    values = {"rollout_log_probs": said, "train_log_probs": train}
    given = {name: part.astype(np.float32) for name, part in values.items()} | {"token_ids": tokens.astype(np.int32)}
    return Planted(lengths, given | {"response_mask": np.ones(len(tokens), np.bool_)}, columns)


def reported(finding: Finding, name: str) -> Fact:
    return next(fact for fact in finding.evidence if fact.name == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "raw"), [(0.7, False), (0.9, False), (1.1, False), (1.4, False), (0.7, True), (1.4, True)]
)
def test_the_interval_of_a_temperature_contains_it(temperature: float, raw: bool, tmp_path: Path) -> None:
    policy, held = tempered(temperature), 0
    for seed in range(SEEDS):
        dump = sampled(policy, seed, raw=raw, trainer=policy if raw else log_softmax)
        first = found(dump, tmp_path)[0]
        assert first.cause == ("raw_logprobs" if raw else "temperature")
        fact = reported(first, "temperature")
        assert isinstance(fact.value, float) and abs(fact.value / temperature - 1) < 0.05
        assert fact.interval is not None and fact.interval[1] < 1.25 * fact.interval[0]
        held += fact.interval[0] <= temperature <= fact.interval[1]
    assert held >= SEEDS - 1


def test_intervals_that_reach_zero_are_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of such an interval is unbounded."""

    def reaching(case: Case) -> TemperatureFit | None:
        known = estimate_temperature(case)
        return None if known is None or known.interval is None else replace(known, interval=(0.0, known.interval[1]))

    monkeypatch.setattr(sampling, "estimate_temperature", reaching)
    policy = tempered(0.7)
    first = found(sampled(policy, 0, raw=True, trainer=policy), tmp_path)[0]
    assert first.cause == "raw_logprobs"
    low, high = reported(first, "temperature").interval or (0, 0)
    assert low <= 0.7 < 1e6 < high < np.inf


@pytest.mark.parametrize("cap", [3.0, 5.0])
def test_a_logit_softcap_is_not_a_temperature(cap: float, tmp_path: Path) -> None:
    dump = sampled(lambda logits: log_softmax(cap * np.tanh(logits / cap)), 1)
    assert "temperature" not in {row.cause for row in found(dump, tmp_path) if row.confidence != "low"}


@pytest.mark.slow
@pytest.mark.parametrize("k", [5, 12])
def test_top_k_is_counted(k: int, tmp_path: Path) -> None:
    held = 0
    for seed in range(SEEDS):
        first = found(sampled(truncated(k=k), seed), tmp_path)[0]
        assert first.cause == "truncated_sampling"
        assert f"top-k of about {reported(first, 'top_k').value}" in first.summary
        low, high = reported(first, "top_k").interval or (0, 0)
        held += low <= k <= high < 2.5 * low
    assert held >= SEEDS - 1


@pytest.mark.parametrize("least", [0.05, 0.2])
def test_min_p_is_not_called_top_p(least: float, tmp_path: Path) -> None:
    first = found(sampled(truncated(least=least), 3), tmp_path)[0]
    assert first.cause == "truncated_sampling"
    assert "min-p" in first.summary
    assert not {"top_p", "top_k"} & {fact.name for fact in first.evidence}


@pytest.mark.parametrize(
    ("temperature", "setting", "vocabulary", "certainty"),
    [(0.7, {"top_p": 0.9}, 64, 2.0), (1.4, {"top_p": 0.9}, 256, 4.0), (1.4, {"top_k": 12}, 256, 4.0)],
)
def test_a_temperature_is_found_next_to_a_truncation(
    temperature: float, setting: dict[str, float], vocabulary: int, certainty: float, tmp_path: Path
) -> None:
    """Without token ids, no contexts are known to be equal."""
    process = models.sampler(temperature=temperature, **setting)  # type: ignore[arg-type]
    setup = models.Setup(rows=96, longest=80, process=process, noise=(0.01, 0.0))
    dump = models.sampled(models.Model.of(51, vocabulary, certainty), 51, setup)
    del dump.tokens["token_ids"], dump.tokens["entropy"]
    (findings,) = diagnose([str(dump.write(tmp_path / "dump.parquet"))]).runs.values()
    value = reported(findings[0], "temperature").value
    assert (findings[0].cause, findings[0].confidence != "low") == ("temperature", True)
    assert isinstance(value, float) and abs(np.log(value)) > 0.05 and (value < 1) == (temperature < 1)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.8), (0.6, 0.95), (0.85, 0.9)])
@pytest.mark.parametrize(("vocabulary", "certainty"), [(64, 2.0), (256, 4.0), (512, 9.0), (1024, 5.0)])
def test_temperature_and_top_p_are_estimated_together(
    temperature: float, top_p: float, vocabulary: int, certainty: float, tmp_path: Path
) -> None:
    process = models.sampler(temperature=temperature, top_p=top_p)
    setup = models.Setup(rows=192, longest=110, process=process, noise=(0.01, 0.0))
    dump = models.sampled(models.Model.of(51, vocabulary, certainty), 51, setup)
    for entropy, tolerance in ((True, 0.03), (False, 0.06)):
        if not entropy:
            dump.tokens.pop("entropy")
        (findings,) = diagnose([str(dump.write(tmp_path / "dump.parquet"))]).runs.values()
        heat, mass = reported(findings[0], "temperature"), reported(findings[0], "top_p")
        assert findings[0].cause == "truncated_sampling"
        assert heat.value == pytest.approx(temperature, rel=0.01)
        assert mass.value == pytest.approx(top_p, abs=tolerance)
        assert mass.interval is not None and mass.interval[0] <= top_p <= mass.interval[1]


@pytest.mark.parametrize(("setting", "named"), [({"top_k": 12}, "top_k"), ({"min_p": 0.05}, "")])
def test_other_truncations_at_a_temperature_are_not_called_top_p(
    setting: dict[str, float], named: str, tmp_path: Path
) -> None:
    process = models.sampler(temperature=0.7, **setting)  # type: ignore[arg-type]
    setup = models.Setup(rows=128, longest=110, process=process, noise=(0.01, 0.0))
    dump = models.sampled(models.Model.of(52, 256, 4.0), 52, setup)
    (findings,) = diagnose([str(dump.write(tmp_path / "dump.parquet"))]).runs.values()
    facts = {fact.name: fact for fact in findings[0].evidence}
    assert facts["temperature"].value == pytest.approx(0.7, rel=0.01)
    assert {"top_p", "top_k"} & {*facts} == ({named} if named else set())


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_interval_of_a_share_of_rows_contains_it(share: float, tmp_path: Path) -> None:
    first = found(planted.shifted(healthy(), 1, share), tmp_path)[0]
    low, high = reported(first, "sequences").interval or (1, 0)
    assert low <= share <= high < low + 0.2


def test_retokenized_text_is_found(tmp_path: Path) -> None:
    """From some position on, the trainer has two more tokens for the same text."""
    dump = healthy()
    values, starts = dump.tokens["train_log_probs"], np.cumsum(dump.lengths) - dump.lengths
    for row in np.flatnonzero(dump.lengths > 48)[::4]:
        part = slice(starts[row] + 12, starts[row] + dump.lengths[row])
        values[part] = np.concatenate([[-7.0, -5.0], values[part][:-2]])
    first = found(dump, tmp_path)[0]
    assert (first.cause, first.confidence) == ("retokenized", "high")
    assert str(reported(first, "shifts").value).startswith("-2: ")


def test_edits_and_shifts_are_not_called_retokenized(tmp_path: Path) -> None:
    for dump in (planted.edited(healthy(), 0.3), planted.shifted(healthy(), 2, 0.3)):
        assert "retokenized" not in {row.cause for row in found(dump, tmp_path)}


def test_prompts_with_a_stale_prefix_cache_are_found(tmp_path: Path) -> None:
    dump = healthy()
    prompt = np.arange(len(dump)) // 4
    dump.columns["prompt_id"] = prompt
    assert "stale_prefix" not in {row.cause for row in found(dump, tmp_path)}
    kept = ((prompt % 3 == 0)[dump.row]) & (dump.place < 24)
    rollout, train = (dump.tokens[f"{side}_log_probs"] for side in ("rollout", "train"))
    rollout[kept] -= (2.0 * (train - rollout))[kept]
    first = found(dump, tmp_path)[0]
    assert (first.cause, first.confidence) == ("stale_prefix", "medium")
    assert {row.cause for row in first.rivals} == {"context_mismatch"}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_of_swapped_rows_includes_partners_outside_the_sample(share: float, tmp_path: Path) -> None:
    """Half of the rows are sampled, so the partner of most swapped rows is not in the sample."""
    whole = planted.swapped(healthy(), share)
    dump = whole.rows(np.sort(np.random.default_rng(4).permutation(len(whole))[: len(whole) // 2]))
    first = found(dump, tmp_path)[0]
    fact = reported(first, "sequences")
    low, high = fact.interval or (1, 0)
    assert first.cause == "swapped_rows"
    assert low <= share <= high < low + 0.3


def test_rounding_to_one_decimal_is_not_truncation(tmp_path: Path) -> None:
    causes = [row.cause for row in found(planted.rounded(healthy(), "rollout", "1"), tmp_path)]
    assert causes[0] == "low_precision_logging" and "truncated_sampling" not in causes
