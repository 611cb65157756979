"""A Correction in a framework's own keys: only what that framework reads back as the same Correction."""

from __future__ import annotations

from typing import Any

from mismatchctl.correction import Correction, Gate, Weight
from mismatchctl.correction.apply import gate_bounds
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import load, shelf
from mismatchctl.frameworks.framework import Framework


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
