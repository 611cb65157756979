"""Advice on policies whose true gradient is known, on dumps with a bug, and on dumps that allow no ranking."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatchctl.api.advise.advice import RunAdvice
from mismatchctl.api.advise.advise import advice_notes, rank_corrections
from mismatchctl.api.advise.candidates import (
    GradientReference,
    Limits,
    PromptSample,
    RunSample,
    Surrogate,
    apply_to_sample,
    choose_correction,
    choose_reference,
    default_candidates,
    evaluate_candidate,
    framework_candidates,
    read_samples,
)
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study
from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.corrections.labels import correction_label
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.frameworks.registry import find_preset, load_framework, load_presets
from mismatchctl.io.yaml import dump_yaml
from mismatchctl.report.pages.advise import advice_figure
from mismatchctl.results.model import Finding
from tests.cli import command
from tests.paths import FIXTURES, SAMPLE_DATA

TRUTH = FIXTURES / "advice_truth"
CASES = sorted(path.name for path in TRUTH.iterdir() if path.is_dir())


def run(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = command.run("advise", *arguments, "--json", "-q", code=code)
    return json.loads(result.stdout) if code == 0 else {}


def truth(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TRUTH / case / "truth.json").read_text())["corrections"]
    return found


def true_errors(case: str) -> dict[str, float]:
    """Compute the best-scaled error at 512 sequences of corrections that keep half of the loss."""
    (sample,) = read_samples([str(TRUTH / case)]).values()
    scales = {
        name: evaluate_candidate(parse_correction({"name": name, **own["correction"]}), sample)[0].loss_scale
        for name, own in truth(case).items()
    }
    return {name: own["scaled_error_512"] for name, own in truth(case).items() if scales[name] >= 0.5}


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("candidates") / "all.yaml"
    own = truth(CASES[0])
    path.write_text(yaml.safe_dump([{"name": name, **found["correction"]} for name, found in own.items()]))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_advised_correction_is_nearly_the_best(case: str, candidates: str) -> None:
    """The error of the advised correction is compared with the error of the best of 25."""
    found = run(str(TRUTH / case), "-c", candidates)
    errors = true_errors(case)
    first = found["advice"][0]
    assert errors[first["name"]] <= 1.15 * min(errors.values())
    assert first["loss_scale"] >= 0.5
    assert len(found["advice"]) <= 5
    assert first["rejected_tokens"] == pytest.approx(truth(case)[first["name"]]["rejected_tokens"], abs=0.02)
    assert found["batch"] == 512


@pytest.mark.slow
def test_estimated_errors_rank_like_true_errors(candidates: str) -> None:
    """The rank correlation is Spearman's rho, for mismatches in which corrections differ."""
    names = truth("int4")
    front = run(str(TRUTH / "int4"), "-c", candidates)["front"]
    shared = [name for name in front if name in names]
    estimated = np.argsort(np.argsort([front[name][0] + front[name][1] for name in shared]))
    true = np.argsort(np.argsort([names[name]["scaled_error_512"] for name in shared]))
    assert np.corrcoef(estimated, true)[0, 1] > 0.5


@pytest.mark.slow
def test_rejecting_nearly_everything_is_not_advised(candidates: str) -> None:
    """At 64 sequences, rejecting nearly all tokens of top_p_95 has the smallest error."""
    found = run(str(TRUTH / "top_p_95"), "-c", candidates, "--batch", "64")
    assert all(own["rejected_tokens"] <= 0.9 for own in found["advice"])
    assert any(note.startswith("excluded: ") for note in found["notes"])


@pytest.mark.slow
def test_your_correction_is_compared_with_the_advice(tmp_path: Path) -> None:
    dump, config = str(TRUTH / "stale_8"), tmp_path / "verl.yaml"
    config.write_text(
        "rollout_is: token\nrollout_is_threshold: 2.0\nrollout_rs: geometric\nrollout_rs_threshold: 1.001"
    )
    found = run(dump, "--for", "verl", "--config", str(config), "--html", str(tmp_path / "page.html"))
    (yours,) = found["yours"]
    assert "<figure" in (tmp_path / "page.html").read_text()
    figure = advice_figure(
        RunAdvice.model_validate({k: v for k, v in found.items() if k in RunAdvice.model_fields}), "front"
    )
    assert figure is not None and sum(len(marks.x) for marks in figure.marks) == len(found["front"])
    named = {marks.name: marks.labels for marks in figure.marks}
    assert named["yours"] == ["yours: verl"] and found["advice"][0]["name"] in named["advised"]
    assert found["advice"][0]["name"] in figure.title
    assert yours["rejected_tokens"] > 0.9 and yours["mse"] > 5 * found["advice"][0]["mse"]
    assert "yours: verl" not in [own["name"] for own in found["advice"]]
    assert found["front"]["yours: verl"][2] == yours["rejected_tokens"]
    for own in (*found["advice"], yours):
        assert own["mse"] == pytest.approx(max(own["bias2"], 0.0) + own["variance"])


