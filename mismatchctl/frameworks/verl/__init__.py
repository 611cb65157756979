"""Adapter of verl: recognition of its configurations, factories of configurations, and dump layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.adapter import Adapter, File, FileLayout, Row
from mismatchctl.frameworks.verl.configuration import (
    ACTOR_BLOCK,
    ACTOR_CAP,
    BLOCK,
    find_value,
    read_correction,
    with_rllm,
)
from mismatchctl.frameworks.verl.framework import Verl
from mismatchctl.frameworks.verl.versions import KEYS, VERSIONS, VerlVersion, find_version
from mismatchctl.io.scripts import UNPACKING_NOT_READ, PythonCall

_SHARED_KEYS = {"loss_type"}
"""Keys that do not identify verl outside of its block, since other frameworks use them too."""


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return the version of a configuration, or None without keys of rollout correction.

    Only versions that know most of its keys are considered. The newest version with an effect is preferred, then the
    newest version that accepts the keys, then the newest version, whose error is reported.
    """
    native = with_rllm(native)
    section, versions = _find_section(native)
    elsewhere = isinstance(find_value(native, *ACTOR_BLOCK), Mapping) or find_value(native, *ACTOR_CAP) is not None
    if elsewhere and not section.keys() & KEYS:
        return VERSIONS[-1].name
    if section is native and section.keys() & KEYS <= _SHARED_KEYS:
        return None
    known = {version.name: len(section.keys() & version.keys.keys()) for version in versions}
    most = max(known.values(), default=0)
    if not most and BLOCK not in _find_outer_block(native):
        return None
    candidates = [version for version in reversed(versions) if known[version.name] == most]
    return max(
        candidates, key=lambda version: _rank_version(native, version)
    ).name  # the first of several is the newest


def _rank_version(native: Mapping[str, Any], version: VerlVersion) -> int:
    """Rank a version: 0 if it rejects the configuration, 1 if it accepts it, 2 if the configuration has an effect."""
    try:
        correction = read_correction(native, version)
    except ConfigError:
        return 0
    return 1 + (correction != Correction(name=correction.name, about=correction.about))


def _find_outer_block(native: Mapping[str, Any]) -> Mapping[str, Any]:
    algorithm = native.get("algorithm")
    return algorithm if isinstance(algorithm, Mapping) else native


def _find_section(native: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[VerlVersion]]:
    """Find the keys of rollout correction, and the versions that look for them at this place."""
    outer = _find_outer_block(native)
    blocks = [version for version in VERSIONS if version.dialect != "flat"]
    flat = [version for version in VERSIONS if version.dialect == "flat"]
    if BLOCK in outer:
        block = outer[BLOCK]
        return (block if isinstance(block, Mapping) else {}), blocks
    if outer is not native:
        return outer, flat
    level = native.get("rollout_is", True)  # a switch in the flat keys, a level or null in all others
    return native, [*(flat if isinstance(level, bool) else []), *blocks]


CONFIG_CLASS = "RolloutCorrectionConfig"
Keys = dict[str, Any]


@dataclass(frozen=True)
class Factory:
    """A factory: its parameters with their defaults, and the keys that it sets."""

    defaults: Mapping[str, Any]
    keys: Callable[[Mapping[str, Any]], Keys]


