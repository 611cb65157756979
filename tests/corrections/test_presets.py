"""Every preset on small sequences, with results computed by hand."""

import json

import numpy as np
import pytest
import yaml

from mismatchctl.core.batch import Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.core.schema import COLUMNS_BY_NAME
from mismatchctl.corrections.application import CorrectedBlock, apply_correction
from mismatchctl.corrections.presets import (
    classify_severity,
    describe_traits,
    parse_correction,
    suitable_severity,
)
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import DEFAULT_CORRECTIONS, column_aliases, find_preset, load_presets

SEQUENCES = {
    "quiet": [1.0, 1.0],
    "mild": [1.1, 0.95],  # product 1.045, geometric mean 1.022, mean K3 0.003
    "mixed": [3.0, 0.6],  # product 1.8
    "high": [1.6, 1.9],  # product 3.04
    "low": [0.4, 0.25],  # product 0.1
    "veto": [5e-5, 20000.0],  # product 1, so only a veto or K3 rejects it
    "just_low": [0.9990005, 0.9990005],  # between 0.999 and 1/1.001
    "just_high": [1.0010005, 1.0010005],  # between 1.001 and 1/0.999
    "empty": [],
}
AGED = {"high": 0, "veto": 1}
"""Sequences that an earlier version than 5 sampled."""
RATIOS = np.concatenate([np.array(ratios) for ratios in SEQUENCES.values()])


def _applied(name: str) -> CorrectedBlock:
    correction = find_preset(name)
    segments = Segments.from_lengths([len(ratios) for ratios in SEQUENCES.values()])
    rollout = np.full(segments.tokens, -30.0)
    moved, still = rollout + np.log(RATIOS), rollout
    train, current = (still, moved) if "current/rollout" in correction.sources else (moved, still)
    versions = {"rollout_version": np.array([AGED.get(name, 5) for name in SEQUENCES]), "train_version": np.full(9, 5)}
    batch = TokenBatch(segments, rollout, train, current=current, columns=versions)
    pairs = {
        "train/rollout": Ratios(train, rollout, segments),
        "current/rollout": Ratios(current, rollout, segments),
    }
    return apply_correction(correction, pairs, batch)


def _by_sequence(values: np.ndarray) -> dict[str, list[float]]:
    ends = np.cumsum([len(ratios) for ratios in SEQUENCES.values()])
    return dict(zip(SEQUENCES, (part.tolist() for part in np.split(values, ends[:-1])), strict=True))


