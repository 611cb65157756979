"""Corrections as one writes them: in our YAML, and in a framework's own keys, which read back as the same."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.correction.apply import gate_bounds
from mismatchctl.correction.presets import Preset
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import load, shelf
from mismatchctl.frameworks.framework import Framework
from mismatchctl.texts.yaml_written import dump_yaml


def said(correction: Correction, framework: Framework) -> dict[str, Any]:
    """The keys that say a Correction.

    Raises:
        ConfigError: the framework cannot say it, with what it cannot, and which of its versions can.
    """
    found, problems = _tried(correction, framework)
    if not problems:
        return found
    others = [title for title in shelf(framework.name).titles if not _tried(correction, load(title))[1]]
    able = f"; {others[0]} can" if others else ""
    raise ConfigError(f"{framework.title} cannot say {correction.name}: {'; '.join(problems)}{able}")


def _tried(correction: Correction, framework: Framework) -> tuple[dict[str, Any], list[str]]:
    """What comes nearest, and in what it is another Correction."""
    found, problems = framework.native(correction)
    if problems:
        return found, problems
    try:
        again = framework.correction(found)
    except ConfigError as error:
        return found, [str(error)]
    return found, [] if is_same(correction, again) else ["its keys would be read as another correction"]


def is_same(one: Correction, other: Correction) -> bool:
    """Whether two Corrections weight and reject alike, whatever they are called."""
    return _rules(one) == _rules(other)


def _rules(correction: Correction) -> tuple[Any, ...]:
    weight = None if correction.weight is None else _weight(correction.weight)
    return weight, [_gate(gate) for gate in correction.gates], correction.loss


def _weight(weight: Weight) -> tuple[Any, ...]:
    over = None if weight.normalize == "none" else weight.normalize_over
    named = weight.model_dump(exclude={"truncate", "clip", "zero", "normalize_over"})
    return weight.bounds, weight.zero is not None, over, named


def _gate(gate: Gate) -> tuple[Any, ...]:
    return gate_bounds(gate), gate.model_dump(exclude={"keep"})


def preset_yaml(preset: Preset) -> str:
    """A preset as YAML that `--correction FILE` reads, with its source as a comment."""
    facts = (f"{preset.framework} {preset.version}".strip(), preset.source, preset.documented)
    head = [f"# {text}" for text in facts if text]
    return "\n".join([*head, dump_yaml(preset.correction.to_mapping(), inner=True)])


def native_yaml(correction: Correction, framework: Framework, *, nearest: bool = False) -> str:
    """A Correction as YAML of a framework, which reads it back as the same; `nearest`: or what comes near, with how.

    Raises:
        ConfigError: the framework cannot say it.
    """
    head = [f"# {correction.name} as {framework.dated} reads it"]
    keys, unsaid = framework.native(correction) if nearest else (said(correction, framework), [])
    if unsaid:
        head += [f"# What {framework.title} cannot say, or says otherwise:", *(f"# - {text}" for text in unsaid)]
    for key in reversed(framework.block):
        keys = {key: keys}
    return "\n".join([*head, dump_yaml(keys)])
