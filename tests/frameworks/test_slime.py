"""slime's arguments, names and scopes. test_slime.py in conformance/ covers its numbers."""

from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import yaml

import mismatchctl as mm
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.adapter import ReplayOptions
from mismatchctl.frameworks.registry import find_preset, load_framework, load_presets
from mismatchctl.frameworks.slime import replay as slime
from mismatchctl.frameworks.slime.arguments import VERSIONS
from tests.conformance.compare_slime import FOLDER, configs, correcting, framework, table

SHIPPED = """
use_tis: true
use_rs: true
tis_level: "token"
rs_level: "token"
tis_mode: "truncate"
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""


def shipped(**changes: Any) -> dict[str, Any]:
    return {**yaml.safe_load(SHIPPED), **changes}


def rules(correction: Correction) -> tuple[Any, ...]:
    return correction.weight, correction.gates, correction.loss


@pytest.mark.parametrize(
    ("word", "month"),
    [("slime", "2026-08"), ("slime@seed", "2026-01"), ("slime@head", "2026-08"), ("slime@2026-05", "2026-01")],
)
def test_versions_are_found_by_name_or_month(word: str, month: str) -> None:
    assert load_framework(word).version == month
    assert load_framework(word.replace("slime", "miles")).version == month


@pytest.mark.parametrize("word", ["slime@2024-01", "slime@sead", "slim"])
def test_unknown_versions_are_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        load_framework(word)


def test_the_shipped_file_equals_the_preset() -> None:
    assert rules(load_framework("slime@seed").correction(shipped())) == rules(find_preset("slime-mis"))


def test_command_line_flags_are_read() -> None:
    assert rules(load_framework("slime").correction({"--use-tis": True, "--tis-clip": 2.0})) == rules(
        find_preset("slime-tis")
    )


def test_newer_options_are_refused_by_older_versions() -> None:
    assert load_framework("slime").correction({"advantage_estimator": "cispo"}).weight is None
    for word in ("slime@seed", "miles"):
        with pytest.raises(ConfigError, match="does not support advantage_estimator cispo"):
            load_framework(word).correction({"advantage_estimator": "cispo"})


def test_no_correction_without_a_switch() -> None:
    assert rules(load_framework("slime").correction({})) == rules(find_preset("none"))
    assert rules(load_framework("slime").correction(shipped(use_tis=False))) == rules(find_preset("none"))


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        (yaml.safe_load(SHIPPED.replace("1.0e-4", "1e-4")), "1.0e-4"),
        (shipped(tis_upper_bound="2.0"), "tis_upper_bound is the string"),
        ({key: value for key, value in shipped().items() if key != "rs_level"}, "AttributeError at 'rs_level'"),
        ({"use_tis": True, "tis_mode": "clip"}, "tis_level"),
        (shipped(rs_level="batch"), "Invalid level: batch"),
        (shipped(tis_level="geometric"), "Unsupported tis_level: geometric"),
        (shipped(rs_lower_bound=3.0), "rs_lower_bound 3 must be below rs_upper_bound 2"),
        (shipped(use_tis="yes"), "true or false"),
        ({"use_tis": True, "use_rollout_logprobs": True}, "cannot be set at the same time"),
        ({"use_kl_loss": True, "kl_loss_type": "k4"}, "invalid choice 'k4'"),
        ({"use_tis": True, "custom_tis_function_path": "my.own.weights"}, "only mis.py and icepop_function"),
    ],
)
def test_configurations_slime_rejects_are_refused(native: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_framework("slime").correction(native)
    assert reason in str(caught.value)


@pytest.mark.parametrize("impl", ["slime_seed", "slime_head", "miles_head"])
def test_native_options_are_read_back(impl: str) -> None:
    own = framework(impl)
    for config in configs().values():
        try:
            correction = own.correction(correcting(config) | config["loss"])
        except ConfigError:
            continue
        said, unsaid = own.native(correction)
        assert own.correction(said) == correction
        assert not unsaid
        plain = Correction(**{name: getattr(correction, name) for name in Correction.model_fields})
        again, unsaid = own.native(plain)
        assert rules(own.correction(again)) == rules(plain), config["id"]
        assert not unsaid


@pytest.mark.parametrize(
    "name", [name for name, item in load_presets().items() if item.framework in ("slime", "miles")]
)
def test_presets_can_be_written_natively(name: str) -> None:
    own = load_framework("slime@seed")
    said, unsaid = own.native(find_preset(name))
    assert {item for item in unsaid if "denominators" not in item} == set()
    again = own.correction(said)
    if not unsaid:
        assert rules(again) == rules(find_preset(name))
    own.replay(table("edge", 0), find_preset(name))


@pytest.mark.parametrize(
    ("correction", "unsaid"),
    [
        (Correction(gates=(Gate(keep=(0.5, 2.0)),)), "token ratio within 2x: slime has no such rule"),
        (
            Correction(weight=Weight(), gates=(Gate(statistic="k3", keep=(None, 0.1)),)),
            "slime has statistic ratio instead",
        ),
        (Correction(weight=Weight(level="sequence", normalize="token")), "slime has normalize sequence"),
        (Correction(loss="policy_gradient"), "slime has the loss ppo instead"),
    ],
)
def test_unsupported_fields_are_named(correction: Correction, unsaid: str) -> None:
    assert unsaid in " ".join(load_framework("slime").native(correction)[1])
    with pytest.raises(ConfigError, match="cannot express this correction"):
        load_framework("slime").replay(table("edge", 0), correction)


def test_changed_corrections_lose_their_native_source() -> None:
    own = load_framework("slime")
    changed = own.correction(shipped()).model_copy(
        update={"weight": Weight(truncate=1.5, normalize_over="micro_batch")}
    )
    said, _ = own.native(changed)
    assert (said["tis_upper_bound"], said["tis_batch_normalize"]) == (1.5, False)


def test_micro_batches_by_column_or_size() -> None:
    own, rows = load_framework("slime"), table("moe", 0)
    correction = own.correction(shipped())
    thirds = pa.array([row // 3 for row in range(len(rows))])
    by_size = own.replay(rows, correction, ReplayOptions(3))
    by_column = own.replay(rows.append_column("micro_batch", thirds), correction)
    whole = own.replay(rows, correction)
    assert by_column.logged == by_size.logged
    assert by_size.logged["mis_batch_norm_factor"] != whole.logged["mis_batch_norm_factor"]
    assert by_column.weights is not None and by_size.weights is not None
    np.testing.assert_array_equal(np.concatenate(by_column.weights), np.concatenate(by_size.weights))


def test_micro_batches_need_not_be_adjacent() -> None:
    own, rows = load_framework("slime"), table("moe", 0)
    correction = own.correction(shipped())
    order = np.random.default_rng(0).permutation(len(rows))
    grouped = own.replay(rows, correction, ReplayOptions(4))
    named = rows.append_column("micro_batch", pa.array([str(row // 4) for row in range(len(rows))]))
    shuffled = own.replay(named.take(order), correction)
    assert shuffled.weights is not None and grouped.weights is not None
    for place, row in enumerate(order):
        np.testing.assert_allclose(shuffled.weights[place], grouped.weights[row], rtol=1e-12)
        np.testing.assert_array_equal(shuffled.keep[place], grouped.keep[row])


def test_the_loss_needs_a_current_policy() -> None:
    rows = table("dense", 0).drop_columns(["current_log_probs"])
    logged = load_framework("miles").replay(rows, find_preset("slime-mis")).logged
    assert "mis_kl" in logged
    assert not {"pg_loss", "loss", "ois", "ess_ratio"} & set(logged)


def test_column_names_of_slime_are_read() -> None:
    rows = table("dense", 0)
    own = rows.rename_columns([{"train_log_probs": "log_probs"}.get(name, name) for name in rows.column_names])
    correction = find_preset("slime-mis")
    assert (
        load_framework("slime").replay(own, correction).logged
        == load_framework("slime").replay(rows, correction).logged
    )


def test_documented_names_are_logged_by_the_code() -> None:
    logged = {item.name for item in slime.METRICS}
    assert set(slime.DOCUMENTED_NAMES.values()) <= logged
    earlier = {name for version in VERSIONS for name in version.names.values()}
    never_logged = {name for name in slime.DOCUMENTED_NAMES if name not in logged | earlier}
    assert never_logged == {name for name in slime.DOCUMENTED_NAMES if name.startswith("mismatch_")}


def test_every_logged_name_has_a_description() -> None:
    meant = {meaning.name: meaning for meaning in load_framework("slime@seed").meanings()}
    assert {f"train/{item.name}" for item in slime.METRICS} - {
        "train/train_rollout_kl",
        "train/ess_ratio",
    } <= meant.keys()
    assert meant["train/mismatch_kl"].when == "never: only documented, the code logs train/mis_kl"
    assert meant["train/mismatch_kl"].quantity == meant["train/mis_kl"].quantity
    assert meant["train/mis_ratio_mean_after_mis"].until == "2025-11"
    assert meant["train/mis_truncate_fraction"].when == "until v0.2.1, the code logs train/mis_tis_truncate_fraction"
    assert "rollout" in {item.name: item for item in load_framework("slime").meanings()}["train/mis_kl"].reduction


@pytest.mark.parametrize("size", [None, 3, 8])
def test_normalization_counts_empty_sequences(size: int | None) -> None:
    """Some sequences lack a valid token. The expected weights are slime's own (float64)."""
    name = "bn-seq-clip" if size is None else f"bn-seq-clip-mb{size}"
    correction = framework("slime_head").correction(correcting(configs()[name]))
    golden = pl.read_parquet(FOLDER / "sequences.parquet").filter(
        (pl.col("batch") == "edge") & (pl.col("config") == name) & (pl.col("dtype") == "float64")
    )
    empty = 0
    for step, wanted in golden.select("step", "weight_sum").iter_rows():
        rows = table("edge", step)
        rollout, train, mask = (
            rows[column].to_pylist() for column in ("rollout_log_probs", "train_log_probs", "response_mask")
        )
        empty += sum(not any(flags) for flags in mask)
        weights, _ = mm.weights(rollout, train, mask, correction, micro_batches=size)
        found = [sum(row) for row in weights]
        assert found == pytest.approx(wanted, rel=1e-9)
        dump, mean = rows.drop_columns(["batch"]), sum(wanted) / sum(map(sum, mask))
        (run,) = mm.analyze(dump, corrections=correction, micro_batch_size=size).runs.values()
        assert run.overall.corrections[correction.name]["weight_mean"].value == pytest.approx(mean, rel=1e-9)
        swept = mm.sweep(dump, correction=correction, vary={"weight.clip.1": [2.0, 10.0]}, micro_batch_size=size)
        points = swept.rows(swept.runs[0], swept.studies[0].name)
        assert points["weight_mean"][1] == pytest.approx(mean, rel=1e-9)
    assert empty