def _weight_factory(level: str, **more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        return {"rollout_is": level, "rollout_is_threshold": given["threshold"], "rollout_rs": None, **more}

    return Factory({"threshold": 2.0}, keys)


def _ratio_rejection_factory(is_level: str | None, level: str, defaults: Keys, **more: Any) -> Factory:
    """Create a factory for rejection by the ratio, until 2026."""

    def keys(given: Mapping[str, Any]) -> Keys:
        upper = given.get("rs_threshold", given.get("threshold"))
        said: Keys = {"rollout_is": is_level, "rollout_rs": level, "rollout_rs_threshold": upper}
        said["rollout_rs_threshold_lower"] = given.get("rs_threshold_lower", 0 if "threshold" in given else None)
        if is_level is not None:
            said["rollout_is_threshold"] = given.get("is_threshold", given.get("threshold"))
        if "veto_threshold" in given:
            said["rollout_token_veto_threshold"] = given["veto_threshold"]
        return said | more

    return Factory(defaults, keys)


def _option_rejection_factory(is_level: str | None, option: str, threshold: Any, **more: Any) -> Factory:
    """Create a factory for rejection by an estimator, since 2026."""

    def keys(given: Mapping[str, Any]) -> Keys:
        said: Keys = {"rollout_is": is_level, "rollout_rs": option, "rollout_rs_threshold": given["rs_threshold"]}
        return said | ({"rollout_is_threshold": given["is_threshold"]} if is_level else {}) | more

    return Factory({"rs_threshold": threshold} | ({"is_threshold": 2.0} if is_level else {}), keys)


def _icepop_factory(**more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        threshold = f"{given['threshold_lower']}_{given['threshold']}"
        return {"rollout_is": "token", "rollout_is_threshold": threshold, "rollout_rs": None, **more}

    return Factory({"threshold": 5.0, "threshold_lower": 0.5}, keys)


def _empty_factory(**more: Any) -> Factory:
    return Factory({}, lambda given: {"rollout_is": None, "rollout_rs": None, **more})


_VETO_DEFAULTS = {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4}
_SEQUENCE_DEFAULTS = {"is_threshold": 2.0, "rs_threshold": 2.0, "rs_threshold_lower": None}
_OLD_PPO_KEYS: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": False}
_OLD_PURE_KEYS: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
_PPO_KEYS: Keys = {"bypass_mode": True, "use_policy_gradient": False}
_PURE_KEYS: Keys = {"bypass_mode": True, "use_policy_gradient": True}
_CLIP_KEYS: Keys = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE_KEYS: Keys = {"bypass_mode": True, "loss_type": "reinforce"}
_GEOMETRIC_REJECTION = "seq_mean_k1", "0.999_1.001"
_K3_REJECTION = "seq_mean_k3", 0.01

FACTORIES: dict[str, dict[str, Factory]] = {
    "2026-08": {
        "decoupled_token_is": _weight_factory("token"),
        "decoupled_seq_is": _weight_factory("sequence"),
        "decoupled_token_icepop": _icepop_factory(),
        "decoupled_seq_is_rs": _option_rejection_factory("sequence", "seq_sum_k1", "0.5_2.0"),
        "decoupled_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION),
        "decoupled_geo_rs_seq_tis": _option_rejection_factory("sequence", *_GEOMETRIC_REJECTION),
        "decoupled_geo_rs_token_tis": _option_rejection_factory("token", *_GEOMETRIC_REJECTION),
        "decoupled_k3_rs": _option_rejection_factory(None, *_K3_REJECTION),
        "decoupled_k3_rs_seq_tis": _option_rejection_factory("sequence", *_K3_REJECTION),
        "decoupled_k3_rs_token_tis": _option_rejection_factory("token", *_K3_REJECTION),
        "bypass_ppo_clip": _empty_factory(**_CLIP_KEYS),
        "bypass_ppo_clip_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION, **_CLIP_KEYS),
        "bypass_ppo_clip_k3_rs": _option_rejection_factory(None, *_K3_REJECTION, **_CLIP_KEYS),
        "bypass_pg_is": _weight_factory("sequence", **_REINFORCE_KEYS),
        "bypass_pg_token_icepop": _icepop_factory(**_REINFORCE_KEYS),
        "bypass_pg_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "bypass_pg_geo_rs_seq_tis": _option_rejection_factory("sequence", *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "bypass_pg_geo_rs_token_tis": _option_rejection_factory("token", *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "disabled": _empty_factory(),
    },
    "2025-11-25": {
        "decoupled_token_is": _weight_factory("token"),
        "decoupled_seq_is": _weight_factory("sequence"),
        "decoupled_seq_is_rs": _ratio_rejection_factory("sequence", "sequence", _SEQUENCE_DEFAULTS),
        "decoupled_geo_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS),
        "ppo_is_bypass": _weight_factory("token", **_PPO_KEYS),
        "pg_is": _weight_factory("sequence", **_PURE_KEYS),
        "pg_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS, **_PURE_KEYS),
        "disabled": _empty_factory(),
    },
    "2025-11-07": {
        "token_is": _weight_factory("token"),
        "token_tis": _weight_factory("token"),
        "seq_is": _weight_factory("sequence"),
        "seq_is_rs": _ratio_rejection_factory("sequence", "sequence", _SEQUENCE_DEFAULTS),
        "seq_mis": _ratio_rejection_factory("sequence", "sequence", {"threshold": 2.0}),
        "geo_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS),
        "geo_mis": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS | {"rs_threshold_lower": 0.999}),
        "ppo_is_bypass": _weight_factory("token", **_OLD_PPO_KEYS),
        "pure_is": _weight_factory("sequence", **_OLD_PURE_KEYS),
        "disabled": _empty_factory(),
    },
}
"""Factories by version, newest first. 2025-11-12 has the factories of 2025-11-25."""


def expand_factory(version: str, name: str) -> Keys:
    factory = FACTORIES[version][name]
    return {"rollout_correction": factory.keys(factory.defaults)}


def read_call(call: PythonCall) -> Keys:
    if call.computed:
        raise ConfigError(f"line {call.line}: {call.computed[0]} is not a plain value with a name")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {UNPACKING_NOT_READ}")
    return {"rollout_correction": _expand_call(call)}


def _expand_call(call: PythonCall) -> Keys:
    if not call.function:
        return call.given if call.partial else {"rollout_is": "sequence"} | call.given  # the default in Python
    known = [factories[call.function] for factories in FACTORIES.values() if call.function in factories]
    if not known:
        names = {name for factories in FACTORIES.values() for name in factories}
        raise ConfigError(
            f"line {call.line}: {CONFIG_CLASS}: unknown function {call.function}{suggestion(call.function, names)}"
        )
    for factory in known:
        if call.given.keys() <= factory.defaults.keys():
            return factory.keys(dict(factory.defaults) | call.given)
    wanted = ", ".join(known[0].defaults)
    raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} takes {wanted or 'nothing'}")


