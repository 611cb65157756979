"""Faults from public bug reports, planted in dumps of random models: the cause, the advice and the numbers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mismatchctl.api.diagnose import diagnose
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.results.model import Finding
from tests.factories import sampled as faults
from tests.factories.sampled import CORRUPTIONS, SHARES, Dump, Fault, Model, Setup, sampler

MODELS = {"unsure": Model.of(901, 64, 2.0), "usual": Model.of(902, 256, 5.0), "sure": Model.of(903, 400, 12.0)}
CALM = {"numerical_noise", "identical", "moe_routing", "batch_dependent_kernels", "log_densities"}
RANK = {"low": 1, "medium": 2, "high": 3}


def found(dump: Dump, folder: Path) -> list[Finding]:
    (findings,) = diagnose([str(dump.write(folder / "dump.parquet"))]).runs.values()
    return findings


def of_side(fault: Callable[..., Dump], **own: object) -> Fault:
    return lambda model, seed, severity: fault(model, seed, severity, **own)


FAULTS: list[tuple[str, Fault, tuple[float, ...]]] = [
    ("other_token_recorded", faults.other_token, (0.02, 0.3, 1.0)),
    ("other_token_recorded", faults.other_token_in_rows, (0.2,)),
    ("engine_state", faults.engine_state, (0.2, 0.6, 1.0)),
    ("engine_state", of_side(faults.engine_state, side="trainer"), (0.2, 0.6, 1.0)),
    ("engine_state", faults.end_of_length, (0.5,)),
    ("stale_policy", faults.partial_rollout, (0.3, 0.7)),
    ("context_mismatch", faults.context_from_turn, (0.1, 1.0)),
    ("packed_columns", faults.packed_columns, (0.2, 1.0)),
    ("packed_columns", of_side(faults.packed_columns, side="train"), (1.0,)),
    ("log_densities", faults.log_densities, (1.0,)),
    ("log_densities", of_side(faults.log_densities, sigma=0.3, dims=3), (1.0,)),
    ("length_mismatch", faults.length_mismatch, (0.1, 1.0)),
    ("length_mismatch", of_side(faults.length_mismatch, kind="first"), (0.5,)),
    ("unmasked_padding", faults.unmasked_padding, (0.2, 1.0)),
    ("unmasked_padding", of_side(faults.unmasked_padding, value=-1.0), (1.0,)),
    ("unmasked_padding", of_side(faults.unmasked_padding, value=-9999.0), (1.0,)),
    ("wrong_sign", faults.both_negated, (1.0,)),
    ("probabilities_not_logs", faults.both_probabilities, (1.0,)),
    ("constant_column", faults.constant_column, (1.0,)),
    ("constant_column", of_side(faults.constant_column, value=-1.5, side="train"), (1.0,)),
    ("weights_never_updated", faults.never_updated, (0.5,)),
    ("raw_logprobs", faults.entropy_of_another_temperature, (0.4,)),
    ("batch_dependent_kernels", faults.batch_dependent, (0.3,)),
    ("misaligned", faults.prefixes_removed, (0.2, 0.5)),
    ("identical", faults.nearly_bitwise, (1.0,)),
    ("edited_response", faults.edited_span, (0.3,)),
    ("edited_response", of_side(faults.edited, shifted=False, place=19), (0.4, 1.0)),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("cause", "fault", "severity"),
    [(cause, fault, severity) for cause, fault, severities in FAULTS for severity in severities],
)
def test_reported_faults_are_the_first_finding(
    cause: str, fault: Fault, severity: float, model: str, tmp_path: Path
) -> None:
    findings = found(fault(MODELS[model], 31, severity), tmp_path)
    assert findings[0].cause == cause
    assert findings[0].confidence in ("high", "medium")


@pytest.mark.parametrize("model", MODELS)
def test_healthy_dumps_are_noise(model: str, tmp_path: Path) -> None:
    findings = found(faults.clean(MODELS[model], 32), tmp_path)
    assert findings[0].cause == "numerical_noise" and findings[0].confidence == "high"
    assert not [one.cause for one in findings[1:] if one.confidence != "low"]


def severity_of(findings: list[Finding]) -> int:
    """Return 0 if nothing is reported as broken, up to 3."""
    causes = [RANK[one.confidence] for one in findings if one.cause not in CALM]
    if findings and findings[0].cause in CALM:
        return 0 if findings[0].confidence == "high" else min(max(causes, default=1), 1)
    return max(causes, default=1)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_never_falls_with_the_share_of_wrong_tokens(name: str, tmp_path: Path) -> None:
    fault, levels = CORRUPTIONS[name], []
    for share in SHARES:
        levels.append(severity_of(found(fault(MODELS["usual"], 33, share), tmp_path)))
    assert levels == sorted(levels)
    assert levels[-1] >= 2


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("top_p", [0.8, 0.9, 0.95])
def test_top_p_is_estimated_on_flat_distributions(top_p: float, model: str, tmp_path: Path) -> None:
    dump = faults.sampled(MODELS[model], 34, Setup(rows=160, longest=110, process=sampler(top_p=top_p)))
    finding = next(one for one in found(dump, tmp_path) if one.cause == "truncated_sampling")
    fact = next(fact for fact in finding.evidence if fact.name == "top_p")
    assert isinstance(fact.value, float) and abs(fact.value - top_p) < 0.03
    assert fact.interval is not None and fact.interval[0] <= top_p <= fact.interval[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "process", [sampler(top_k=5), sampler(top_k=20), sampler(top_p=0.8, top_k=20), sampler(0.7, 0.8, 20, 0.0, 1.05)]
)
def test_truncation_is_not_a_log_base(process: faults.Process, model: str, tmp_path: Path) -> None:
    dump = faults.sampled(MODELS[model], 35, Setup(rows=160, longest=110, process=process))
    assert "wrong_log_base" not in {one.cause for one in found(dump, tmp_path)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("penalty", [1.1, 1.3])
def test_repetition_penalty_is_not_a_position_mismatch(penalty: float, model: str, tmp_path: Path) -> None:
    dump = faults.sampled(MODELS[model], 36, Setup(rows=160, longest=110, process=sampler(repetition=penalty)))
    assert found(dump, tmp_path)[0].cause == "logit_penalty"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.3])
def test_temperature_is_found_for_mixed_certainty(temperature: float, model: str, tmp_path: Path) -> None:
    dump = faults.sampled(MODELS[model], 37, Setup(rows=160, longest=110, process=sampler(temperature)))
    finding = found(dump, tmp_path)[0]
    fact = next(fact for fact in finding.evidence if fact.name == "temperature")
    assert finding.cause == "temperature" and isinstance(fact.value, float)
    assert abs(fact.value / temperature - 1) < 0.05


@pytest.mark.parametrize("model", [Model.of(904, 64, 2.0), Model.of(905, 512, 9.0)], ids=["unsure", "sure"])
def test_truncation_below_the_noise_is_found(model: Model, tmp_path: Path) -> None:
    dump = faults.sampled(model, 43, Setup(rows=192, longest=110, process=sampler(top_k=50), noise=(0.01, 0.0)))
    finding = found(dump, tmp_path)[0]
    fact = next(fact for fact in finding.evidence if fact.name == "top_k")
    assert finding.cause == "truncated_sampling" and fact.interval is not None
    assert fact.interval[0] <= 50 <= fact.interval[1]


def test_noise_of_flat_contexts_is_not_a_temperature(tmp_path: Path) -> None:
    """Few tokens have a probability above 0.5, so almost any exponent fits."""
    dump = faults.sampled(Model.of(906, 1024, 0.4), 44, Setup(noise=(0.0, 0.18)))
    assert "temperature" not in {one.cause for one in found(dump, tmp_path)}


def test_two_packed_rows_are_found(tmp_path: Path) -> None:
    dump = faults.packed_columns(MODELS["usual"], 45, 1.0)
    clean = faults.packed_columns(MODELS["usual"], 45, 0.0)
    rows = clean.tokens["rollout_log_probs"]
    two = dump.each("rollout_log_probs", lambda row, i: row if i in (5, 60) else rows[i])
    finding = found(two, tmp_path)[0]
    assert (finding.cause, finding.confidence) == ("packed_columns", "medium")
    assert sorted(example.row for example in finding.examples[:2]) == [5, 60]


def test_context_changes_after_an_edit_belong_to_the_edit(tmp_path: Path) -> None:
    findings = found(faults.edited_span(MODELS["usual"], 46, 0.3), tmp_path)
    assert "context_mismatch" not in {one.cause for one in findings}


def test_repeated_text_at_the_end_is_not_padding(tmp_path: Path) -> None:
    """From some position on, each side repeats a token with its own constant log-prob."""
    dump = faults.sampled(MODELS["usual"], 47)
    for side, value in (("rollout", -4.94936), ("train", -6.123456)):
        dump = dump.each(
            f"{side}_log_probs", lambda row, i, v=value: np.append(row[:-12], [v] * 12) if i % 5 == 0 else row
        )
    assert "padding_or_sentinel" not in {one.cause for one in found(dump, tmp_path)}


def test_repeated_text_with_a_few_wrong_tokens_was_sampled(tmp_path: Path) -> None:
    """Each side repeats its own constant log-prob, and one token in twelve is far off."""
    dump, far = faults.sampled(MODELS["usual"], 48), np.where(np.arange(12) == 5, -9.0, 0.0)
    for side, value, off in (("rollout", -0.123456, 0 * far), ("train", -0.131313, far)):
        dump = dump.each(
            f"{side}_log_probs",
            lambda row, i, v=value, o=off: np.concatenate([row[:6], v + o, row[18:]]) if i % 4 == 0 else row,
        )
    assert "unsampled_tokens" not in {one.cause for one in found(dump, tmp_path)}


def test_a_scattered_sentinel_does_not_hide_the_other_fault(tmp_path: Path) -> None:
    setup = Setup(process=sampler(top_p=0.9))
    dump, rng = faults.sampled(MODELS["usual"], 49, setup), np.random.default_rng(49)
    dump = dump.each("rollout_log_probs", lambda row, i: np.where(rng.random(len(row)) < 0.01, -30.0, row))
    causes = {one.cause: one.confidence for one in found(dump, tmp_path)}
    assert causes == {"padding_or_sentinel": "high", "truncated_sampling": "high"}


def test_several_sampling_settings_are_one_finding(tmp_path: Path) -> None:
    dump = faults.sampled(MODELS["unsure"], 38, Setup(rows=192, longest=110, process=sampler(0.6, 0.95)))
    findings = found(dump, tmp_path)
    assert [one.cause for one in findings if one.confidence != "low"] == ["truncated_sampling", "sampling_settings"]
    values = {fact.name: fact.value for fact in findings[1].evidence}
    assert values["temperature"] == pytest.approx(0.6, abs=0.01) and values["top_p"] == pytest.approx(0.95, abs=0.03)


def test_edited_responses_are_not_an_engine_state(tmp_path: Path) -> None:
    for shifted in (True, False):
        findings = found(faults.edited(MODELS["usual"], 39, 0.3, shifted), tmp_path)
        assert findings[0].cause in ("edited_response", "retokenized")
        assert "engine_state" not in {one.cause for one in findings}


def test_nearly_bitwise_runs_locate_the_different_tokens(tmp_path: Path) -> None:
    dump = faults.nearly_bitwise(MODELS["usual"], 40, 1.0, count=7)
    finding = found(dump, tmp_path)[0]
    assert "100" not in finding.summary.replace("100 tokens", "") or "7 tokens differ" in finding.summary
    assert next(fact.value for fact in finding.evidence if fact.name == "differing_tokens") == 7
    place = finding.examples[0]
    assert place.position is not None
    row = [dump.tokens[f"{side}_log_probs"][place.row][place.position] for side in ("rollout", "train")]
    assert row[0] != row[1]


def test_the_pattern_of_lengths_is_reported(tmp_path: Path) -> None:
    finding = found(faults.length_mismatch(MODELS["usual"], 41, 0.5), tmp_path)[0]
    assert "rollout_log_probs has" in finding.summary and "agree from the start" in finding.summary
    finding = found(faults.length_mismatch(MODELS["usual"], 41, 0.5, "first"), tmp_path)[0]
    assert "always 1 element longer" in finding.summary and "extra elements are at the start" in finding.summary


def test_prompts_that_explain_rows_are_named(tmp_path: Path) -> None:
    dump = CORRUPTIONS["rows: noise of 0.6 in the logits"](MODELS["usual"], 42, 1.0)
    healthy = faults.sampled(MODELS["usual"], 42)
    group = [int(name.split("-")[1]) % 2 for name in dump.columns["prompt_id"]]
    rows = healthy.tokens["rollout_log_probs"]
    mixed = dump.each("rollout_log_probs", lambda row, i: row if group[i] else rows[i])
    finding = found(mixed, tmp_path)[0]
    assert finding.cause == "context_mismatch" and "depends on the prompt" in finding.summary


def test_each_cause_has_one_title_and_one_advice() -> None:
    texts = {(cause.id, cause.title, cause.advice) for cause in CAUSES}
    assert len(texts) == len({cause.id for cause in CAUSES})


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_scattered_zeros_are_no_truncation(share: float, tmp_path: Path) -> None:
    findings = found(CORRUPTIONS["tokens: 0"](MODELS["usual"], 43, share), tmp_path)
    assert {one.cause for one in findings if one.confidence != "low"} == {"unsampled_tokens", "padding_or_sentinel"}