@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_analyze_replays_the_kl_loss_with_a_reference(kind: str) -> None:
    """The expected values are slime's own kl_loss and loss, with rollout log-probs as the reference (float64)."""
    config, rows = configs()[f"kl-{kind}"], table("dense", 0).drop_columns(["batch"])
    own = framework("slime_head")
    correction = own.correction(correcting(config) | config["loss"])
    golden = pl.read_parquet(FOLDER / "metrics.parquet").filter(
        (pl.col("impl") == "slime_head") & (pl.col("batch") == "dense") & (pl.col("step") == 0)
        & (pl.col("config") == f"kl-{kind}") & (pl.col("dtype") == "float64") & (pl.col("reducer") == "sample_mean")
    )  # fmt: skip
    wanted = dict(golden.select("metric", "value").iter_rows())
    dump = rows.append_column("ref_log_probs", rows["rollout_log_probs"])
    (run,) = mm.analyze(dump, corrections=correction, framework=own).runs.values()
    for name in ("kl_loss", "loss", "pg_loss"):
        assert run.logged[correction.name][name] == pytest.approx([wanted[name]], rel=2e-5), name
    without = mm.analyze(rows, corrections=correction, framework=own)
    (run,) = without.runs.values()
    assert "kl_loss" not in run.logged[correction.name] and "pg_loss" in run.logged[correction.name]
    assert f"{own.title} logs kl_loss, which is not computed: it needs ref_log_probs in every row" in without.warnings


def test_analyze_names_the_columns_opsm_needs() -> None:
    own, config = framework("slime_head"), configs()["opsm-0.01"]
    correction = own.correction(correcting(config) | config["loss"])
    result = mm.analyze(table("dense", 0).drop_columns(["batch"]), corrections=correction, framework=own)
    assert f"{own.title} logs opsm_clipfrac, which is not computed: it needs masked tokens" in result.warnings


def test_arguments_without_a_bound_are_written_in_old_versions() -> None:
    own = load_framework("slime@2025-11")
    keys, unsaid = own.native(own.correction({"use_rs": True}))  # without use_tis, mis.py only measures
    assert (keys["use_tis"], keys["use_rs"], unsaid) == (False, True, [])
    assert not own.correction(keys).gates
