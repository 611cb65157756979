"""Adapter of verl: recognize its configurations, read configuration factories and dumps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
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
from mismatchctl.io.yaml import read_data

_SHARED_KEYS = {"loss_type"}
"""Keys that do not identify verl outside of its block, since other frameworks use them too."""


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return the version of a configuration, or None if it has no key of rollout correction.

    Only versions that know most of its keys are considered. The order of preference is: the newest version with an
    effect, the newest version that accepts the keys, the newest version.
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
    """Find the keys of rollout correction, and the versions that read them at this place."""
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


@cache
def _read_factories() -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = read_data(Path(__file__).with_name("factories.yaml"))
    return found


def _expand_factory(factory: list[Any], given: Keys) -> Keys:
    """Return the keys that a factory of factories.yaml sets, given some of its parameters."""
    level, rejection, fixed, parameters = factory
    values = parameters | given
    made: Keys = {"rollout_is": level, "rollout_rs": rejection}
    if level is not None:
        made["rollout_is_threshold"] = values.get("is_threshold", values.get("threshold"))
    if rejection is not None:
        made["rollout_rs_threshold"] = values.get("rs_threshold", values.get("threshold"))
    if "threshold_lower" in values:  # of IcePop
        made["rollout_is_threshold"] = f"{values['threshold_lower']}_{values['threshold']}"
    names = {"rs_threshold_lower": "rollout_rs_threshold_lower", "veto_threshold": "rollout_token_veto_threshold"}
    made |= {key: values[name] for name, key in names.items() if name in values}
    return {**made, **fixed}


def read_call(call: PythonCall) -> Keys:
    if call.computed:
        raise ConfigError(f"line {call.line}: {call.computed[0]} is not a constant keyword argument")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {UNPACKING_NOT_READ}")
    return {"rollout_correction": _expand_call(call)}


def _expand_call(call: PythonCall) -> Keys:
    if not call.function:
        return call.given if call.partial else {"rollout_is": "sequence"} | call.given  # the default in Python
    every = _read_factories().values()
    known = [factories[call.function] for factories in every if call.function in factories]
    if not known:
        hint = suggestion(call.function, {name for factories in every for name in factories})
        raise ConfigError(f"line {call.line}: {CONFIG_CLASS}: unknown function {call.function}{hint}")
    for factory in known:
        if call.given.keys() <= factory[-1].keys():
            return _expand_factory(factory, call.given)
    wanted = ", ".join(known[0][-1])
    raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} takes {wanted or 'nothing'}")


def _read_rows(file: File) -> Iterator[Row]:
    raise DataError(
        "this file is a pickle with classes of verl and tensordict. mismatchctl does not load such pickles, because "
        "loading would execute code",
        file=str(file.path),
        remedy="convert the file with docs/integrations/verl_to_parquet.py, in an environment with verl",
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
    factory=lambda version, name: {"rollout_correction": _expand_factory(_read_factories()[version][name], {})},
)
