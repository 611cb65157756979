"""What frameworks call things, a shelf per framework: its presets, columns, configurations, numbers, names, files.

Everything else in the package knows corrections and columns, never who named them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.correction import presets as generic
from mismatchctl.correction.presets import Preset
from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.framework import Framework, Replay, Shelf
from mismatchctl.texts import read_data

__all__ = [
    "DEFAULT_CORRECTIONS",
    "SHELVES",
    "Framework",
    "Replay",
    "column_aliases",
    "inventory",
    "load",
    "load_for",
    "preset",
    "presets",
    "recognize",
    "settings",
    "shelf",
]

_FOLDERS = (
    "verl",
    "slime",
    "miles",
    "trl",
    "nemo_rl",
    "openrlhf",
    "prime_rl",
    "areal",
    "skyrl",
    "roll",
    "tinker_cookbook",
    "open_instruct",
    "ms_swift",
)

SHELVES: tuple[Shelf, ...] = tuple(import_module(f"{__name__}.{folder}").SHELF for folder in _FOLDERS)
"""Every framework, a line each. A configuration that could be of several is taken for the first one's."""

DEFAULT_CORRECTIONS: tuple[str, ...] = ("none", *(name for one in SHELVES for name in one.compared))
"""Compared when nobody says what to compare: one of each kind."""

_SPELLINGS = {
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


def shelf(name: str) -> Shelf:
    """The shelf of a framework.

    Raises:
        ConfigError: there is no such framework.
    """
    for found in SHELVES:
        if found.name == name:
            return found
    known = [found.name for found in SHELVES]
    raise ConfigError(f"there is no framework {name!r}{suggestion(name, known)}: there are {', '.join(known)}")


def load(name: str) -> Framework:
    """A framework at a version, `NAME` or `NAME@VERSION`; without a version what the name means by itself.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    return shelf(framework).load(version)


def load_for(native: Mapping[str, Any], name: str) -> Framework:
    """A framework by name, at the version that a configuration was written for where the name says none.

    Raises:
        ConfigError: there is no such framework or version.
    """
    framework, _, version = name.partition("@")
    found = shelf(framework)
    return found.load(version or found.recognize(native) or "")


def recognize(native: Mapping[str, Any]) -> str | None:
    """The framework at the version that a configuration in its own keys was written for; None if it is of none here."""
    versions = ((found.name, found.recognize(native)) for found in SHELVES)
    return next((f"{name}@{version}".rstrip("@") for name, version in versions if version is not None), None)


@cache
def _of(name: str) -> tuple[Preset, ...]:
    """The presets of a shelf, oldest release first, an alias after the preset that it names again.

    A release in presets.yaml has `version`, `source`, and `presets` by name, each with `about` and `config`, a
    configuration in the framework's own keys; a preset may have a `source` of its own, an `alias`, what a document says
    otherwise (`documented`), and `reader`, the version whose reading of the keys is meant where that is another one.
    """
    own, found = shelf(name), []
    for release in read_data(own.presets) if own.presets.exists() else ():
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


def _every() -> Iterator[Preset]:
    """The generic presets, then those of each shelf, which is read when its turn comes."""
    yield from generic.PRESETS
    for one in SHELVES:
        yield from _of(one.name)


@cache
def _by_name() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for item in _every():
        if item.name in found:
            raise ValueError(f"two presets are called {item.name}")
        found[item.name] = item
    return found


def inventory() -> list[dict[str, Any]]:
    """Every framework as plain data: versions, how many presets, how many names that it logs, files of dumps."""
    named = [item.framework for item in presets().values()]
    return [
        {
            "name": shelf.name,
            "versions": list(shelf.versions),
            "presets": named.count(shelf.name),
            "logged_names": len({meaning.name for meaning in shelf.load("").meanings()}),
            "files": [layout.framework for layout in shelf.layouts],
        }
        for shelf in SHELVES
    ]


def presets() -> dict[str, Preset]:
    """All presets by name, the generic ones first, then framework by framework, oldest version first."""
    return dict(_by_name())


def preset(name: str) -> Correction:
    """The correction of a preset.

    Raises:
        ConfigError: there is none of this name.
    """
    for item in _every():
        if item.name == name:
            return item.correction
    raise ConfigError(f"there is no preset {name!r}{suggestion(str(name), _by_name())}")


@cache
def _advice() -> tuple[dict[str, str], ...]:
    """advice.yaml of each shelf that has one: cause -> setting."""
    places = (found.presets.with_name("advice.yaml") for found in SHELVES)
    return tuple(read_data(place) for place in places if place.exists())


def settings(cause: str) -> tuple[str, ...]:
    """Where frameworks have what the advice on a cause of mismatch speaks of."""
    return tuple(words[cause] for words in _advice() if cause in words)


@cache
def _aliases() -> dict[str, str]:
    merged = dict(_SPELLINGS)
    for found in SHELVES:
        for alias, column in found.columns.items():
            if merged.setdefault(alias, column) != column:
                raise ValueError(f"{alias} would be {merged[alias]} and {column}")
    return merged


def column_aliases() -> dict[str, str]:
    """What frameworks call the columns of the dump contract: their name -> the contract's."""
    return dict(_aliases())
