"""verl's versions, the places of its keys, and replays that need no goldens."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatchctl.core.batch import TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.application import apply_correction
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.adapter import ReplayOptions
from mismatchctl.frameworks.registry import find_preset, load_framework, load_presets
from mismatchctl.frameworks.step import Step
from tests.conformance.compare_verl import VERSIONS, expected, table


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("verl", "2026-08"),
        ("verl@a", "2025-10"),
        ("verl@c1", "2025-11-12"),
        ("verl@3694", "2025-10-14"),
        ("verl@3915", "2025-10"),
        ("verl@3984", "2025-11-07"),
        ("verl@4070", "2025-11-12"),
        ("verl@3980", "2025-11-25"),
        ("verl@2025-10", "2025-10"),
        ("verl@2025-10-27", "2025-10-14"),
        ("verl@2025-11", "2025-11-25"),
        ("verl@2025-11-12", "2025-11-12"),
        ("verl@2026-03", "0.7.1"),
        ("verl@2026-08", "2026-08"),
        ("verl@2030-01", "0.9.1"),
        ("verl@418f964ab84d", "2025-11-07"),
    ],
)
def test_versions_are_found_by_name_date_or_pull_request(name: str, version: str) -> None:
    assert load_framework(name).version == version


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("verk", "did you mean 'verl'"),
        ("verl@3914", "did you mean"),
        ("verl@2025-01", "versions before 2025-10-14 are not supported"),
        ("verl@zzz", "use one of 2025-10-14, 2025-10, 2025-11-07"),
    ],
)
def test_unknown_versions_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_framework(name)


@pytest.mark.parametrize(
    ("version", "keys"),
    [
        ("a", {"rollout_is_threshold": 2.0, "rollout_is_level": "sequence"}),
        ("b", {"rollout_is": "token", "rollout_token_veto_threshold": 1e-4}),
        ("d", {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_2.0, 0.1"}),
    ],
)
def test_keys_are_found_in_a_full_configuration(version: str, keys: dict[str, Any]) -> None:
    framework = load_framework(f"verl@{version}")
    inner = keys if version == "a" else {"rollout_correction": keys}
    full = {"algorithm": {"adv_estimator": "grpo", **inner}, "actor_rollout_ref": {"actor": {"clip_ratio": 0.2}}}
    assert framework.correction(full) == framework.correction(keys)
    if version != "a":
        assert framework.correction({"rollout_correction": keys}) == framework.correction(keys)
        assert framework.correction({"algorithm": {"rollout_correction": None}}).weight is None


def test_unknown_keys_and_text_for_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rollout_rs_threshold'"):
        load_framework("verl").correction({"rollout_rs_treshold": 2.0})
    with pytest.raises(ConfigError, match="without quotes"):
        load_framework("verl@b").correction({"rollout_token_veto_threshold": "1e-4"})


@pytest.mark.parametrize("version", VERSIONS)
def test_verl_configurations_are_read_back(version: str) -> None:
    framework = load_framework(f"verl@{version}")
    for config in expected(version)["configs"]["configs"].values():
        correction = framework.correction(config["kwargs"])
        native, problems = framework.native(correction)
        assert not problems
        assert framework.correction(native) == correction, native


def test_presets_match_configurations_of_verl() -> None:
    of_release = {"2025-11": "b", "2025-11-25": "c2", "2026-08": "d"}
    compared = 0
    for ours in (each for each in load_presets().values() if each.framework == "verl"):
        version = of_release[ours.version]
        kwargs = expected(version)["configs"]["configs"][f"{version}-preset-{ours.name}"]["kwargs"]
        made = load_framework(f"verl@{version}").correction(kwargs)
        weight = None if ours.name == "ppo_is_bypass" else made.weight  # all weights are 1, see the preset
        assert (weight, made.loss) == (ours.correction.weight, ours.correction.loss)
        rules = [gate.model_copy(update={"keep": None}) for gate in ours.correction.gates]
        assert [gate.model_copy(update={"keep": None}) for gate in made.gates] == rules
        for gate, golden in zip(ours.correction.gates, made.gates, strict=True):
            assert [bound or 0 for bound in gate.keep] == [bound or 0 for bound in golden.keep]
            compared += 1
    assert compared > 10


def test_ratio_bounds_are_written_as_k1_and_read_back() -> None:
    geometric = find_preset("geo_mis")
    native, notes = load_framework("verl@d").native(geometric)
    assert native["rollout_rs"] == "seq_mean_k1"
    low, high = map(float, native["rollout_rs_threshold"].split("_"))
    assert (low, high) == (pytest.approx(1 / 1.001), pytest.approx(1 / 0.999))
    assert "written as mean K1" in notes[0] and "veto" in notes[1]
    older, notes = load_framework("verl@b").native(find_preset("decoupled_geo_rs"))
    assert older["rollout_rs"] == "geometric" and len(notes) == 1
    assert older["rollout_rs_threshold"] == pytest.approx(1 / 0.999)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_corrections_match_verl(version: str) -> None:
    """Kept tokens and weights match, except in the batch whose veto logarithm verl takes in float32."""
    framework, compared = load_framework(f"verl@{version}"), 0
    for batch, step in (("dense", 3), ("moe", 12), ("extreme", 7), ("multiturn", 101), ("identical", 0)):
        rows = Step.read(table(batch, step), "float64", {})
        pairs = {
            "train/rollout": Ratios(rows.values("train_log_probs"), rows.values("rollout_log_probs"), rows.segments),
            "current/rollout": Ratios(
                rows.values("current_log_probs"), rows.values("rollout_log_probs"), rows.segments
            ),
        }
        tokens = TokenBatch(rows.segments, pairs["train/rollout"].reference, pairs["train/rollout"].policy)
        for config in expected(version)["configs"]["configs"].values():
            correction = framework.correction(config["kwargs"])
            applied, out = apply_correction(correction, pairs, tokens), framework.replay(table(batch, step), correction)
            np.testing.assert_array_equal(np.concatenate(rows.by_row(applied.kept.expand())), np.concatenate(out.keep))
            if correction.weight is not None and correction.weight.normalize == "none":
                assert out.weights is not None
                ours = np.concatenate(rows.by_row(applied.token_weights()))
                np.testing.assert_allclose(ours, np.concatenate(out.weights), rtol=1e-9)
                compared += 1
    assert compared > 10


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        (Correction(weight=Weight(clip=(0.5, 2.0))), "has truncate 2.0 instead"),
        (Correction(weight=Weight(level="geometric", truncate=2.0)), "Invalid rollout_is: geometric"),
        (Correction(gates=(Gate(level="max", keep=(None, 9.0)),)), "has no such rule"),
        (
            Correction(gates=(Gate(statistic="k3", clamp="token", keep=(None, 1), effect="zero"),)),
            "has effect mask instead",
        ),
        (Correction(weight=Weight(truncate=2.0, normalize="sequence")), "has normalize token instead"),
        (Correction(weight=Weight(truncate=2.0), loss="ppo_bypass"), "has source current/rollout instead"),
    ],
)
def test_corrections_verl_lacks_are_named_and_not_replayed(correction: Correction, words: str) -> None:
    _, problems = load_framework("verl").native(correction)
    assert words in "; ".join(problems)
    with pytest.raises(ConfigError, match=words):
        load_framework("verl").replay(table("edge", 1), correction)


def test_values_of_masked_tokens_are_ignored() -> None:
    framework = load_framework("verl")
    correction = framework.correction({"rollout_is": "sequence", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.1})
    rows = table("multiturn", 101)
    masks = rows["response_mask"].to_pylist()
    spoiled = [
        [math.nan if not valid else value for value, valid in zip(values, mask, strict=True)]
        for values, mask in zip(rows["rollout_log_probs"].to_pylist(), masks, strict=True)
    ]
    place = rows.column_names.index("rollout_log_probs")
    other = rows.set_column(place, "rollout_log_probs", pa.array(spoiled, pa.list_(pa.float32())))
    one, two = framework.replay(rows, correction), framework.replay(other, correction)
    assert one.logged == two.logged
    assert one.weights is not None and two.weights is not None
    for mask, weights, again in zip(masks, one.weights, two.weights, strict=True):
        assert len(mask) == len(weights)
        assert not weights[~np.array(mask)].any()
        np.testing.assert_array_equal(weights, again)


def test_column_names_of_verl_are_read() -> None:
    framework = load_framework("verl@b")
    correction = framework.correction({"rollout_is": "token"})
    rows = table("moe", 12)
    renamed = rows.rename_columns(
        ["old_log_probs" if name == "train_log_probs" else name for name in rows.column_names]
    )
    assert framework.replay(rows, correction).logged == framework.replay(renamed, correction).logged


def test_a_batch_that_verl_cannot_correct_is_refused() -> None:
    rows = table("edge", 1)
    framework = load_framework("verl")
    empty = rows.filter(pa.array([not any(mask) for mask in rows["response_mask"].to_pylist()]))
    with pytest.raises(DataError, match="at least one valid token"):
        framework.replay(empty, Correction())
    with pytest.raises(DataError, match="divides by zero"):
        framework.replay(rows, framework.correction({"rollout_is": "token", "rollout_is_threshold": "1e8_1e9"}))
    with pytest.raises(DataError, match="missing column current_log_probs"):
        framework.replay(rows.drop_columns("current_log_probs"), framework.correction({"bypass_mode": True}))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_logged_name_has_a_description(version: str) -> None:
    meant = {meaning.name for meaning in load_framework(f"verl@{version}").meanings()}
    logged: set[str] = set()
    for runs in expected(version)["metrics"].values():
        for kind in ("decoupled", "bypass"):
            for run in runs:
                logged |= (
                    run.get(kind, {}).get("common_metrics", {}).keys() | run.get(kind, {}).get("metrics", {}).keys()
                )
    assert logged <= meant
    assert all(meaning.quantity for meaning in load_framework(f"verl@{version}").meanings())


@pytest.mark.parametrize(("version", "extremes"), [("c1", True), ("c2", True), ("d", False)])
def test_bypass_mode_logs_means_over_micro_batches(version: str, extremes: bool) -> None:
    rows, own = table("moe", 12), load_framework(f"verl@{version}")
    native = {"rollout_is": "sequence", "rollout_is_batch_normalize": True, "bypass_mode": True}
    correction = own.correction(native)
    whole = own.replay(rows, correction, ReplayOptions(len(rows)))
    assert whole.logged == own.replay(rows, correction).logged
    out = own.replay(rows, correction, ReplayOptions(20))
    parts = [own.replay(rows.slice(start, 20), correction) for start in (0, 20, 40)]
    for name, value in out.logged.items():
        values = [part.logged[name] for part in parts]
        reduce = max if extremes and "max" in name else min if extremes and "min" in name else np.mean
        assert value == pytest.approx(reduce(values)), name
    assert out.weights is not None
    assert np.array_equal(
        np.concatenate(out.weights), np.concatenate([w for part in parts for w in part.weights or ()])
    )
    scattered = rows.append_column("micro_batch", pa.array([row % 3 for row in range(len(rows))]))
    again = own.replay(scattered, correction)
    third = own.replay(rows.take(list(range(1, len(rows), 3))), correction)
    assert third.weights is not None and again.weights is not None
    assert np.array_equal(again.weights[4], third.weights[1])
    decoupled = own.correction({"rollout_is": "sequence", "rollout_is_batch_normalize": True})
    assert own.replay(rows, decoupled, ReplayOptions(20)).logged == own.replay(rows, decoupled).logged


def test_a_step_without_valid_tokens_is_an_error_in_verl() -> None:
    rows = table("edge", 1)
    empty = rows.filter(pa.array([not any(mask) for mask in rows["response_mask"].to_pylist()]))
    for native in ({}, {"bypass_mode": True}):
        for part in (empty, empty.slice(0, 0)):
            with pytest.raises(DataError, match="at least one valid token"):
                load_framework("verl").replay(part, load_framework("verl").correction(native))


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_unapplied_weights_are_logged_and_reject(mode: str) -> None:
    rows, own = table("moe", 12), load_framework("verl@a")
    native = {"rollout_is_threshold": 1.5, "rollout_is_mode": mode}
    applied, unapplied = (own.correction(native | {"rollout_is": flag}) for flag in (True, False))
    assert unapplied.weight is None
    with_weights, without = own.replay(rows, applied), own.replay(rows, unapplied)
    assert with_weights.logged == without.logged
    assert without.weights is None
    assert all(np.array_equal(a, b) for a, b in zip(with_weights.keep, without.keep, strict=True))
    assert own.native(unapplied)[0]["rollout_is"] is False
