"""Registry of frameworks: lookup by name, recognition of configurations, presets and column aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import PRESETS, Preset
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.adapter import Adapter, Framework
from mismatchctl.io.yaml import read_data

ADAPTER_MODULES = {
    "verl": "mismatchctl.frameworks.verl",
    "slime": "mismatchctl.frameworks.slime",
    "miles": "mismatchctl.frameworks.miles",
    "trl": "mismatchctl.frameworks.trl",
    "nemo-rl": "mismatchctl.frameworks.nemo_rl",
    "openrlhf": "mismatchctl.frameworks.openrlhf",
    "prime-rl": "mismatchctl.frameworks.prime_rl",
    "areal": "mismatchctl.frameworks.areal",
    "skyrl": "mismatchctl.frameworks.skyrl",
    "roll": "mismatchctl.frameworks.roll",
    "tinker-cookbook": "mismatchctl.frameworks.tinker_cookbook",
    "open-instruct": "mismatchctl.frameworks.open_instruct",
    "ms-swift": "mismatchctl.frameworks.ms_swift",
}
"""Module of each framework, imported when the framework is needed. A configuration that fits several is read as the
first of them."""

CONFIG_CLASSES = {"RolloutCorrectionConfig": "verl", "GRPOConfig": "trl", "Config": "tinker-cookbook"}
"""Python classes whose calls contain a configuration, and the framework of each."""

DEFAULT_CORRECTIONS = ("none", "token_tis", "seq_mis", "geo_rs", "miles-moe-2")
"""Compared when nobody says what to compare: one of each kind."""

_COMMON_ALIASES = {
    "sampling_logprobs": "rollout_log_probs",
    "old_logprobs": "train_log_probs",
    "train_logprobs": "train_log_probs",
    "current_logprobs": "current_log_probs",
    "training_step": "step",
    "train_step": "step",
}
"""Column names of nobody's. A name is here, or on a shelf, when it means one thing wherever it is used. Left out:
`logprobs`: the rollout engine's here, the trainer's there;
`prox_logp`: entry t is about token t + 1, while the columns beside it are about token t;
`rewards`, `score`: per token, per sequence, normalized or raw, depending on who writes them;
`response_tokens`, `completion_tokens`: ids here, a count or text there;
`attention_mask`, `mask`: cover the prompt or the padding only;
`weight_version`, `model_version`, `versions`: of the sampler or of the trainer, per group or per token;
`routed_experts` and its relatives: cover the prompt too."""


@cache
def find_adapter(name: str) -> Adapter:
    """The shelf of a framework, imported now.

    Raises:
        ConfigError: there is no such framework.
    """
    if name not in ADAPTER_MODULES:
        known = ", ".join(ADAPTER_MODULES)
        raise ConfigError(f"there is no framework {name!r}{suggestion(name, ADAPTER_MODULES)}: there are {known}")
    found: Adapter = import_module(ADAPTER_MODULES[name]).ADAPTER
    return found


@cache
def load_adapters() -> tuple[Adapter, ...]:
    """Every framework, in the order of `MODULES`. Imports all of them."""
    return tuple(map(find_adapter, ADAPTER_MODULES))


def load_framework(name: str) -> Framework:
    """A framework at a version, `NAME` or `NAME@VERSION`; without a version what the name means by itself.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    return find_adapter(framework).load(version)


def load_framework_for(native: Mapping[str, Any], name: str) -> Framework:
    """A framework by name, at the version that a configuration was written for where the name says none.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    found = find_adapter(framework)
    return found.load(version or found.recognize(native) or "")


def recognize(native: Mapping[str, Any]) -> str | None:
    """The framework at the version that a configuration in its own keys was written for; None if it is of none here."""
    versions = ((name, find_adapter(name).recognize(native)) for name in ADAPTER_MODULES)
    return next((f"{name}@{version}".rstrip("@") for name, version in versions if version is not None), None)


def data_file(framework: str, name: str) -> Path:
    """A data file in a framework's folder, which may not exist."""
    return Path(__file__).parent / ADAPTER_MODULES[framework].rpartition(".")[2] / name