@pytest.mark.slow
def test_your_correction_is_not_repeated_if_it_is_advised(tmp_path: Path) -> None:
    dump, config = str(TRUTH / "stale_8"), tmp_path / "verl.yaml"
    config.write_text(yaml.safe_dump(run(dump, "--for", "verl")["advice"][0]["config"]))
    (yours,) = run(dump, "--for", "verl", "--config", str(config))["yours"]
    assert yours["ties"]
    linted = command.run("lint", config, dump, "--json")
    assert "times the gradient error" not in linted.stdout


@pytest.mark.slow
def test_limits_are_respected(candidates: str) -> None:
    dump = str(TRUTH / "stale_8")
    for own in run(dump, "-c", candidates, "--max-rejection", "5%", "--min-ess", "0.6")["advice"]:
        assert own["rejected_tokens"] <= 0.05
        assert own["ess"] >= 0.6 or own["name"] == "none"
    for own in run(dump, "-c", candidates, "--no-rejection")["advice"]:
        assert "gates" not in own["correction"]


@pytest.mark.slow
def test_verbose_names_ties_and_why_the_next_is_worse() -> None:
    """Errors are in units of the error without a correction."""
    arguments = [str(TRUTH / "int4"), "-c", "token_is", "-c", "seq_is", "-c", "seq_mis"]
    found = run(*arguments)["advice"]
    page = " ".join(command.run("advise", *arguments, "-v", COLUMNS="140").stdout.split())
    none = next(own["mse"] for own in found if own["name"] == "none")
    assert all(f" {own['name']} {own['mse'] / none:.3f} " in page for own in found)
    ties, behind = ([own for own in found[1:] if own["ties"] == tie] for tie in (True, False))
    assert not ties or all(own["name"] in page.partition("Not significantly worse")[2] for own in ties)
    times = behind[0]["mse"] / found[0]["mse"]
    assert f"{behind[0]['name']} has {times:.3g} times the error of {found[0]['name']}: more" in page


@pytest.mark.parametrize("framework", ["", "verl", "slime", "miles"])
@pytest.mark.parametrize("case", CASES)
def test_the_first_screen_has_24_lines(case: str, framework: str) -> None:
    arguments = [str(TRUTH / case), *(["--for", framework] if framework else []), "-c", "token_tis", "-c", "seq_mis"]
    text = command.run("advise", *arguments, COLUMNS="80").stdout
    lines = text.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 or line.startswith("Next: mismatchctl ") for line in lines)
    assert re.match(rf"(OK|CHECK|FAIL) +{case}: ", lines[0])
    assert not any(line != line.rstrip() for line in lines)
    assert "Next: mismatchctl " in text
    first = run(*arguments)["advice"][0]
    if "CHECK" in lines[0] and first["name"] != "none":
        assert first["name"] in text and ("Paste into" if framework else "as YAML") in text


def vanishing(folder: Path, *, advantages: bool) -> Path:
    """Make 24 long responses whose sequence weights are at most 2e-3."""
    random, length = np.random.default_rng(0), 900
    train = -random.exponential(1.0, (24, length))
    ratio = random.normal(-0.02, 0.05, train.shape)
    columns: dict[str, Any] = {
        "rollout_log_probs": pa.array([np.minimum(row, 0) for row in train - ratio], pa.list_(pa.float64())),
        "train_log_probs": pa.array(list(train), pa.list_(pa.float64())),
        "prompt_id": np.arange(24),
    }
    if advantages:
        columns["advantages"] = random.normal(0, 1, 24)
    pq.write_table(pa.table(columns), folder / "d.parquet")
    return folder / "d.parquet"


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("miles-moe-1", "configuration 1): collapsed"),
        ("miles-moe-2", "configuration 2): no collapse"),
        ("miles-moe-3", "configuration 3): no collapse"),
        ("miles-moe-4", "configuration 4): collapsed"),
        ("token_tis", ""),
    ],
)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_outcomes_of_published_runs_are_listed(name: str, outcome: str, framework: str) -> None:
    found = load_framework(framework).published_outcome(find_preset(name))
    assert found.endswith(outcome) and bool(found) is bool(outcome)
    if framework == "miles" and outcome:
        text = " ".join(command.run("advise", TRUTH / "bf16", "--for", framework, "-c", name, "-v").stdout.split())
        assert f"{name}: {found}" in text


