"""RolloutCorrectionConfig as it is called in Python: its factories, as the keys that they set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.texts.python_text import NOT_BROUGHT, PythonCall

CLASS = "RolloutCorrectionConfig"
Keys = dict[str, Any]


@dataclass(frozen=True)
class Factory:
    """A factory: its parameters with their defaults, and the keys that it sets."""

    defaults: Mapping[str, Any]
    keys: Callable[[Mapping[str, Any]], Keys]


def _is(level: str, **more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        return {"rollout_is": level, "rollout_is_threshold": given["threshold"], "rollout_rs": None, **more}

    return Factory({"threshold": 2.0}, keys)


def _ratio_rs(is_level: str | None, level: str, defaults: Keys, **more: Any) -> Factory:
    """Rejection by the ratio, until 2026."""

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


def _option_rs(is_level: str | None, option: str, threshold: Any, **more: Any) -> Factory:
    """Rejection by an estimator, since 2026."""

    def keys(given: Mapping[str, Any]) -> Keys:
        said: Keys = {"rollout_is": is_level, "rollout_rs": option, "rollout_rs_threshold": given["rs_threshold"]}
        return said | ({"rollout_is_threshold": given["is_threshold"]} if is_level else {}) | more

    return Factory({"rs_threshold": threshold} | ({"is_threshold": 2.0} if is_level else {}), keys)


def _icepop(**more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        threshold = f"{given['threshold_lower']}_{given['threshold']}"
        return {"rollout_is": "token", "rollout_is_threshold": threshold, "rollout_rs": None, **more}

    return Factory({"threshold": 5.0, "threshold_lower": 0.5}, keys)


def _bare(**more: Any) -> Factory:
    return Factory({}, lambda given: {"rollout_is": None, "rollout_rs": None, **more})


_VETO = {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4}
_BOTH = {"is_threshold": 2.0, "rs_threshold": 2.0, "rs_threshold_lower": None}
_OLD_PPO: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": False}
_OLD_PURE: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
_PPO: Keys = {"bypass_mode": True, "use_policy_gradient": False}
_PURE: Keys = {"bypass_mode": True, "use_policy_gradient": True}
_CLIP: Keys = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE: Keys = {"bypass_mode": True, "loss_type": "reinforce"}
_GEOMETRIC = "seq_mean_k1", "0.999_1.001"
_K3 = "seq_mean_k3", 0.01

FACTORIES: dict[str, dict[str, Factory]] = {
    "2026-08": {
        "decoupled_token_is": _is("token"),
        "decoupled_seq_is": _is("sequence"),
        "decoupled_token_icepop": _icepop(),
        "decoupled_seq_is_rs": _option_rs("sequence", "seq_sum_k1", "0.5_2.0"),
        "decoupled_geo_rs": _option_rs(None, *_GEOMETRIC),
        "decoupled_geo_rs_seq_tis": _option_rs("sequence", *_GEOMETRIC),
        "decoupled_geo_rs_token_tis": _option_rs("token", *_GEOMETRIC),
        "decoupled_k3_rs": _option_rs(None, *_K3),
        "decoupled_k3_rs_seq_tis": _option_rs("sequence", *_K3),
        "decoupled_k3_rs_token_tis": _option_rs("token", *_K3),
        "bypass_ppo_clip": _bare(**_CLIP),
        "bypass_ppo_clip_geo_rs": _option_rs(None, *_GEOMETRIC, **_CLIP),
        "bypass_ppo_clip_k3_rs": _option_rs(None, *_K3, **_CLIP),
        "bypass_pg_is": _is("sequence", **_REINFORCE),
        "bypass_pg_token_icepop": _icepop(**_REINFORCE),
        "bypass_pg_geo_rs": _option_rs(None, *_GEOMETRIC, **_REINFORCE),
        "bypass_pg_geo_rs_seq_tis": _option_rs("sequence", *_GEOMETRIC, **_REINFORCE),
        "bypass_pg_geo_rs_token_tis": _option_rs("token", *_GEOMETRIC, **_REINFORCE),
        "disabled": _bare(),
    },
    "2025-11-25": {
        "decoupled_token_is": _is("token"),
        "decoupled_seq_is": _is("sequence"),
        "decoupled_seq_is_rs": _ratio_rs("sequence", "sequence", _BOTH),
        "decoupled_geo_rs": _ratio_rs(None, "geometric", _VETO),
        "ppo_is_bypass": _is("token", **_PPO),
        "pg_is": _is("sequence", **_PURE),
        "pg_rs": _ratio_rs(None, "geometric", _VETO, **_PURE),
        "disabled": _bare(),
    },
    "2025-11-07": {
        "token_is": _is("token"),
        "token_tis": _is("token"),
        "seq_is": _is("sequence"),
        "seq_is_rs": _ratio_rs("sequence", "sequence", _BOTH),
        "seq_mis": _ratio_rs("sequence", "sequence", {"threshold": 2.0}),
        "geo_rs": _ratio_rs(None, "geometric", _VETO),
        "geo_mis": _ratio_rs(None, "geometric", _VETO | {"rs_threshold_lower": 0.999}),
        "ppo_is_bypass": _is("token", **_OLD_PPO),
        "pure_is": _is("sequence", **_OLD_PURE),
        "disabled": _bare(),
    },
}
"""By version, the newest first; 2025-11-12 has those of 2025-11-25."""


def factory_keys(version: str, name: str) -> Keys:
    """The configuration that a factory makes at a version."""
    factory = FACTORIES[version][name]
    return {"rollout_correction": factory.keys(factory.defaults)}


def keys_of(call: PythonCall) -> Keys:
    """The configuration that a call makes.

    Raises:
        ConfigError: no version has such a factory, or one with such parameters, or one of them is computed.
    """
    if call.computed:
        raise ConfigError(f"line {call.line}: {call.computed[0]} is no plain value with a name")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {NOT_BROUGHT}")
    return {"rollout_correction": _keys(call)}


def _keys(call: PythonCall) -> Keys:
    if not call.function:
        return call.given if call.partial else {"rollout_is": "sequence"} | call.given  # the default in Python
    known = [factories[call.function] for factories in FACTORIES.values() if call.function in factories]
    if not known:
        names = {name for factories in FACTORIES.values() for name in factories}
        raise ConfigError(f"line {call.line}: {CLASS} has no {call.function}{suggestion(call.function, names)}")
    for factory in known:
        if call.given.keys() <= factory.defaults.keys():
            return factory.keys(dict(factory.defaults) | call.given)
    wanted = ", ".join(known[0].defaults)
    raise ConfigError(f"line {call.line}: {CLASS}.{call.function} takes {wanted or 'nothing'}")
