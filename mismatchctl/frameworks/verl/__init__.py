"""Adapter of verl: recognition of its configurations, factories of configurations, and dump layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.adapter import Adapter, File, Row, read_layout
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
    """A factory: the values of rollout_is and rollout_rs, other keys, and its parameters with their defaults."""

    level: str | None
    rejection: str | None
    fixed: Keys
    parameters: Keys

    def keys(self, given: Keys) -> Keys:
        values = self.parameters | given
        made: Keys = {"rollout_is": self.level, "rollout_rs": self.rejection}
        if self.level is not None:
            made["rollout_is_threshold"] = values.get("is_threshold", values.get("threshold"))
        if self.rejection is not None:
            made["rollout_rs_threshold"] = values.get("rs_threshold", values.get("threshold"))
        if "threshold_lower" in values:  # of IcePop
            made["rollout_is_threshold"] = f"{values['threshold_lower']}_{values['threshold']}"
        names = {"rs_threshold_lower": "rollout_rs_threshold_lower", "veto_threshold": "rollout_token_veto_threshold"}
        return made | {key: values[name] for name, key in names.items() if name in values} | self.fixed


def _make(level: str | None, rejection: str | None = None, fixed: Keys | None = None, /, **parameters: Any) -> Factory:
    return Factory(level, rejection, fixed or {}, parameters)


_VETO: Keys = {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4}
_SEQUENCE: Keys = {"is_threshold": 2.0, "rs_threshold": 2.0, "rs_threshold_lower": None}
_OLD_PPO: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": False}
_OLD_PURE: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
_PPO: Keys = {"bypass_mode": True, "use_policy_gradient": False}
_PURE: Keys = {"bypass_mode": True, "use_policy_gradient": True}
_CLIP: Keys = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE: Keys = {"bypass_mode": True, "loss_type": "reinforce"}
_K1, _K3 = "seq_mean_k1", "seq_mean_k3"
_GEO: Keys = {"rs_threshold": "0.999_1.001"}
_GEO_TIS: Keys = _GEO | {"is_threshold": 2.0}

FACTORIES: dict[str, dict[str, Factory]] = {
    "2026-08": {
        "decoupled_token_is": _make("token", threshold=2.0),
        "decoupled_seq_is": _make("sequence", threshold=2.0),
        "decoupled_token_icepop": _make("token", threshold=5.0, threshold_lower=0.5),
        "decoupled_seq_is_rs": _make("sequence", "seq_sum_k1", rs_threshold="0.5_2.0", is_threshold=2.0),
        "decoupled_geo_rs": _make(None, _K1, **_GEO),
        "decoupled_geo_rs_seq_tis": _make("sequence", _K1, **_GEO_TIS),
        "decoupled_geo_rs_token_tis": _make("token", _K1, **_GEO_TIS),
        "decoupled_k3_rs": _make(None, _K3, rs_threshold=0.01),
        "decoupled_k3_rs_seq_tis": _make("sequence", _K3, rs_threshold=0.01, is_threshold=2.0),
        "decoupled_k3_rs_token_tis": _make("token", _K3, rs_threshold=0.01, is_threshold=2.0),
        "bypass_ppo_clip": _make(None, None, _CLIP),
        "bypass_ppo_clip_geo_rs": _make(None, _K1, _CLIP, **_GEO),
        "bypass_ppo_clip_k3_rs": _make(None, _K3, _CLIP, rs_threshold=0.01),
        "bypass_pg_is": _make("sequence", None, _REINFORCE, threshold=2.0),
        "bypass_pg_token_icepop": _make("token", None, _REINFORCE, threshold=5.0, threshold_lower=0.5),
        "bypass_pg_geo_rs": _make(None, _K1, _REINFORCE, **_GEO),
        "bypass_pg_geo_rs_seq_tis": _make("sequence", _K1, _REINFORCE, **_GEO_TIS),
        "bypass_pg_geo_rs_token_tis": _make("token", _K1, _REINFORCE, **_GEO_TIS),
        "disabled": _make(None),
    },
    "2025-11-25": {
        "decoupled_token_is": _make("token", threshold=2.0),
        "decoupled_seq_is": _make("sequence", threshold=2.0),
        "decoupled_seq_is_rs": _make("sequence", "sequence", **_SEQUENCE),
        "decoupled_geo_rs": _make(None, "geometric", **_VETO),
        "ppo_is_bypass": _make("token", None, _PPO, threshold=2.0),
        "pg_is": _make("sequence", None, _PURE, threshold=2.0),
        "pg_rs": _make(None, "geometric", _PURE, **_VETO),
        "disabled": _make(None),
    },
    "2025-11-07": {
        "token_is": _make("token", threshold=2.0),
        "token_tis": _make("token", threshold=2.0),
        "seq_is": _make("sequence", threshold=2.0),
        "seq_is_rs": _make("sequence", "sequence", **_SEQUENCE),
        "seq_mis": _make("sequence", "sequence", {"rollout_rs_threshold_lower": 0}, threshold=2.0),
        "geo_rs": _make(None, "geometric", **_VETO),
        "geo_mis": _make(None, "geometric", **(_VETO | {"rs_threshold_lower": 0.999})),
        "ppo_is_bypass": _make("token", None, _OLD_PPO, threshold=2.0),
        "pure_is": _make("sequence", None, _OLD_PURE, threshold=2.0),
        "disabled": _make(None),
    },
}
"""Factories by version, newest first. 2025-11-12 has the factories of 2025-11-25."""


def expand_factory(version: str, name: str) -> Keys:
    factory = FACTORIES[version][name]
    return {"rollout_correction": factory.keys({})}


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
        if call.given.keys() <= factory.parameters.keys():
            return factory.keys(call.given)
    wanted = ", ".join(known[0].parameters)
    raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} takes {wanted or 'nothing'}")


def _read_rows(file: File) -> Iterator[Row]:
    raise DataError(
        "is a pickle of verl's and tensordict's classes, which is not loaded because that executes code",
        file=str(file.path),
        remedy="run docs/integrations/verl_to_parquet.py on it where verl is installed",
    )


LAYOUT = read_layout(__file__, "verl", _read_rows)
TEXT_LAYOUT = read_layout(
    __file__,
    "verl-rollout-data",
    lambda file: iter(()),
    lambda file: {"input", "output", "score", "step"} <= file.first_line().keys(),
)


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