NOTHING: set[str] = set()
OUTSIDE_GEOMETRIC = {"mild", "mixed", "high", "low"}
REJECTED = {
    "none": NOTHING,
    "disabled": NOTHING,
    "token_is": NOTHING,
    "token_tis": NOTHING,
    "seq_is": NOTHING,
    "seq_is_rs": {"high", "low"},
    "seq_mis": {"high"},
    "geo_rs": OUTSIDE_GEOMETRIC | {"veto", "just_low", "just_high"},
    "geo_mis": OUTSIDE_GEOMETRIC | {"veto", "just_high"},
    "ppo_is_bypass": NOTHING,
    "pure_is": NOTHING,
    "pg_is": NOTHING,
    "pg_rs": OUTSIDE_GEOMETRIC | {"veto", "just_low", "just_high"},
    "decoupled_token_is": NOTHING,
    "decoupled_seq_is": NOTHING,
    "decoupled_token_icepop": NOTHING,
    "decoupled_seq_is_rs": {"high", "low"},
    # k1 has the opposite sign, so train/rollout is kept from 1/1.001 to 1/0.999. There is no veto.
    "decoupled_geo_rs": OUTSIDE_GEOMETRIC | {"just_low"},
    "decoupled_geo_rs_seq_tis": OUTSIDE_GEOMETRIC | {"just_low"},
    "decoupled_geo_rs_token_tis": OUTSIDE_GEOMETRIC | {"just_low"},
    "decoupled_k3_rs": {"mixed", "high", "low", "veto"},
    "decoupled_k3_rs_seq_tis": {"mixed", "high", "low", "veto"},
    "decoupled_k3_rs_token_tis": {"mixed", "high", "low", "veto"},
    "bypass_ppo_clip": NOTHING,
    "bypass_ppo_clip_geo_rs": OUTSIDE_GEOMETRIC | {"just_low"},
    "bypass_ppo_clip_k3_rs": {"mixed", "high", "low", "veto"},
    "bypass_pg_is": NOTHING,
    "bypass_pg_token_icepop": NOTHING,
    "bypass_pg_geo_rs": OUTSIDE_GEOMETRIC | {"just_low"},
    "bypass_pg_geo_rs_seq_tis": OUTSIDE_GEOMETRIC | {"just_low"},
    "bypass_pg_geo_rs_token_tis": OUTSIDE_GEOMETRIC | {"just_low"},
    "tis-truncate": NOTHING,
    "tis-clip": NOTHING,
    "slime-tis": NOTHING,
    "icepop": NOTHING,
    "miles-moe-1": OUTSIDE_GEOMETRIC | {"just_high"},
    "miles-moe-2": OUTSIDE_GEOMETRIC | {"just_high"},
    "miles-moe-3": OUTSIDE_GEOMETRIC | {"just_high"},
    "miles-moe-1-veto": OUTSIDE_GEOMETRIC | {"veto", "just_high"},
    "miles-moe-2-veto": OUTSIDE_GEOMETRIC | {"veto", "just_high"},
    "miles-moe-3-veto": OUTSIDE_GEOMETRIC | {"veto", "just_high"},
    "miles-moe-4": NOTHING,
    "miles-dense-1": NOTHING,
    "miles-dense-2": NOTHING,
    "miles-dense-3": {"high", "low", "veto"},
    "miles-dense-4": {"high", "low", "veto"},
    "miles-mis": OUTSIDE_GEOMETRIC | {"veto", "just_high"},
    "staleness-drop": {"high"},
    "trust-region-mask": {"mixed", "high", "low", "veto"},
}
TOKENS_KEPT = {
    "slime-mis": {"mixed": 1, "low": 0, "veto": 0},
    "mis": {"mixed": 1, "low": 0, "veto": 0},
    "prefix-product": {"mixed": 1, "high": 1, "low": 0, "veto": 1},  # a later token can move the sum inside again
    "prefix-minimum": {"veto": 0},
    "position-weighted": {"mixed": 0, "high": 0, "low": 0, "veto": 0},  # the second within 0.729..1.371
    "stochastic-rejection": {"mixed": 1, "veto": 1},  # a ratio of 3 is kept in two of three cases, not under this seed
}

TRUNCATED = {"mild": [1.1, 0.95], "mixed": [2.0, 0.6], "high": [1.6, 1.9], "veto": [5e-5, 2.0]}
PRODUCT = {
    "mild": [1.045, 1.045],
    "mixed": [1.8, 1.8],
    "high": [2.0, 2.0],
    "low": [0.1, 0.1],
    "veto": [1.0, 1.0],
}
ICEPOP = {"mild": [1.1, 0.95], "mixed": [3.0, 0.6], "low": [0.0, 0.0], "veto": [0.0, 0.0]}
CLIPPED = {"mixed": [1.5, 0.6], "high": [1.5, 1.5], "low": [0.5, 0.5], "veto": [0.5, 1.5]}
CAPPED = {"mixed": [1.5, 0.6], "high": [1.5, 1.5], "low": [0.4, 0.25], "veto": [5e-5, 1.5]}
WEIGHTS = {
    "token_is": TRUNCATED,
    "token_tis": TRUNCATED,
    "seq_is": PRODUCT,
    "seq_is_rs": PRODUCT,
    "seq_mis": PRODUCT,
    "pure_is": PRODUCT,
    "pg_is": PRODUCT,
    "decoupled_token_is": TRUNCATED,
    "decoupled_seq_is": PRODUCT,
    "decoupled_token_icepop": ICEPOP,
    "decoupled_seq_is_rs": PRODUCT,
    "decoupled_geo_rs_seq_tis": PRODUCT,
    "decoupled_geo_rs_token_tis": TRUNCATED,
    "decoupled_k3_rs_seq_tis": PRODUCT,
    "decoupled_k3_rs_token_tis": TRUNCATED,
    "bypass_pg_is": PRODUCT,
    "bypass_pg_token_icepop": ICEPOP,
    "bypass_pg_geo_rs_seq_tis": PRODUCT,
    "bypass_pg_geo_rs_token_tis": TRUNCATED,
    "slime-mis": TRUNCATED,
    "tis-truncate": TRUNCATED,
    "tis-clip": {"mixed": [2.0, 0.6], "low": [0.5, 0.5], "veto": [0.5, 2.0]},
    "mis": {"mixed": [3.0, 0.6], "low": [0.4, 0.25], "veto": [5e-5, 20000.0]},
    "slime-tis": TRUNCATED,
    "icepop": {"mixed": [0.0, 0.6], "low": [0.4, 0.25], "veto": [5e-5, 0.0]},
    "miles-moe-1": {"mixed": [2.0, 0.6], "low": [0.5, 0.5], "veto": [0.5, 2.0]},
    "miles-moe-2": CLIPPED,
    "miles-moe-3": CLIPPED,
    "miles-moe-1-veto": {"mixed": [2.0, 0.6], "low": [0.5, 0.5], "veto": [0.5, 2.0]},
    "miles-moe-2-veto": CLIPPED,
    "miles-moe-3-veto": CLIPPED,
    "miles-moe-4": CLIPPED,
    "miles-dense-2": TRUNCATED,
    "miles-dense-3": TRUNCATED,
    "miles-dense-4": TRUNCATED,
    "miles-mis": CAPPED,
}
NORMALIZED = {
    "slime-mis", "miles-moe-1", "miles-moe-1-veto", "miles-moe-2", "miles-moe-2-veto", "miles-dense-4", "miles-mis",
}  # fmt: skip


