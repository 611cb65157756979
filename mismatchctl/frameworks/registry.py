"""The registry of frameworks: find frameworks by name or configuration, and read their presets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import PRESETS, Preset, named_correction
from mismatchctl.errors import ConfigError, option, suggestion
from mismatchctl.frameworks.adapter import Adapter, Framework
from mismatchctl.frameworks.lint import read_table

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
"""Module of each framework, imported on first use. If a configuration fits several frameworks, the first one wins."""

CONFIG_CLASSES = {"RolloutCorrectionConfig": "verl", "GRPOConfig": "trl", "Config": "tinker-cookbook"}
"""Python classes whose calls configure a framework, and the name of this framework."""

DEFAULT_CORRECTIONS = ("none", "token_tis", "seq_mis", "geo_rs", "miles-moe-2")
"""Presets that `analyze` compares by default: one for each common type of correction."""

_COMMON_ALIASES = {
    "sampling_logprobs": "rollout_log_probs",
    "old_logprobs": "train_log_probs",
    "train_logprobs": "train_log_probs",
    "current_logprobs": "current_log_probs",
    "training_step": "step",
    "train_step": "step",
}
"""Column names that are not specific to a framework. A name is only listed here or in an adapter if it has a single
meaning. Ambiguous names are left out:
`logprobs`: log-probs of the rollout engine or the trainer;
`prox_logp`: entry t belongs to token t + 1, but to token t in the other columns;
`rewards`, `score`: one per token or per sequence, normalized or raw;
`response_tokens`, `completion_tokens`: token ids, a count or a string;
`attention_mask`, `mask`: the prompt is masked, or only the padding;
`weight_version`, `model_version`, `versions`: of the rollout engine or the trainer, per group or per token;
`routed_experts` and similar columns: they also contain the experts of prompt tokens."""


def default_corrections() -> list[Correction]:
    return [find_preset(name) for name in DEFAULT_CORRECTIONS]


@cache
def find_adapter(name: str) -> Adapter:
    if name not in ADAPTER_MODULES:
        known = ", ".join(ADAPTER_MODULES)
        raise ConfigError(f"unknown framework {name!r}{suggestion(name, ADAPTER_MODULES)}; known: {known}")
    found: Adapter = import_module(ADAPTER_MODULES[name]).ADAPTER
    return found


@cache
def load_adapters() -> tuple[Adapter, ...]:
    return tuple(map(find_adapter, ADAPTER_MODULES))


def load_framework(name: str) -> Framework:
    """Return a framework by `NAME` (in its default version) or `NAME@VERSION`."""
    framework, _, version = name.partition("@")
    return find_adapter(framework).load(version)


def load_framework_for(native: Mapping[str, Any], name: str) -> Framework:
    """Return a framework by name. If the name contains no version, the version is detected from the configuration."""
    framework, _, version = name.partition("@")
    found = find_adapter(framework)
    return found.load(version or found.recognize(native) or "")


def recognize(native: Mapping[str, Any]) -> str | None:
    """Return `NAME` or `NAME@VERSION` of the first framework that recognizes the keys, or `None`."""
    versions = ((name, find_adapter(name).recognize(native)) for name in ADAPTER_MODULES)
    return next((f"{name}@{version}".rstrip("@") for name, version in versions if version is not None), None)


def read_file(framework: str, name: str) -> Any:
    return read_table(str(Path(__file__).parent / ADAPTER_MODULES[framework].rpartition(".")[2] / name), name)


@cache
def load_presets() -> Mapping[str, Preset]:
    """Return all presets by name: first generic presets, then the presets of each framework.

    A presets.yaml is a list of releases, each with `version`, `source`, and `presets` by name. A preset has a
    description (`about`) and keys (`config`, or else from `Adapter.factory`). Optional are `source`, `alias`, `reader`
    (the version that reads the keys) and `documented` (how the framework's documentation differs from its code).
    """
    found = list(PRESETS)
    for adapter in load_adapters():
        for release in read_file(adapter.name, "presets.yaml"):
            for name, words in release["presets"].items():
                version = words.get("reader", release.get("reader", release["version"]))
                config = words["config"] if "config" in words else adapter.factory(version, name)
                made = adapter.load(version).correction(config)
                rules: dict[str, Any] = {"weight": made.weight, "gates": made.gates, "loss": made.loss}
                correction = Correction(name=name, about=words["about"], **rules)
                source = words.get("source", release["source"].format(name=name))
                documented = words.get("documented", "")
                found.append(Preset(correction, adapter.name, release["version"], source, documented=documented))
                found += [found[-1].alias(words["alias"])] if "alias" in words else []
    by_name = {item.name: item for item in found}
    if len(by_name) < len(found):
        raise ValueError("two presets have the same name")
    return by_name


def list_frameworks() -> list[dict[str, Any]]:
    """List versions, dump files, and the number of presets and logged names of each framework as plain data."""
    named = [item.framework for item in load_presets().values()]
    return [
        {
            "name": adapter.name,
            "versions": list(adapter.versions),
            "presets": named.count(adapter.name),
            "logged_names": len({meaning.name for meaning in adapter.load("").meanings()}),
            "files": [layout.framework for layout in adapter.layouts],
        }
        for adapter in load_adapters()
    ]


def find_preset(name: str) -> Correction:
    """Return the correction of a preset, or of a name such as `geo_1.01`. A `-` in a name means the same as `_`."""
    if not isinstance(name, str):
        raise ConfigError(f"unknown preset {name!r}")
    presets, plain = load_presets(), name.lower().replace("-", "_")
    same = name if name in presets else next((one for one in presets if one.lower().replace("-", "_") == plain), None)
    described = presets[same].correction if same is not None else named_correction(name)
    if described is None:
        raise ConfigError(f"unknown preset {name!r}{suggestion(name, presets)}")
    return described


def list_settings(cause: str) -> tuple[str, ...]:
    """Return the settings to check for a cause of a mismatch, as one string per framework."""
    advice = (read_file(framework, "advice.yaml") for framework in ADAPTER_MODULES)
    return tuple(words[cause] for words in advice if cause in words)


@cache
def column_aliases() -> Mapping[str, str]:
    """Map the column names of frameworks to the names of the schema."""
    merged = dict(_COMMON_ALIASES)
    for found in load_adapters():
        for alias, column in found.load("").columns.items():
            if merged.setdefault(alias, column) != column:
                raise ValueError(f"two frameworks use {alias} for different columns: {merged[alias]} and {column}")
    return merged


_NAMED = 4  # score of a strong sign of a framework, such as a file inside of the framework's own package
_CLEAR = 2  # the detected framework is unclear if its score leads the second-best score by less than this number

_PACKAGE = re.compile(r"""^\s*name\s*=\s*["']([\w.-]+)["']""", re.MULTILINE)
_MOST_PARENTS = 8

_OTHERS = {
    "Tunix": r"\btunix\b",
    "RLinf": r"\brlinf\b",
    "torchforge": r"\btorchforge\b|\bfrom forge\b|\bapps/grpo\b.*\bforge\b|-m apps\.grpo",
}
"""Trainers that mismatchctl has no adapter for, with patterns of their names."""


def _read_detection(framework: str) -> dict[str, Any]:
    return {"text": (), "keys": (), "packages": (), "descendants": {}} | dict(read_file(framework, "detection.yaml"))


def guess_frameworks(path: Path, text: str, configurations: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Score each framework that a file may belong to, by its text, keys and packages. The highest score is first."""
    bare = re.sub(r"(?m)^\s*#(?!SBATCH).*$", "", text)
    all_keys = [keys.keys() for keys in configurations]
    packages = _packages_of(path)
    scores = {}
    for name in ADAPTER_MODULES:
        signs = _read_detection(name)
        score = sum(weight for weight, pattern in signs["text"] if re.search(pattern, bare))
        score += sum(_NAMED - 1 for keys in all_keys if any(keys >= set(group) for group in signs["keys"]))
        score += _NAMED * (not packages.isdisjoint(signs["packages"]))
        score += any(re.search(pattern, bare, re.IGNORECASE) for pattern in signs["descendants"].values())
        scores[name] = score
    return {name: scores[name] for name in sorted(scores, key=lambda name: -scores[name]) if scores[name]}


def is_clear(guesses: Mapping[str, int]) -> bool:
    """Return True if the highest score is at least `_NAMED` - 1, and at least `_CLEAR` above the second score."""
    first, second = [*guesses.values(), 0, 0][:2]
    return first >= _NAMED - 1 and first - second >= _CLEAR


def _packages_of(path: Path) -> set[str]:
    """Return the names of the Python packages whose folders contain the file."""
    found = set()
    for folder in list(path.resolve().parents)[:_MOST_PARENTS]:
        for name in ("pyproject.toml", "setup.py", "setup.cfg"):
            try:
                text = (folder / name).read_text(encoding="utf-8", errors="ignore")[:20_000]
            except OSError:
                continue
            if named := _PACKAGE.search(text):
                found.add(named[1].lower().replace("_", "-"))
    return found


def find_descendant(framework: str, text: str) -> str:
    """Return the first project named in `text` that uses the framework's keys (as rLLM uses verl's), or ""."""
    named = _read_detection(framework)["descendants"]
    return next((name for name, pattern in named.items() if re.search(pattern, text, re.IGNORECASE)), "")


def refuse_others(path: Path, text: str) -> None:
    """Raise a ConfigError if the file belongs to a trainer without an adapter."""
    for name, pattern in _OTHERS.items():
        if re.search(pattern, text, re.IGNORECASE):
            raise ConfigError(
                f"{path}: this is a configuration of {name}, which mismatchctl cannot check. Analyze a dump instead, "
                f"or name the framework that has the same keys with {option('framework')}."
            )