@cache
def _read_releases(framework: str) -> list[dict[str, Any]]:
    """The content of a framework's presets.yaml.

    A release has `version`, `source`, and `presets` by name, each with `about` and `config`, a configuration in the
    framework's own keys; a preset may have a `source` of its own, an `alias`, what a document says otherwise
    (`documented`), and `reader`, the version whose reading of the keys is meant where that is another one.
    """
    place = data_file(framework, "presets.yaml")
    found: list[dict[str, Any]] = read_data(place) if place.exists() else []
    return found


def _has_preset(framework: str, name: str) -> bool:
    """Return True if a framework has a preset or alias of this name. The framework is not imported."""
    every = [each for release in _read_releases(framework) for each in release["presets"].items()]
    return any(name in (called, words.get("alias")) for called, words in every)


@cache
def _load_presets(name: str) -> tuple[Preset, ...]:
    """The presets of a framework, oldest release first, an alias after the preset that it names again."""
    own, found = find_adapter(name), []
    for release in _read_releases(name):
        for called, words in release["presets"].items():
            version = words.get("reader", release.get("reader", release["version"]))
            config = words["config"] if "config" in words else own.factory(version, called)
            made = own.load(version).correction(config)
            correction = Correction(
                name=called, about=words["about"], weight=made.weight, gates=made.gates, loss=made.loss
            )
            source = words.get("source", release["source"].format(name=called))
            documented = words.get("documented", "")
            found.append(Preset(correction, name, release["version"], source, documented=documented))
            found += [found[-1].alias(words["alias"])] if "alias" in words else []
    return tuple(found)


def _iterate_presets() -> Iterator[Preset]:
    """The generic presets, then those of each framework."""
    yield from PRESETS
    for name in ADAPTER_MODULES:
        yield from _load_presets(name)


@cache
def _index_presets() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for item in _iterate_presets():
        if item.name in found:
            raise ValueError(f"two presets are called {item.name}")
        found[item.name] = item
    return found


def list_frameworks() -> list[dict[str, Any]]:
    """Every framework as plain data: versions, how many presets, how many names that it logs, files of dumps."""
    named = [item.framework for item in load_presets().values()]
    return [
        {
            "name": shelf.name,
            "versions": list(shelf.versions),
            "presets": named.count(shelf.name),
            "logged_names": len({meaning.name for meaning in shelf.load("").meanings()}),
            "files": [layout.framework for layout in shelf.layouts],
        }
        for shelf in load_adapters()
    ]


def load_presets() -> dict[str, Preset]:
    """All presets by name, the generic ones first, then framework by framework, oldest version first."""
    return dict(_index_presets())


def find_preset(name: str) -> Correction:
    """The correction of a preset.

    Raises:
        ConfigError: there is none of this name.
    """
    for item in PRESETS:
        if item.name == name:
            return item.correction
    for framework in ADAPTER_MODULES:
        if _has_preset(framework, name):
            return next(item.correction for item in _load_presets(framework) if item.name == name)
    raise ConfigError(f"there is no preset {name!r}{suggestion(str(name), _index_presets())}")


@cache
def _read_advice() -> tuple[dict[str, str], ...]:
    """advice.yaml of each shelf that has one: cause -> setting."""
    places = (data_file(framework, "advice.yaml") for framework in ADAPTER_MODULES)
    return tuple(read_data(place) for place in places if place.exists())


def list_settings(cause: str) -> tuple[str, ...]:
    """Where frameworks have what the advice on a cause of mismatch speaks of."""
    return tuple(words[cause] for words in _read_advice() if cause in words)


@cache
def _merge_aliases() -> dict[str, str]:
    merged = dict(_COMMON_ALIASES)
    for found in load_adapters():
        for alias, column in found.columns.items():
            if merged.setdefault(alias, column) != column:
                raise ValueError(f"{alias} would be {merged[alias]} and {column}")
    return merged


def column_aliases() -> dict[str, str]:
    """What frameworks call the columns of the dump contract: their name -> the contract's."""
    return dict(_merge_aliases())