TABLED = [name for name, item in load_presets().items() if item.framework in ("", "verl", "slime", "miles")]
"""Presets of verl and slime. test_peers.py covers the presets of other frameworks."""


def test_every_preset_has_expected_values() -> None:
    assert set(TABLED) == set(REJECTED) | set(TOKENS_KEPT)
    weighted = {name for name in TABLED if find_preset(name).weight is not None}
    assert weighted == set(WEIGHTS)


@pytest.mark.parametrize("name", REJECTED)
def test_presets_reject_the_expected_sequences(name: str) -> None:
    kept = _applied(name).kept.counts
    rejected = {sequence for sequence, left in zip(SEQUENCES, kept, strict=True) if left == 0 and sequence != "empty"}
    assert rejected == REJECTED[name]
    assert set(kept) <= {0.0, 2.0}


@pytest.mark.parametrize("name", TOKENS_KEPT)
def test_presets_keep_the_expected_tokens(name: str) -> None:
    kept = dict(zip(SEQUENCES, _applied(name).kept.counts, strict=True))
    everything = {sequence: len(ratios) for sequence, ratios in SEQUENCES.items()}
    assert kept == everything | TOKENS_KEPT[name]


@pytest.mark.parametrize("name", WEIGHTS)
def test_presets_give_the_expected_weights(name: str) -> None:
    weights = _by_sequence(_applied(name).token_weights())
    for sequence, expected in WEIGHTS[name].items():
        assert weights[sequence] == pytest.approx(expected, rel=1e-12), sequence


def test_the_log_ratio_is_clamped_before_the_sum_in_2026_and_after_it_in_2025() -> None:
    segments = Segments(np.array([0, 2]))
    rollout = np.full(2, -40.0)
    batch = TokenBatch(segments, rollout, rollout + np.array([25.0, -21.0]))
    pairs = {"train/rollout": Ratios(batch.train, batch.rollout, segments)}
    kept = {
        name: apply_correction(find_preset(name), pairs, batch).kept.counts.tolist()
        for name in ("seq_is_rs", "decoupled_seq_is_rs")
    }
    assert kept == {"seq_is_rs": [0], "decoupled_seq_is_rs": [2]}


def test_only_mask_mode_keeps_the_nominal_batch() -> None:
    masked, rejected = _applied("mis"), _applied("slime-mis")
    assert masked.counted.counts.sum() == len(RATIOS) > masked.kept.counts.sum()
    assert rejected.counted.counts.sum() == rejected.kept.counts.sum() == 11


def test_normalized_presets_have_mean_weight_one() -> None:
    for name in TABLED:
        weight = find_preset(name).weight
        normalized = weight is not None and weight.normalize != "none"
        assert normalized == (name in NORMALIZED), name
        if weight is not None and normalized:
            assert (weight.normalize, weight.normalize_over) == ("token", "micro_batch")