def test_healthy_runs_get_the_documented_view_with_its_price() -> None:
    """Documents recommend token weights by default. The price is the effective sample size."""
    text = " ".join(command.run("advise", TRUTH / "bf16", "-c", "token_tis").stdout.split())
    (sample,) = read_samples([str(TRUTH / "bf16")]).values()
    weights = np.minimum(np.exp(sample.batch.train.astype(float) - sample.batch.rollout), 2)
    lost = 1 - weights.sum() ** 2 / np.square(weights).sum() / len(weights)
    assert text.startswith("OK bf16: use no correction")
    assert (
        f"Many guides recommend token_tis (token weight ≤ 2). On this dump, it would cost {100 * lost:.3g}% of" in text
    )


@pytest.mark.slow
def test_growing_runs_are_not_ok() -> None:
    """K3 of the last steps is far above the mean that the ranking uses."""
    dump = SAMPLE_DATA / "moe"
    text = " ".join(command.run("advise", dump).stdout.split())
    columns = ["rollout_log_probs", "train_log_probs", "response_mask"]
    tokens = pl.read_parquet(dump / "*.parquet", columns=["step", *columns]).explode(columns).filter("response_mask")
    x = tokens["train_log_probs"].cast(pl.Float64) - tokens["rollout_log_probs"].cast(pl.Float64)
    k3 = tokens.select("step", k3=x.exp() - 1 - x).group_by("step").mean().sort("step")["k3"]
    factor = float(re.findall(r"K3 grew ([\d.]+)x", text)[0])
    assert text.startswith("CHECK moe: use no correction") and text.endswith(f"diagnose {dump}")
    assert 0.5 < factor / (k3[-3:].mean() / k3[:5].mean()) < 2


class TestLossScaleIsReported:
    CONFIG = "rollout_is: sequence\nrollout_is_threshold: 2.0\n"

    def test_analyze_warns_about_the_loss_scale_of_requested_corrections(self, tmp_path: Path) -> None:
        dump = vanishing(tmp_path, advantages=False)
        asked = command.run("analyze", dump, "-c", "seq_is", COLUMNS="80").stdout
        assert re.search(r"^seq_is .*! x\d", asked, re.MULTILINE)
        assert "! seq_is multiplies the loss by" in asked
        default = command.run("analyze", dump, COLUMNS="80").stdout
        assert re.search(r"^seq_mis .*! x\d", default, re.MULTILINE)
        assert "multiplies the loss" not in default
        plain = command.run("analyze", TRUTH / "bf16", "-c", "seq_is", COLUMNS="80").stdout
        assert "! x" not in plain and "multiplies the loss" not in plain

    def test_lint_with_a_dump_warns_about_the_loss_scale(self, tmp_path: Path) -> None:
        dump, config = vanishing(tmp_path, advantages=False), tmp_path / "verl.yaml"
        config.write_text(self.CONFIG)
        found = json.loads(command.run("lint", config, dump, "--json").stdout)["findings"]
        (warning,) = (each for each in found if "multiplies the loss by" in each["consequence"])
        assert warning["level"] == "warning"
        calm = json.loads(command.run("lint", config, TRUTH / "bf16", "--json").stdout)["findings"]
        assert not any("multiplies the loss by" in each["consequence"] for each in calm)

    @pytest.mark.parametrize("advantages", [True, False])
    def test_advise_warns_about_the_loss_scale_of_your_configuration(self, tmp_path: Path, advantages: bool) -> None:
        """The warning also appears if the dump does not allow a ranking."""
        dump, config = vanishing(tmp_path, advantages=advantages), tmp_path / "verl.yaml"
        config.write_text(self.CONFIG)
        text = command.run("advise", dump, "--config", config, "--batch", "24", COLUMNS="80").stdout
        assert "multiplies the loss by" in " ".join(text.split())
        assert ("the dump lacks advantages" in " ".join(text.split())) is not advantages


def test_impossible_limits_are_reported() -> None:
    limits = ["--max-rejection", "0", "--min-ess", "1"]
    reported = command.run("advise", TRUTH / "int4", "-c", "token_is", "-c", "seq_mis", *limits)
    assert reported.exit_code == 0 and "use no correction: every candidate is excluded" in reported.stdout


def test_advice_for_a_framework_uses_its_options() -> None:
    found = run(str(TRUTH / "stale_8"), "--for", "verl")
    assert found["advice"][0]["config"]


