"""Checks of the rollout engine's sampling settings: do recorded log-probs match the sampling distribution?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatchctl.corrections.model import Correction
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.lint import LintMessage
from mismatchctl.frameworks.registry import data_file
from mismatchctl.io.yaml import read_data

_TRUNCATIONS = ("top_p", "top_k", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_MASK = "sampling_mask"
"""Part of the option names that record which tokens the engine could sample, for the trainer to apply."""
_VOCABULARY = 1_000_000
_RAW = ("raw_logprobs", "raw_logits")
_REPLAY = (
    "or replay the engine's sampling mask in the trainer (vLLM's return_sampling_mask, where the framework has it)"
)


@dataclass(frozen=True)
class _Setting:
    """A sampling setting of a configuration: its place and its value."""

    place: str
    value: Any

    @property
    def number(self) -> float | None:
        return float(self.value) if isinstance(self.value, (int, float)) and not isinstance(self.value, bool) else None


def check_sampling(framework: Framework, native: Mapping[str, Any], correction: Correction) -> Iterator[LintMessage]:
    """Find settings that make the recorded log-probs differ from the sampling distribution.

    A correction divides the trainer's probability by the probability at sampling. Settings that the trainer also
    applies to its own log-probs are not reported.
    """
    place = data_file(framework.name, "sampling.yaml")
    if not place.exists() or not (correction.weight or correction.gates or correction.loss == "ppo_bypass"):
        return
    table = read_data(place)
    found = dict(_settings(native, table["places"], table["prefix"]))
    applied = set(table["trainer_applies"])
    source = f"{framework.title}, {table['source']}"
    changes = list(_changes(found))
    if not _records_mask(native):
        for name, setting, what in changes:
            if name not in applied:
                consequence = (
                    f"{what}, and the trainer scores without it: the correction takes this for a mismatch or, if the "
                    "engine records log-probs before it, corrects the wrong one"
                )
                fix = (
                    f"set it to its neutral value for training rollouts{', ' + _REPLAY if name in _TRUNCATIONS else ''}"
                )
                yield LintMessage("warning", setting.place, consequence, fix, source)
    mode = found.get("logprobs_mode")
    if mode is not None and mode.value in _RAW and changes:
        names = ", ".join(name for name, _, _ in changes)
        consequence = f"the engine returns log-probs before {names}: they are not those that tokens were sampled with"
        yield LintMessage("warning", mode.place, consequence, "set it to processed_logprobs", source)
    wanted = found.get("logprobs")
    if wanted is not None and wanted.value is None:
        consequence = "null asks the engine for no log-probs, which the correction needs"
        yield LintMessage("info", wanted.place, consequence, "set it to 1", source)


def _changes(found: Mapping[str, _Setting]) -> Iterator[tuple[str, _Setting, str]]:
    """List the settings that change the distribution, and how. A top-k larger than any vocabulary is off."""
    for name, setting in found.items():
        number = setting.number
        if number is None:
            continue
        if name == "temperature" and number not in (0, 1):
            yield name, setting, f"temperature {number:g} reshapes the sampler's distribution"
        elif (
            (name == "top_p" and 0 < number < 1)
            or (name == "top_k" and 0 < number < _VOCABULARY)
            or (name == "min_p" and number > 0)
        ):
            yield name, setting, f"{name} {number:g} cuts the tail off the sampler's distribution"
        elif name in _PENALTIES and number != (1 if name == "repetition_penalty" else 0):
            yield name, setting, f"{name} {number:g} changes the sampler's logits token by token"


def _settings(native: Mapping[str, Any], places: list[str], prefix: str) -> Iterator[tuple[str, _Setting]]:
    for place in places:
        level: Any = native
        for key in filter(None, place.split(".")):
            level = level.get(key) if isinstance(level, Mapping) else None
        for key, value in level.items() if isinstance(level, Mapping) else ():
            plain = str(key).lstrip("-").replace("-", "_")
            name = plain.removeprefix(prefix)
            if plain.startswith(prefix) and name in (
                *_TRUNCATIONS,
                *_PENALTIES,
                "temperature",
                "logprobs_mode",
                "logprobs",
            ):
                yield name, _Setting(".".join(filter(None, (place, str(key)))), value)


def _records_mask(native: Mapping[str, Any]) -> bool:
    """Return True if the engine's sampling mask is recorded for the trainer."""
    return any(
        (_MASK in str(key).replace("-", "_") and value not in (False, None))
        or (isinstance(value, Mapping) and _records_mask(value))
        for key, value in native.items()
    )