def test_presets_set_the_expected_losses() -> None:
    losses = {name: find_preset(name).loss for name in TABLED}
    reinforce = {"pure_is", "pg_is", "pg_rs", *(name for name in losses if name.startswith("bypass_pg_"))}
    bypass = {"ppo_is_bypass", *(name for name in losses if name.startswith("bypass_ppo_"))}
    for name, loss in losses.items():
        expected = "policy_gradient" if name in reinforce else "ppo_bypass" if name in bypass else "ppo"
        assert loss == expected, name
        sources = find_preset(name).sources
        assert sources <= ({"current/rollout"} if name in reinforce | bypass else {"train/rollout"}), name


@pytest.mark.parametrize("name", load_presets())
def test_presets_are_read_back_from_their_mapping(name: str) -> None:
    mapping = find_preset(name).to_mapping()
    assert parse_correction(mapping) == find_preset(name)
    assert parse_correction(json.loads(json.dumps(mapping))) == find_preset(name)
    assert parse_correction(yaml.safe_load(yaml.safe_dump(mapping))) == find_preset(name)


def test_every_preset_has_a_description_and_a_source() -> None:
    for name, item in load_presets().items():
        assert item.name == item.correction.name == name
        assert item.correction.about.endswith("."), name
        assert name == "none" or (item.source and bool(item.framework) == bool(item.version)), name


def test_an_alias_is_the_same_correction_under_its_own_name() -> None:
    alias, original = load_presets()["token_tis"], load_presets()["token_is"]
    assert alias.alias_of == "token_is"
    assert alias.correction.model_copy(update={"name": "token_is"}) == original.correction
    assert (alias.framework, alias.version, alias.source) == (
        original.framework,
        original.version,
        original.source,
    )


def test_default_corrections_are_presets() -> None:
    assert [find_preset(name).name for name in DEFAULT_CORRECTIONS] == list(DEFAULT_CORRECTIONS)


def test_an_unknown_preset_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'geo_rss' \(did you mean 'geo_rs'\?\)"):
        find_preset("geo_rss")


def test_column_aliases_point_to_schema_columns() -> None:
    aliases = column_aliases()
    assert set(aliases.values()) <= set(COLUMNS_BY_NAME)
    assert not set(aliases) & set(COLUMNS_BY_NAME)
    expected = {
        "old_log_probs": "train_log_probs",
        "prev_logprobs": "train_log_probs",
        "rollout_logprobs": "rollout_log_probs",
        "generation_logprobs": "rollout_log_probs",
        "inference_logprobs": "rollout_log_probs",
        "loss_mask": "response_mask",
        "loss_masks": "response_mask",
        "global_step": "step",
    }
    assert expected.items() <= aliases.items()


def test_ambiguous_names_are_not_aliases() -> None:
    assert not {"log_probs", "logprobs", "rewards", "score", "rollout_id", "tokens", "mask"} & set(column_aliases())


@pytest.mark.parametrize(
    ("name", "policies", "invariant", "recommended"),
    [
        ("none", "2", "no", "-"),
        ("token_is", "3", "yes", "by default for a moderate mismatch"),
        ("seq_is", "3", "yes", "only for a very small mismatch or a large batch"),
        (
            "ppo_is_bypass",
            "2",
            "no",
            "for most users: faster, without correction or measurement",
        ),
        ("pure_is", "2", "no", "only for a very small mismatch or a large batch"),
        ("slime-mis", "3", "yes", "if the mismatch is large"),
    ],
)
def test_preset_traits_match_the_documents(name: str, policies: str, invariant: str, recommended: str) -> None:
    """Policies and batch invariance come from verl's and slime's documents."""
    row = describe_traits(name, find_preset(name))
    assert (row["policies"], row["batch_invariant"], row["recommended"]) == (policies, invariant, recommended)


def test_severity_follows_the_effective_sample_size() -> None:
    shares = [1.0, 0.995, 0.989, 0.95, 0.89, 0.1]
    assert [classify_severity(share) for share in shares] == ["negligible"] * 2 + ["moderate"] * 2 + ["severe"] * 2
    names = ("none", "token_is", "seq_mis")
    assert [suitable_severity(find_preset(name)) for name in names] == ["negligible", "moderate", "severe"]
