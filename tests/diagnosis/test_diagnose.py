"""`diagnose` finds causes planted in real dumps, raises no false alarm, and does not depend on the split of files."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.diagnose import diagnose
from mismatchctl.diagnosis.causes.registry import CAUSES
from mismatchctl.results.model import Finding
from tests.cli.command import run
from tests.diagnosis.findings import alarms, found
from tests.factories import planted_causes as planted
from tests.factories.planted_causes import Planted, healthy

KINDS = ("dense", "moe")
LOG2 = 1 / math.log(2)
Plant = Callable[[Planted], Planted]


def case(cause: str, name: str, plant: Plant) -> Any:
    return pytest.param(cause, plant, id=f"{cause}-{name}")


ALONE = [
    case("identical", "copy", planted.identical),
    *(case("temperature", str(t), lambda d, t=t: planted.temperature(d, t)) for t in (0.7, 0.8, 0.9, 1.1, 1.3)),
    *(case("raw_logprobs", str(t), lambda d, t=t: planted.raw_logprobs(d, t)) for t in (0.7, 0.8, 1.3)),
    *(case("truncated_sampling", f"p{p}", lambda d, p=p: planted.top_p(d, p)) for p in (0.9, 0.95, 0.98)),
    *(case("truncated_sampling", f"k{k}", lambda d, k=k: planted.top_k(d, k)) for k in (4, 8)),
    *(case("misaligned", f"{by:+d}", lambda d, by=by: planted.shifted(d, by)) for by in (-3, -1, 1, 2, 5)),
    case("misaligned", "some rows", lambda d: planted.shifted(d, 1, 0.2)),
    *(case("unsampled_tokens", str(n), lambda d, n=n: planted.unsampled_tokens(d, n)) for n in (5, 20, 60)),
    case("unsampled_tokens", "few rows", lambda d: planted.unsampled_tokens(d, 12, 0.05)),
    *(case("edited_response", str(share), lambda d, s=share: planted.edited(d, s)) for share in (0.1, 0.3)),
    *(case("context_mismatch", str(s), lambda d, s=s: planted.context_mismatch(d, s)) for s in (0.2, 0.5)),
    *(case("stale_policy", str(lag), lambda d, lag=lag: planted.stale_policy(d, lag)) for lag in (1, 2, 3, 5)),
    *(case("stale_worker", str(lag), lambda d, lag=lag: planted.stale_worker(d, lag)) for lag in (1, 2, 3)),
    *(
        case("low_precision_logging", f"{side}-{kind}", lambda d, side=side, kind=kind: planted.rounded(d, side, kind))
        for side in ("rollout", "train")
        for kind in ("bfloat16", "float16", "3")
    ),
    *(
        case("padding_or_sentinel", f"{side} {value}", lambda d, s=side, v=value: planted.placeholder(d, s, v, 0.01))
        for side in ("rollout", "train")
        for value in (math.nan, -9999.0, 1.0, -math.inf)
        if (side, value) != ("train", -math.inf)  # probability 0
    ),
    case("padding_or_sentinel", "no end", planted.no_end),
    *(case("duplicated_rows", str(share), lambda d, s=share: planted.duplicated(d, s)) for share in (0.05, 0.5)),
    case("mask_wrong", "inverted", lambda d: planted.mask_inverted(d, 20)),
    case("mask_wrong", "prompt", lambda d: planted.mask_covers_prompt(d, 20)),
    case("mask_wrong", "scored prompt", lambda d: planted.mask_covers_scored_prompt(d, 20)),
    *(
        case("wrong_log_base", f"{side}-{name}", lambda d, s=side, f=factor: planted.other_logarithm(d, s, f))
        for side in ("rollout", "train")
        for name, factor in (("log2", 1 / math.log(2)), ("log10", 1 / math.log(10)), ("sign", -1.0))
    ),
    *(
        case("wrong_log_base", f"{side}-over-{t}", lambda d, s=side, t=t: planted.other_logarithm(d, s, 1 / t))
        for side in ("rollout", "train")
        for t in (0.7, 0.9, 1.2)
    ),
    *(case("probabilities_not_logs", s, lambda d, s=s: planted.probabilities(d, s)) for s in ("rollout", "train")),
    *(case("growing_mismatch", str(lag), lambda d, lag=lag: planted.growing(d, lag, 5)) for lag in (1, 3)),
    *(case("cache_quantization", str(s), lambda d, s=s: planted.cache_quantization(d, s)) for s in (0.03, 0.08)),
    *(case("quantized_rollout", str(s), lambda d, s=s: planted.quantized_rollout(d, s)) for s in (0.02, 0.1)),
    case("moe_routing", "experts", lambda d: planted.routing(d, 0.03)),
    case("reversed_rows", "all", planted.reversed_rows),
    *(case("cumulative", side, lambda d, s=side: planted.cumulative(d, s)) for side in ("rollout", "train")),
    case("sequence_means", "all", planted.sequence_means),
    case("clamped", "-3", lambda d: planted.clamped(d, -3.0)),
    *(case("swapped_rows", str(share), lambda d, s=share: planted.swapped(d, s)) for share in (0.1, 1.0)),
    case("logit_penalty", "0.3", lambda d: planted.penalized(d, 0.3)),
    case("logit_bias", "1", lambda d: planted.biased(d, 1.0)),
    case("stale_step", "5", lambda d: planted.one_step_off(d, 5, 4)),
    case("position_mismatch", "0.3", lambda d: planted.farther(d, 0.3)),
    case("unexplained", "ends", lambda d: planted.wrong_ends(d, 0.03)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cause", "plant"), ALONE)
def test_a_planted_cause_is_the_first_finding(cause: str, plant: Plant, kind: str, tmp_path: Path) -> None:
    first = found(plant(healthy(kind)), tmp_path)[0]
    if cause == "growing_mismatch" and first.cause == "stale_policy":  # the growth is evidence of its cause
        assert "onset" in {fact.name for fact in first.evidence}
        cause = first.cause
    assert (first.cause, first.confidence in ("high", "medium")) == (cause, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_raises_no_alarm(kind: str, tmp_path: Path) -> None:
    findings = found(healthy(kind), tmp_path)
    assert alarms(findings) == ["numerical_noise"]
    assert {finding.cause for finding in findings} <= {"numerical_noise", "moe_routing", "quantized_rollout"}


def mix(one: str, other: str, plant: Plant) -> Any:
    return pytest.param({one, other}, plant, id=f"{one}-{other}")


MIXED = [
    mix("temperature", "stale_worker", lambda d: planted.stale_worker(planted.temperature(d, 0.9), 5)),
    mix("temperature", "low_precision_logging", lambda d: planted.rounded(planted.temperature(d, 0.8), "train", "4")),
    mix("misaligned", "temperature", lambda d: planted.shifted(planted.temperature(d, 0.8), 1)),
    mix("unsampled_tokens", "truncated_sampling", lambda d: planted.unsampled_tokens(planted.top_p(d, 0.9), 20)),
    mix("unsampled_tokens", "stale_policy", lambda d: planted.unsampled_tokens(planted.stale_policy(d, 3), 20)),
    mix("context_mismatch", "unsampled_tokens", lambda d: planted.unsampled_tokens(planted.context_mismatch(d, 1), 20)),
    mix("wrong_log_base", "stale_worker", lambda d: planted.other_logarithm(planted.stale_worker(d, 3), "train", LOG2)),
    mix("edited_response", "stale_worker", lambda d: planted.edited(planted.stale_worker(d, 3), 0.2)),
    mix("duplicated_rows", "padding_or_sentinel", lambda d: planted.duplicated(planted.no_end(d), 0.3)),
    mix("misaligned", "probabilities_not_logs", lambda d: planted.probabilities(planted.shifted(d, 2), "rollout")),
    mix("misaligned", "wrong_log_base", lambda d: planted.other_logarithm(planted.shifted(d, 1), "train", -1.0)),
    mix("edited_response", "truncated_sampling", lambda d: planted.edited(planted.top_k(d, 8), 0.2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causes", "plant"), MIXED)
def test_two_causes_at_once_are_both_reported(causes: set[str], plant: Plant, kind: str, tmp_path: Path) -> None:
    assert causes <= set(alarms(found(plant(healthy(kind)), tmp_path)))


@pytest.mark.parametrize("by", [1 / 0.7, 1 / math.log(2)])
def test_temperature_on_log_probs_differs_from_a_log_base(by: float, tmp_path: Path) -> None:
    first = found(planted.other_logarithm(healthy(), "rollout", by), tmp_path)[0]
    assert ("temperature: of 0.7" in first.summary, "base 2" in first.summary) == (by < 1.435, by > 1.435)


def test_float32_log_softmax_is_not_low_precision(tmp_path: Path) -> None:
    """Logits near 30 leave log-probs on a lattice of 2^-19, where near-certain tokens have few bits."""
    dump = healthy()
    for side in ("rollout_log_probs", "train_log_probs"):
        certain = dump.tokens[side] > -0.25
        values = np.where(certain, dump.tokens[side] / 100, dump.tokens[side])
        dump.tokens[side] = (np.round(values * 2.0**19) / 2.0**19).astype(np.float32)
    assert "low_precision_logging" not in {finding.cause for finding in found(dump, tmp_path)}


def test_a_constant_is_not_low_precision(tmp_path: Path) -> None:
    dump = healthy()
    dump.tokens["rollout_log_probs"] = np.where(dump.place % 8 < 4, np.float32(-1), dump.tokens["rollout_log_probs"])
    assert "low_precision_logging" not in {finding.cause for finding in found(dump, tmp_path)}


def test_few_tokens_give_low_confidence(tmp_path: Path) -> None:
    (noise,) = found(healthy().rows(np.array([0])), tmp_path)
    assert (noise.cause, noise.confidence) == ("numerical_noise", "low")
    assert "too few to exclude other causes" in noise.summary


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 0.8, 0.9, 1.1, 1.3])
def test_the_temperature_is_estimated(temperature: float, kind: str, tmp_path: Path) -> None:
    first = found(planted.temperature(healthy(kind), temperature), tmp_path)[0]
    fact = next(fact for fact in first.evidence if fact.name == "temperature")
    assert fact.interval is not None and isinstance(fact.value, float)
    assert fact.interval[0] - 0.02 <= temperature <= fact.interval[1] + 0.02
    assert abs(fact.value - temperature) < 0.05


@pytest.mark.parametrize("mass", [0.9, 0.95, 0.98])
def test_top_p_is_estimated(mass: float, tmp_path: Path) -> None:
    first = found(planted.top_p(healthy(), mass), tmp_path)[0]
    kept = next(fact.value for fact in first.evidence if fact.name == "top_p")
    assert isinstance(kept, float) and abs(kept - mass) < 0.01


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.03])
def test_train_log_probs_of_minus_infinity_are_probability_zero(share: float, tmp_path: Path) -> None:
    """The trainer masks some sampled tokens. Such tokens are counted, and are not placeholders."""
    dump = planted.placeholder(healthy(), "train", -math.inf, share)
    number = int(np.isneginf(dump.tokens["train_log_probs"]).sum())
    findings = found(dump, tmp_path)
    assert alarms(findings) == ["other_vocabulary"] and findings[0].confidence == "medium"
    facts = {fact.name: fact.value for fact in findings[0].evidence}
    assert facts["tokens"] == number and findings[0].share_k3 is None
    assert findings[0].examples[0].position is not None


def test_padding_with_minus_infinity_is_a_placeholder(tmp_path: Path) -> None:
    dump = healthy()
    ends = np.cumsum(dump.lengths)
    for end in ends[::3]:
        dump.tokens["train_log_probs"][end - 6 : end] = -math.inf
    first = found(dump, tmp_path)[0]
    assert (first.cause, first.confidence) == ("padding_or_sentinel", "high")


@pytest.mark.parametrize("by", [-4, -1, 1, 3])
def test_the_shift_is_reported(by: int, tmp_path: Path) -> None:
    first = found(planted.shifted(healthy(), by), tmp_path)[0]
    assert next(fact.value for fact in first.evidence if fact.name == "shift") == by


@pytest.mark.parametrize("onset", [3, 5, 7])
def test_the_onset_is_within_its_interval(onset: int, tmp_path: Path) -> None:
    findings = found(planted.growing(healthy(), 2, onset), tmp_path)
    (fact,) = (fact for finding in findings for fact in finding.evidence if fact.name == "onset")
    assert fact.interval is not None and fact.interval[0] <= onset <= fact.interval[1]


def test_growth_by_stale_weights_is_one_finding(tmp_path: Path) -> None:
    """The dump has no versions. The weights differ along the direction of learning, by a growing amount."""
    findings = [one for one in found(planted.growing(healthy(), 2, 5), tmp_path) if one.confidence != "low"]
    assert [one.cause for one in findings] == ["stale_policy"]
    assert {"along_learning", "onset", "factor"} <= {fact.name for fact in findings[0].evidence}
    assert findings[0].share_k3 == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_a_run_with_a_stopped_weight_sync_is_stale_and_grows() -> None:
    """In sample_data/dense the engine stays at version 8 from step 9 on."""
    (findings,) = diagnose([str(planted.SAMPLES / "dense")]).runs.values()
    assert alarms(findings) == ["stale_policy"]  # one finding: the growth is evidence for its cause
    assert (findings[0].share_k3, findings[0].where["steps"]) == (1.0, "9 to 15")
    onset = next(fact for fact in findings[0].evidence if fact.name == "onset")
    assert onset.interval is not None and onset.interval[0] <= 9 <= onset.interval[1]


def test_the_deviating_value_of_a_column_is_named(tmp_path: Path) -> None:
    dump = planted.stale_worker(healthy(), 3, worker=1)
    dump.columns["source"] = np.array([f"data-{worker}" for worker in dump.columns.pop("worker")])
    path = str(dump.write(tmp_path / "dump.parquet"))
    (findings,) = diagnose([path], by=["source"]).runs.values()
    assert (findings[0].cause, findings[0].where["source"]) == ("stale_worker", "data-1")


def test_findings_do_not_depend_on_split_or_threads(tmp_path: Path) -> None:
    dump = planted.unsampled_tokens(planted.stale_worker(healthy(), 3), 10)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    dump.write(whole / "a.parquet")
    for number, rows in enumerate(np.array_split(np.arange(len(dump)), 5)):
        dump.rows(rows).write(parts / f"{number}.parquet")
    (one,), (many,) = diagnose([str(whole)], threads=1).runs.values(), diagnose([str(parts)], threads=3).runs.values()

    def gist(findings: list[Finding]) -> list[Any]:
        return [(f.cause, f.confidence, f.summary, [(e.name, e.value) for e in f.evidence]) for f in findings]

    assert gist(one) == gist(many)


def test_large_dumps_are_diagnosed_from_a_sample(tmp_path: Path) -> None:
    """Causes are tested on a sample, and counts use all tokens."""
    dump = planted.stale_worker(healthy(), 3)
    many = dump.rows(np.tile(np.arange(len(dump)), 12))
    jitter = many.random.normal(0, 1e-5, len(many.row))
    many.tokens["rollout_log_probs"] = (many.tokens["rollout_log_probs"] - np.abs(jitter)).astype(np.float32)
    many.columns["sequence_id"] = np.arange(len(many))
    many = planted.placeholder(many, "train", math.nan, 0.01)
    missing = int(np.isnan(many.tokens["train_log_probs"]).sum())
    findings = {finding.cause: finding for finding in found(many, tmp_path)}
    assert {"stale_worker", "padding_or_sentinel"} <= set(findings)
    assert f"{missing:,} valid tokens" in findings["padding_or_sentinel"].summary


def test_json_lists_the_strongest_finding_first(tmp_path: Path) -> None:
    path = planted.unsampled_tokens(planted.top_p(healthy(), 0.9), 20).write(tmp_path / "dump.parquet")
    data = json.loads(run("diagnose", path, "--json").stdout)
    assert list(data) == ["format", "tool", "version", "findings"]
    assert {"cause", "confidence", "evidence"} <= set(data["findings"][0])
    assert "run" not in data["findings"][0]
    ranks = [("high", "medium", "low").index(finding["confidence"]) for finding in data["findings"]]
    assert ranks == sorted(ranks)


def test_findings_of_several_runs_name_their_run() -> None:
    data = json.loads(run("diagnose", planted.SAMPLES / "dense", planted.SAMPLES / "moe", "--json").stdout)
    assert {finding["run"] for finding in data["findings"]} == {"dense", "moe"}


@pytest.mark.parametrize("columns", ["80", "140"])
def test_the_terminal_shows_every_part_of_a_finding(columns: str, tmp_path: Path) -> None:
    path = planted.temperature(healthy(), 0.8).write(tmp_path / "dump.parquet")
    printed = run("diagnose", path, "--verbose", COLUMNS=columns).stdout
    lines = [line for line in printed.splitlines() if not line.startswith("Next:")]  # a command stays in one line
    assert max(map(len, lines)) <= int(columns)
    for part in ("temperature", "high  1. ", "found", "for", "where", "see", "do", "note"):
        assert part in printed


def test_analyze_stores_and_shows_findings(tmp_path: Path) -> None:
    path = planted.stale_worker(healthy(), 3).write(tmp_path / "dump.parquet")
    result = run("analyze", path, "-c", "none", "-o", tmp_path / "r.json", "--html", tmp_path / "r.html")
    assert "One deviating worker" in result.stdout.splitlines()[0]
    assert "One deviating worker" in (tmp_path / "r.html").read_text()
    findings = json.loads((tmp_path / "r.json").read_text())["runs"]["dump"]["findings"]
    (alone,) = diagnose([str(path)]).runs.values()
    assert findings[0]["cause"] == alone[0].cause == "stale_worker"


def test_invalid_values_are_findings(tmp_path: Path) -> None:
    path = planted.placeholder(healthy(), "train", math.nan, 0.01).write(tmp_path / "dump.parquet")
    run("analyze", path, code=4)
    run("diagnose", path, code=0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 4, "nowhere"),
        ([planted.SAMPLES / "dense", "--by", "colour"], 2, "colour"),
        ([planted.SAMPLES / "dense", "--column", "train_log_probs=nothing"], 4, "nothing"),
    ],
)
def test_impossible_requests_give_one_sentence(arguments: list[Any], code: int, words: str) -> None:
    result = run("diagnose", *arguments)
    assert (result.exit_code, words in result.stderr) == (code, True)


def test_null_rows_are_counted(tmp_path: Path) -> None:
    table = pa.table(
        {
            "rollout_log_probs": [[-1.0, -2.0], [-1.0], None],
            "train_log_probs": [[-1.1, -2.1], [-1.0, -3.0], [-1.0]],
        }
    )
    pq.write_table(table, tmp_path / "dump.parquet")
    result = run("diagnose", tmp_path, code=0)
    assert "1 sequence, train_log_probs: length differs" in result.stdout
    assert "1 sequence, rollout_log_probs: null list" in result.stdout


def test_fully_masked_dumps_cannot_be_judged(tmp_path: Path) -> None:
    rows = {"rollout_log_probs": [[-1.0, -2.0]], "train_log_probs": [[-1.5, -2.0]], "response_mask": [[0, 0]]}
    pq.write_table(pa.table(rows), tmp_path / "dump.parquet")
    result = run("diagnose", tmp_path)
    assert result.exit_code == 4 and "no valid token found; check that response_mask" in result.stderr


def test_the_worker_is_also_tested_with_other_columns(tmp_path: Path) -> None:
    dump = planted.stale_worker(healthy(), 3)
    dump.columns["source"] = np.arange(len(dump)) % 3
    assert found(dump, tmp_path, by=["source"])[0].where["worker"] == "2"
    (shows,) = (cause.shows for cause in CAUSES if cause.id == "stale_worker")
    assert "another column" in shows


def test_a_lag_of_one_version_is_singular(tmp_path: Path) -> None:
    first = found(planted.stale_policy(healthy(), 1), tmp_path)[0]
    assert "were 1 version older" in first.summary


def test_the_usual_k3_has_a_range_for_each_kind_of_model(tmp_path: Path) -> None:
    (fact,) = (fact for fact in found(healthy(), tmp_path)[0].evidence if fact.name == "k3")
    assert fact.meaning == "K3: 1e-05 to 0.001 for dense models, 0.001 to 0.1 for mixtures of experts"


@pytest.mark.parametrize(("freed", "way"), [(0.6, "higher"), (-0.02, "lower")])
def test_penalties_say_how_new_tokens_differ(freed: float, way: str, tmp_path: Path) -> None:
    dump = planted.penalized(planted.cut(healthy(), 12), 0.3, freed=freed)
    (penalty,) = (finding for finding in found(dump, tmp_path) if finding.cause == "logit_penalty")
    offset = {fact.name: fact.value for fact in penalty.evidence}
    assert (offset["repeated"] * offset["fresh"] < 0) == (way == "higher")
    assert re.search(rf"are \S+ lower, and all other tokens are \S+ {way}\. ", penalty.summary)