def _read_rows(file: File) -> Iterator[Row]:
    raise DataError(
        "is a pickle of verl's and tensordict's classes, which is not loaded because that executes code",
        file=str(file.path),
        remedy="run docs/integrations/verl_to_parquet.py on it where verl is installed",
    )


LAYOUT = FileLayout(
    framework="verl",
    columns={
        "rollout_log_probs": "rollout_log_probs",
        "train_log_probs": "old_log_probs",
        "response_mask": "loss_mask, else response_mask",
        "token_ids": "responses",
        "ref_log_probs": "ref_log_prob",
        "advantages": "advantages",
    },
    padding="right",
    mask="1 on sampled tokens; rejection sampling writes its result into response_mask, not into loss_mask",
    patterns=("*.dp", "tq_batch.pt"),
    rows=_read_rows,
)


TEXT_LAYOUT = FileLayout(
    framework="verl-rollout-data",
    columns={},
    mask="none",
    patterns=("*.jsonl",),
    rows=lambda file: iter(()),
    remedy="to get log-probs, set actor_rollout_ref.rollout.calculate_log_probs=True and record the batch "
    "(docs/integrations/verl.md)",
    recognizes=lambda file: {"input", "output", "score", "step"} <= file.first_line().keys(),
)
"""The files of `trainer.rollout_data_dir`, which contain only text."""


ADAPTER = Adapter(
    name="verl",
    versions=tuple(version.name for version in reversed(VERSIONS)),
    load=lambda version: Verl(find_version(version)),
    recognize=recognize,
    columns=Verl.columns,
    layouts=(LAYOUT, TEXT_LAYOUT),
    classes={CONFIG_CLASS: read_call},
    factory=expand_factory,
)