def drawn(seed: int, spread: float) -> RunSample:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 40, 24)
    train = -random.exponential(1.0, lengths.sum())
    noise = random.normal(0, spread, len(train)) * np.where(random.random(len(train)) < 0.05, 20, 1)
    batch = TokenBatch(
        Segments.from_lengths(lengths),
        np.minimum(train - noise, 0),
        train,
        advantages=random.normal(0, 1, len(train)),
        rows=np.arange(len(lengths)),
        columns={"micro_batch": np.arange(len(lengths)) // 8},
    )
    zeros = np.zeros(len(lengths), np.int64)
    return RunSample(batch, None, None, zeros, zeros)


@pytest.mark.slow
@pytest.mark.parametrize("framework", sorted({known.framework for known in load_presets().values() if known.framework}))
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-3, 0.02, 0.3]))
def test_advice_for_a_framework_is_read_back_unchanged(framework: str, seed: int, spread: float) -> None:
    """Each candidate can be written in the framework's options, passes its checks and is read back unchanged."""
    chosen, sample = load_framework(framework), drawn(seed, spread)
    for correction in framework_candidates(framework)[
        1:
    ]:  # the first is no correction, which some frameworks cannot express
        native, lost = chosen.native(correction)
        written = yaml.safe_load(dump_yaml(native))
        assert not lost, correction.name
        assert not [trap for trap in chosen.lint(written) if trap.level == "error"], correction.name
        back = chosen.correction(written)
        assert back.needed_columns == correction.needed_columns, correction.name
        if sample.batch.missing_columns(correction.needed_columns):
            continue
        own, other = apply_to_sample(correction, sample), apply_to_sample(back, sample)
        np.testing.assert_array_equal(other.kept, own.kept, err_msg=correction.name)
        np.testing.assert_array_equal(other.counted, own.counted, err_msg=correction.name)
        np.testing.assert_allclose(other.weights, own.weights, rtol=1e-12, err_msg=correction.name)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--for", "nobody"), "nobody"),
        (("--max-rejection", "two"), "share"),
        (("--batch", "1e20"), "--batch"),
    ],
)
def test_wrong_options_give_one_sentence(flags: tuple[str, str], word: str) -> None:
    result = command.run("advise", TRUTH / "bf16", *flags, code=2)
    assert word in result.stderr and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_shift_is_named_first_and_keeps_the_ranking(tmp_path: Path) -> None:
    table = pq.read_table(TRUTH / "stale_8" / "dump.parquet")
    shifted = [[*row[1:], -1.0] for row in table["train_log_probs"].to_pylist()]
    place = table.schema.get_field_index("train_log_probs")
    values = pa.array(shifted, pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, "train_log_probs", values), tmp_path / "d.parquet")
    found = run(str(tmp_path))
    assert found["fix_first"]["cause"] == "misaligned" and found["advice"]
    assert "no correction repairs it" in command.run("advise", tmp_path).stdout.splitlines()[0]


def test_a_doubtful_cause_does_not_prevent_a_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """`diagnose` calls these stale weights a position mismatch at high confidence."""
    dump = str(TRUTH / "stale_8")
    before = run(dump)
    bug = Finding(
        cause="position_mismatch", title="Positions differ", confidence="high", summary="", advice="", evidence=[]
    )
    monkeypatch.setattr("mismatchctl.api.advise.advise.find_fixable", lambda *_: bug)
    after = run(dump)
    assert after["fix_first"]["cause"] == "position_mismatch"
    assert [own["name"] for own in after["advice"]] == [own["name"] for own in before["advice"]] != []


def without(case: str, folder: Path, *columns: str) -> str:
    table = pq.read_table(TRUTH / case / "dump.parquet").drop_columns(list(columns))
    pq.write_table(table, folder / "d.parquet")
    return str(folder)


@pytest.mark.slow
def test_missing_token_ids_are_replaced_by_probabilities(tmp_path: Path, candidates: str) -> None:
    """The notes state that the ranking is less reliable."""
    found = run(without("top_p_95", tmp_path, "token_ids"), "-c", candidates)
    errors = true_errors("top_p_95")
    assert found["basis"] == "probabilities"
    assert any("lacks token_ids" in note for note in found["notes"])
    assert errors[found["advice"][0]["name"]] <= 1.1 * min(errors.values())


def test_ranking_needs_advantages_or_rewards(tmp_path: Path) -> None:
    found = run(without("bf16", tmp_path, "advantages", "reward"))
    assert (found["advice"], found["basis"]) == ([], "none")
    assert "advantages and rewards" in found["notes"][0]


def test_runs_without_tokens_do_not_affect_others(tmp_path: Path) -> None:
    table = pq.read_table(TRUTH / "int4" / "dump.parquet").slice(0, 128)
    pq.write_table(table, tmp_path / "x.parquet")
    masks = pa.array([[False] * len(row) for row in table["rollout_log_probs"].to_pylist()])
    table = table.drop_columns([name for name in ("response_mask",) if name in table.column_names])
    pq.write_table(table.append_column("response_mask", masks), tmp_path / "y.parquet")
    found = [RunAdvice.model_validate(own) for own in _runs(str(tmp_path / "x.parquet"), str(tmp_path / "y.parquet"))]
    assert found[0].advice and not found[0].notes[0].startswith("the run has")
    assert not found[1].advice and found[1].notes == ["the run does not contain valid tokens. Check response_mask"]


