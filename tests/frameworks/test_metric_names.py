"""A logged name that is listed for a metric has the same value as the metric."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.glossary import NEVER_LOGGED_STATUS, RelatedName, find_related_names, resolve_metric
from mismatchctl.frameworks.registry import find_preset, load_adapters, load_framework
from mismatchctl.frameworks.slime import replay as slime
from mismatchctl.measure.metrics.evaluation import other_metrics
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.metrics.registry import MISMATCH_METRICS, correction_metrics
from tests.cli import command
from tests.conformance.compare_verl import table

TITLES = [
    title for adapter in load_adapters() for title in adapter.titles if adapter.name in ("verl", "slime", "miles")
]
"""Frameworks with names for metrics of the registry. Goldens cover the names of other frameworks."""
_OF_OCTOBER = {"rollout_is_threshold": 1.5, "rollout_is_mode": "mask", "rollout_is_veto_threshold": 1e-2}
NATIVE = {
    "verl@2025-10-14": _OF_OCTOBER,
    "verl@2025-10": _OF_OCTOBER,
    "verl@2026-08": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": 3,
    },
    "verl": {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "sequence",
        "rollout_rs_threshold": 3.0,
        "rollout_token_veto_threshold": 1e-2,
    },
    "slime": {"use_tis": True, "tis_clip": 1.5},
}
DOCUMENTED = (
    "mismatch_training_log_ppl",
    "mismatch_training_ppl",
    "mismatch_rollout_log_ppl",
    "mismatch_rollout_ppl",
    "mismatch_kl",
    "mismatch_k3_kl",
    "mismatch_log_ppl_diff",
    "mismatch_log_ppl_abs_diff",
    "mismatch_ppl_ratio",
    "train_rollout_logprob_abs_diff",
    "ois",
    "mis_mean_is_weight_before_clip",
    "mis_ratio_mean_after_mis",
    "mis_truncate_fraction",
    "mis_clip_fraction_low",
    "mis_clip_fraction_high",
    "mis_mask_fraction_low",
    "mis_mask_fraction_high",
    "mis_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction",
    "mis_batch_norm_factor",
)


def chosen(title: str) -> Correction:
    """Return a correction of the framework, with all options that a name may need."""
    native = NATIVE.get(title) or NATIVE["verl" if title.startswith("verl") else "slime"]
    return load_framework(title).correction(native)


def computed(rows: pa.Table, correction: Correction, folder: Path) -> dict[str, float | None]:
    path = folder / "rows.parquet"
    pq.write_table(rows, path)
    overall = next(iter(analyze([str(path)], [correction]).runs.values())).overall
    of_correction = next(iter(overall.corrections.values()))
    return {key: found.value for key, found in (of_correction | overall.metrics).items()}


def logged(title: str, rows: pa.Table, correction: Correction) -> dict[str, float]:
    own = load_framework(title)
    found = own.replay(rows, correction).logged
    panel = "train/" if own.name in ("slime", "miles") else ""
    return {
        meaning.name: found[key] for meaning in own.meanings() if (key := meaning.name.removeprefix(panel)) in found
    }


def registry(correction: Correction) -> list[Metric]:
    return [*MISMATCH_METRICS, *other_metrics(), *correction_metrics(correction)]


def names(metric: Metric, title: str) -> list[RelatedName]:
    title = load_framework(title).title
    return [relative for relative in find_related_names(metric) if title in relative.frameworks]


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title in TITLES if title.startswith("verl")])
@pytest.mark.parametrize("batch", ["moe", "edge", "multiturn"])
def test_names_listed_as_equal_give_the_same_number(title: str, batch: str, tmp_path: Path) -> None:
    rows = table(batch, {"moe": 12, "edge": 1, "multiturn": 101}[batch])
    if batch == "edge":
        rows = rows.drop_columns("current_log_probs")  # values above 0 are not allowed in a dump
    correction = chosen(title)
    values = computed(rows, correction, tmp_path)
    compared = 0
    for metric in registry(correction):
        for relative in names(metric, title):
            if relative.differences or metric.key not in values or relative.name.startswith("actor/"):  # of a loss
                continue
            value = logged(title, rows, correction)[relative.name]
            assert value == pytest.approx(values[metric.key], rel=1e-6, abs=1e-9), (metric.key, relative.name)
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("title", ["verl@2026-08", "verl@2025-10", "slime@seed", "slime", "miles"])
def test_names_listed_as_different_give_other_numbers(title: str, tmp_path: Path) -> None:
    """The means cover two policies and rows of unequal length, some of them empty."""
    rows = table("edge", 1).drop_columns("current_log_probs")
    correction = Correction()
    if title != "verl@2026-08":
        correction = chosen(title) if title == "verl@2025-10" else find_preset("slime-mis")
    values = computed(rows, correction, tmp_path)
    compared = 0
    for metric in MISMATCH_METRICS:
        for relative in names(metric, title):
            if relative.differences and metric.key not in ("log_ppl_diff_min", "log_ppl_diff_max", "abs_diff_mean"):
                if relative.name == "train/train_rollout_kl":  # of a loss
                    continue
                value = logged(title, rows, correction)[relative.name]
                assert value != pytest.approx(values[metric.key], rel=1e-6), (metric.key, relative.name)
                compared += 1
    assert compared >= 7


def test_similar_names_of_the_headline_metric_are_listed() -> None:
    k3 = next(metric for metric in MISMATCH_METRICS if metric.key == "k3")
    exact = {relative.name: relative.frameworks for relative in find_related_names(k3) if not relative.differences}
    assert exact == {
        "rollout_corr/k3_kl": ("verl@2026-08", "verl@2025-11-25", "verl@2025-11-12", "verl@2025-11-07"),
        "mismatch/mismatch_k3_kl": ("verl@2025-10", "verl@2025-10-14"),
    }
    unlike = {relative.name: relative for relative in find_related_names(k3) if relative.differences}
    assert "mean within each sequence" in str(unlike["train/mis_k3_kl"].differences)


def test_metrics_shows_equal_and_different_names() -> None:
    shown = command.run("metrics", "k3").stdout
    known, unlike = shown.split("similar")
    assert "rollout_corr/k3_kl (verl 2026-08 2025-11-25 2025-11-12 2025-11-07)" in known
    assert "train/mis_k3_kl (slime 2026-01" in unlike
    assert '"names"' in command.run("metrics", "k3", "--json").stdout
    assert "documented, not logged, by slime" in command.run("metrics", "mismatch_k3_kl").stdout


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_name_in_the_documents_of_slime_resolves(name: str) -> None:
    found = resolve_metric(
        name, "slime" if name == "ois" else ""
    )  # the registry has the same key for a mean over tokens
    assert found.framework.startswith("slime")
    until = found.meanings[0].until
    assert found.status == (
        NEVER_LOGGED_STATUS if name.startswith("mismatch_") else f"logged until {until}" if until else "ok"
    )
    meaning = found.meanings[0]
    assert (found.source, meaning.name) == ("logged", f"train/{name}")
    assert (meaning.logged_as or meaning.name) == f"train/{slime.DOCUMENTED_NAMES[name]}"


def test_names_resolve_to_their_place_in_a_result() -> None:
    places = {
        "k3": ("", "metrics", "k3"),
        "ess_token": ("", "metrics", "ess_token"),
        "gate3_tokens_low": ("", "corrections", "gate3_tokens_low"),
        "rollout_corr/kl": ("verl@2026-08", "metrics", "k1"),
        "kl": ("verl@2026-08", "metrics", "k1"),
        "train/mis_kl": ("slime@2026-08", "logged", ""),
        "mismatch/mismatch_kl": ("verl@2025-10", "metrics", "k1"),
        "rollout_corr/chi2_seq": ("verl@2026-08", "logged", ""),
        "rollout_corr/rollout_is_mean": ("verl@2026-08", "logged", ""),
        "actor/pg_clipfrac": ("verl@2026-08", "corrections", "loss_clip_fraction"),
    }
    for name, place in places.items():
        found = resolve_metric(name)
        assert (found.framework, found.source, found.key) == place
    assert resolve_metric("mismatch_kl", "verl@2025-10").key == "k1"
    assert resolve_metric("mis_kl", "miles").framework == "miles@2026-08"


def test_unnormalized_weights_are_final() -> None:
    plain = load_framework("verl").correction({"rollout_is": "token"})
    normalized = load_framework("verl").correction({"rollout_is": "token", "rollout_is_batch_normalize": True})
    assert resolve_metric("rollout_is_mean", correction=plain).key == "weight_mean"
    assert resolve_metric("rollout_is_mean", correction=normalized).source == "logged"


@pytest.mark.slow
@pytest.mark.parametrize("title", TITLES)
def test_every_logged_name_resolves_to_its_number_in_a_result(title: str, tmp_path: Path) -> None:
    rows = table("multiturn", 101)
    framework, correction, path = load_framework(title), chosen(title), tmp_path / "rows.parquet"
    pq.write_table(rows, path)
    run = analyze([str(path)], [correction], framework=framework).runs["rows"]
    logged = run.logged[correction.name]
    places = {"metrics": run.overall.metrics, "corrections": run.overall.corrections[correction.name]}
    sources = set()
    for name, (value,) in logged.items():
        found = resolve_metric(name, title, correction)
        sources.add(found.source)
        if found.source != "logged":
            assert places[found.source][found.key].value == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert "logged" in sources


def test_bypass_mode_names_refer_to_the_current_policy() -> None:
    bypass = load_framework("verl").correction({"bypass_mode": True})
    assert resolve_metric("rollout_corr/k3_kl", correction=bypass).source == "logged"
    assert resolve_metric("rollout_corr/k3_kl", correction=load_framework("verl").correction({})).key == "k3"
    assert resolve_metric("actor/pg_clipfrac", correction=bypass).key == "loss_clip_fraction"


def test_unknown_metric_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'train/mis_kl'"):
        resolve_metric("train/mis_kll")
    with pytest.raises(ConfigError, match="no metric is called 'mis_kl'"):
        resolve_metric("mis_kl", "verl")


def test_metrics_are_computed_by_name_from_a_table() -> None:
    rows = table("moe", 12)
    x = np.concatenate(rows["train_log_probs"].to_pylist()) - np.concatenate(rows["rollout_log_probs"].to_pylist())
    found = logged("verl", rows, Correction())
    assert found["rollout_corr/kl"] == pytest.approx(-x.mean())
    assert found["training/rollout_probs_diff_valid"] == 1
    assert "rollout_corr/rollout_is_mean" not in found