def _runs(*paths: str) -> list[Any]:
    return list(run(*paths, "-c", "token_tis", "--batch", "64")["runs"].values())


def test_ranking_needs_the_batch_size(tmp_path: Path) -> None:
    """The best correction depends on the sequences per update, which a dump without steps does not show."""
    dump = without("bf16", tmp_path, "step")
    found = run(dump)
    assert found["advice"] == [] and "--batch" in found["notes"][0]
    assert run(dump, "--batch", f"{10**20}")["advice"]  # any number of sequences


def test_few_sequences_give_a_note_and_need_larger_differences(tmp_path: Path, candidates: str) -> None:
    table = pq.read_table(TRUTH / "stale_8" / "dump.parquet")
    pq.write_table(table.slice(0, 256), tmp_path / "d.parquet")
    few = run(str(tmp_path), "-c", candidates, "--batch", "512")
    reported = next(note for note in few["notes"] if note.startswith("the dump has 256 sequences"))
    assert "wrong below 320" in reported and "3.2 standard errors" in reported
    assert sum(own["ties"] for own in few["advice"]) >= 2


def test_longer_responses_than_tested_give_a_note() -> None:
    """Each response joins 20 responses, 551 tokens on average."""
    (sample,) = read_samples([str(TRUTH / "stale_8")]).values()
    short = rank_corrections(sample, [parse_correction({"name": "none"})], 512, Limits(), None)
    offsets = sample.batch.segments.offsets[::20]
    segments = Segments(np.append(offsets, sample.batch.tokens) if offsets[-1] < sample.batch.tokens else offsets)
    count = len(segments)
    batch = TokenBatch(segments, sample.batch.rollout, sample.batch.train, rows=np.arange(count))
    long = replace(sample, batch=batch, cluster=np.arange(count), step=np.zeros(count, np.int64), steps=())
    reported = rank_corrections(long, [parse_correction({"name": "none"})], 512, Limits(), None).notes
    assert not any("tokens on average" in note for note in short.notes)
    assert any(
        note.startswith(f"the responses have {sample.batch.tokens / count:,.0f} tokens on average") for note in reported
    )


@pytest.mark.slow
def test_the_order_of_rows_does_not_change_the_advice(tmp_path: Path, candidates: str) -> None:
    table = pq.read_table(TRUTH / "int4" / "dump.parquet")
    pq.write_table(
        table.take(np.random.default_rng(1).permutation(len(table))), tmp_path / "dump.parquet", row_group_size=300
    )
    first, second = run(str(TRUTH / "int4"), "-c", candidates), run(str(tmp_path), "-c", candidates)
    assert [own["name"] for own in first["advice"]] == [own["name"] for own in second["advice"]]
    for own, other in zip(first["advice"], second["advice"], strict=True):
        assert own["mse"] == pytest.approx(other["mse"], rel=1e-9)


class TestEstimators:
    """Estimates of bias and variance for gradients with a known mean and covariance."""

    def test_bias_and_variance_are_estimated(self) -> None:
        random = np.random.default_rng(5)
        offset = np.full(20, 0.1)
        found = []
        for _ in range(300):
            reference = random.normal(0, 1, (40, 20))
            own = reference + offset + random.normal(0, 0.5, (40, 20))
            found.append(GradientReference.of(reference).inner_products(own).moments())
        bias2 = [own.bias2 for own in found]
        assert np.mean(bias2) == pytest.approx(20 * 0.01, abs=4 * np.std(bias2) / np.sqrt(300))
        assert np.mean([own.bias2_se for own in found]) == pytest.approx(np.std(bias2), rel=0.15)
        assert np.mean([own.variance for own in found]) == pytest.approx(20 * 1.25, rel=0.02)

    def test_a_correction_must_be_significantly_better_than_none(self) -> None:
        random = np.random.default_rng(2)
        noise = random.normal(0, 1, (40, 20))
        none = noise + 0.5
        gradients = {"none": none, "same": none + random.normal(0, 1e-3, (40, 20)), "calm": noise / 2 + 0.5}
        products = {name: GradientReference.of(none).inner_products(own) for name, own in gradients.items()}
        assert choose_correction(products, 1.0).first == "calm"
        assert choose_correction({name: products[name] for name in ("none", "same")}, 1.0).first == "none"

    def test_likely_large_gains_rank_before_certain_small_ones(self) -> None:
        """Two of forty batches have most of the error. Without them, it is a tenth, 1.4 standard errors lower."""
        random = np.random.default_rng(2)
        calm = random.normal(0, 1, (40, 20))
        rare = np.isin(np.arange(40), (7, 21))[:, None]
        gradients = {
            "none": 1 + calm * np.where(rare, 14, 1),
            "large": 1 + calm,
            "little": 1 + calm * np.where(rare, 14, 0.9),
        }
        standard = GradientReference.of(gradients["none"])
        products = {name: standard.inner_products(own) for name, own in gradients.items()}
        found = choose_correction(products, 1.0)
        assert found.better == {"little"} and found.order == ("large", "little", "none")
        assert choose_correction({name: products[name] for name in ("none", "large")}, 1.0).first == "none"
        sample = drawn(1, 0.02)
        notes = advice_notes(sample, choose_reference(sample), found, {})
        (unsure,) = (note for note in notes if "is not significant" in note)
        assert unsure.startswith(f"large is expected to remove {found.gain('large')[0]:.0%}")
        assert f"little removes {found.gain('little')[0]:.0%}" in unsure
        sure = choose_correction({name: products[name] for name in ("none", "little")}, 1.0)
        notes = advice_notes(sample, choose_reference(sample), sure, {})
        assert not any("is not significant" in note for note in notes)

    def test_gradient_products_of_batches_match_numpy(self) -> None:
        random = np.random.default_rng(3)
        own, reference = random.normal(0, 1, (2, 12, 7))
        found = GradientReference.of(reference).inner_products(own).moments()
        pairs = [(own[a] - reference[a]) @ (own[b] - reference[b]) for a in range(12) for b in range(12) if a != b]
        assert found.bias2 == pytest.approx(np.mean(pairs))
        assert found.variance == pytest.approx(own.var(axis=0, ddof=1).sum())
        assert found.errors == pytest.approx(np.square(own - reference.mean(axis=0)).sum(axis=1))


@pytest.mark.parametrize("by_index", [False, True])
def test_large_dumps_are_sampled_by_prompt_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_index: bool
) -> None:
    table = pq.read_table(TRUTH / "int4" / "dump.parquet", columns=[
        "step", "prompt_id", "reward", "token_ids", "rollout_log_probs", "train_log_probs"
    ])  # fmt: skip
    order = np.random.default_rng(1).permutation(len(table)) if by_index else np.arange(len(table))[::-1]
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    pq.write_table(table.take(order), tmp_path / "b.parquet", row_group_size=300)
    for most, sequences in ((20_000, (640, 900)), (3_000, (640, 760))):
        monkeypatch.setattr("mismatchctl.api.advise.candidates.MAX_TOKENS", most)
        first, second = (
            next(iter(read_samples([str(tmp_path / name)]).values())) for name in ("a.parquet", "b.parquet")
        )
        assert sequences[0] <= len(first) <= sequences[1] and first.dump_sequences == len(table)
        assert len(first) < first.dump_sequences
        assert first.token_ids is not None and second.token_ids is not None
        assert (first.token_ids == second.token_ids).all() and (first.batch.rollout == second.batch.rollout).all()


@pytest.mark.parametrize("group", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_sampled_prompts_have_the_smallest_hashes(group: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten prompts have 900 tokens, then two responses do not fit into the limit, then one fits."""
    monkeypatch.setattr("mismatchctl.api.advise.candidates.MAX_TOKENS", 1000)
    monkeypatch.setattr("mismatchctl.api.advise.candidates.MIN_SEQUENCES", 2)
    dump = [[(number, 90) for number in range(10)], [(20, 1200), (20, 10)], [(30, 50), (40, 60), (41, 1000)]]
    sample = PromptSample()
    for place in group:
        hashes, lengths = zip(*dump[place], strict=True)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        x = -np.ones(offsets[-1])
        columns = {"\0prompt": np.array(hashes, np.uint64)}
        sample.add(TokenBatch(Segments(offsets), x, x, rows=np.arange(len(lengths)), columns=columns))
    sample.shrink()
    left = np.concatenate([part.columns["\0prompt"] for part in sample.parts])
    assert sorted(left.tolist()) == list(range(10)) and sample.seen == 15


def test_normalized_weights_have_mean_one() -> None:
    [sample] = read_samples([str(TRUTH / "int4")]).values()
    for level in ("token", "sequence"):
        rule = {"name": "n", "weight": {"level": "token", "truncate": 2.0, "normalize": level}}
        weights = apply_to_sample(parse_correction(rule), sample).weights
        for step in np.unique(sample.step):
            chosen = np.flatnonzero(sample.step == step)
            tokens = sample.batch.segments.token_indices(chosen)
            means = sample.batch.segments.mean(weights)[chosen]
            assert (weights[tokens].mean() if level == "token" else means.mean()) == pytest.approx(1, abs=1e-12)


class TestReference:
    """The reference gradient uses the least biased correction that converges."""

    @pytest.mark.parametrize(
        ("spread", "drift", "name", "mean"),
        [(0.3, 0.0, "seq_truncate_10", 1.0), (4.0, 0.0, "token_truncate_5", 0.13), (0.3, 0.7, "token_truncate_5", 2.0)],
    )
    def test_sequence_weights_far_from_mean_one_use_token_weights(
        self, spread: float, drift: float, name: str, mean: float
    ) -> None:
        """The expected mean is that of a lognormal distribution truncated at 10."""
        random, length, count = np.random.default_rng(4), 400, 800
        deviation = spread / np.sqrt(length)
        ratio = random.normal(drift / length - deviation**2 / 2, deviation, length * count)  # exp(drift) for sequences
        train = np.full(len(ratio), -8.0)
        batch = TokenBatch(Segments(np.arange(0, len(ratio) + 1, length)), train - ratio, train, rows=np.arange(count))
        zeros = np.zeros(count, np.int64)
        found = choose_reference(RunSample(batch, None, None, zeros, zeros))
        lower_bound = name == "token_truncate_5"
        assert (found.correction.name, found.is_per_token, found.lower_bound) == (name, lower_bound, lower_bound)
        assert found.sequence_mean == pytest.approx(mean, abs=0.1)

    @pytest.mark.parametrize(
        ("case", "name", "words"),
        [
            ("top_p_95", "token_truncate_5", "the mean sequence weight is {}, which is outside 0.5 to 1.5"),
            (
                "int4",
                "seq_truncate_10",
                "against seq_truncate_10, and the dump may lack its rare large weights (mean weight {})",
            ),
        ],
    )
    def test_lower_bounds_of_errors_name_their_cause(self, case: str, name: str, words: str) -> None:
        """With log ratios twice as large, some sequence weights vanish and others have a heavy tail."""
        (sample,) = read_samples([str(TRUTH / case)]).values()
        both = sample.batch
        doubled = replace(sample, batch=replace(both, rollout=2 * both.rollout - both.train))
        found = rank_corrections(doubled, [parse_correction({"name": "none"})], 512, Limits(), None)
        applied = apply_to_sample(
            parse_correction({"name": "w", "weight": {"level": "sequence", "truncate": 10.0}}), doubled
        )
        (reported,) = (note for note in found.notes if note.startswith("the true biases may be larger, because "))
        assert found.reference == name and found.sequence_mean == pytest.approx(applied.weights.mean())
        assert words.format(f"{found.sequence_mean:.2f}") in reported


class TestLossScale:
    @staticmethod
    def products(seed: int = 3) -> tuple[np.ndarray, GradientReference]:
        """Make gradients of 60 batches in 20 dimensions with a mean of 1, and the products with the reference."""
        reference = 1 + np.random.default_rng(seed).normal(0, 1, (60, 20))
        return reference, GradientReference.of(reference)

    @settings(max_examples=30)
    @given(factor=st.floats(0.5, 2))
    def test_the_error_ignores_the_length_of_a_gradient(self, factor: float) -> None:
        """This includes a signal in the rejected sequences, which the loss scale does not show."""
        reference, standard = self.products()
        noisy = reference + np.random.default_rng(4).normal(0, 0.5, reference.shape)
        gradients = {"none": reference, "own": noisy, "scaled": factor * noisy}
        products = {name: standard.inner_products(own) for name, own in gradients.items()}
        found = choose_correction(products, 0.1)
        assert found.mse["scaled"] == pytest.approx(found.mse["own"], rel=0.15)

    @pytest.mark.parametrize("factor", [0.9, 0.6, 1e-7])
    def test_constant_weights_gain_no_error(self, factor: float) -> None:
        """Token weights are truncated at a constant below all ratios."""
        (sample,) = read_samples([str(TRUTH / "bf16")]).values()
        shrunk = parse_correction({"name": "shrunk", "weight": {"truncate": factor}})
        advice = rank_corrections(sample, [find_preset("none"), shrunk], 512, Limits(), None)
        none, own = sorted(advice.advice, key=lambda found: found.name)
        assert advice.advice[0].name == "none"
        assert own.loss_scale == pytest.approx(factor, rel=0.01) and own.mse == pytest.approx(none.mse, rel=0.02)

    def test_shrinking_a_gradient_is_not_a_gain(self) -> None:
        reference, standard = self.products()
        products = {
            "none": standard.inner_products(reference),
            "half": standard.inner_products(reference / 2),
        }
        found = choose_correction(products, 1.0)
        assert found.first == "none" and not found.better

    def test_the_projection_on_the_true_gradient_is_estimated(self) -> None:
        """The correction removes 40% of the signal and none of the noise."""
        estimates = []
        for seed in range(40):
            reference, standard = self.products(seed)
            estimates.append(standard.inner_products(reference - 0.4).estimate_projection())
        assert np.mean(estimates) == pytest.approx(0.6, abs=0.03)

    def test_corrections_that_shrink_the_loss_rank_last(self) -> None:
        """This includes the correction with the best direction."""
        reference, standard = self.products()
        products = {
            "none": standard.inner_products(reference),
            "shrinks": standard.inner_products(np.ones_like(reference)),
            "noisy": standard.inner_products(reference + np.random.default_rng(4).normal(0, 2, reference.shape)),
        }
        found = choose_correction(products, 1.0, shrinking={"shrinks"})
        assert found.order[-1] == "shrinks" and found.mse["shrinks"] < found.mse["none"]
        assert "shrinks" not in found.better

    def test_vanishing_sequence_weights_rank_last_with_a_reason(self) -> None:
        """With log ratios twice as large, sequence weights multiply the loss by less than 0.5."""
        (sample,) = read_samples([str(TRUTH / "int4")]).values()
        doubled = replace(sample, batch=replace(sample.batch, rollout=2 * sample.batch.rollout - sample.batch.train))
        names = ("token_truncate_2", "seq_truncate_2", "seq_mis_2")
        advice = rank_corrections(doubled, [find_preset(name) for name in ("none", *names)], 512, Limits(), None)
        last = advice.advice[-1]
        sums = doubled.batch.segments.sum(doubled.batch.train.astype(float) - doubled.batch.rollout)
        kept = np.repeat(sums <= np.log(2), doubled.batch.segments.lengths)
        weights = np.exp(np.repeat(sums, doubled.batch.segments.lengths)[kept])
        assert last.name == "seq_mis_2" and last.loss_scale == pytest.approx(weights.mean()) and weights.mean() < 0.5
        assert last.why == f"multiplies the loss by {last.loss_scale:.3g}, which mostly lowers the learning rate"
        assert last.name not in (advice.advice[0].name, advice.runner_up and advice.runner_up.name)


class TestSurrogate:
    @pytest.mark.parametrize(("symbols", "share"), [(12, 0.05), (400, 0.01)])
    def test_scores_have_mean_zero(self, symbols: int, share: float) -> None:
        """With 400 symbols, pairs of tokens are hashed. The bound is relative to the scores at sampled tokens."""
        random = np.random.default_rng(0)
        table = random.dirichlet(np.full(symbols, 0.3), symbols)
        ids, log_probs, last = np.empty(24_000, np.int64), np.empty(24_000), 0
        for place in range(len(ids)):
            ids[place] = random.choice(symbols, p=table[last])
            log_probs[place] = np.log(table[last, ids[place]])
            last = ids[place]
        batch = TokenBatch(Segments.from_lengths(np.full(400, 60)), log_probs, log_probs, rows=np.arange(400))
        sample = RunSample(batch, ids, np.ones(len(ids)), np.arange(400), np.zeros(400, np.int64))
        surrogate = Surrogate(sample, np.arange(400) // 10)
        applied = apply_to_sample(parse_correction({"name": "none"}), sample)
        gradients = surrogate.gradients(applied)
        uncertainty = np.bincount(surrogate.feature, -np.expm1(log_probs)) / len(ids)
        assert np.square(gradients.mean(axis=0)).sum() < share * np.square(uncertainty).sum()


class TestNames:
    def test_candidates_can_be_passed_by_name(self) -> None:
        for correction in default_candidates():
            named = find_preset(correction.name)
            assert (named.weight, named.gates, named.loss) == (correction.weight, correction.gates, correction.loss)

    @pytest.mark.parametrize("study", DEFAULT_STUDIES, ids=lambda study: study.name)
    def test_sweep_rules_can_be_passed_by_name(self, study: Study) -> None:
        rule = find_preset(study.name)
        assert (rule.weight, rule.gates) == (study.correction.weight, study.correction.gates)

    @pytest.mark.parametrize(
        ("name", "label"),
        [
            ("geo_1.0184", "geometric mean within 1.84%"),
            ("veto_1e-4", "veto: any token ratio < 1e-4"),
            ("seq-mis-3", "sequence weight ≤ 3; product of ratios ≤ 3"),
            ("geo_1.01_token_truncate_5", "token weight ≤ 5; geometric mean within 1%"),
            ("miles_moe_2", "token weight clipped to [0.5, 1.5], normalized; geometric mean in [0.99, 1.001]"),
        ],
    )
    def test_labels_describe_corrections(self, name: str, label: str) -> None:
        assert correction_label(find_preset(name)) == label

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("geo_1_2", "expected positive bounds, as in geo_1.001"),
            ("token_clip_2", "expected positive bounds, as in token_clip_0.5_2"),
            ("token_truncate_2_seq_truncate_2", "only one rule of a correction can set weights"),
            ("seq_mis_two", "unknown preset 'seq_mis_two'"),
        ],
    )
    def test_wrong_names_give_one_sentence(self, name: str, message: str) -> None:
        result = command.run("advise", TRUTH / "bf16", "-c", name, code=2)
        assert message in result.stderr
