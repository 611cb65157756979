"""Plan of a Correction in verl's roles: what verl can do with it, and the keys that describe it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mismatchctl.corrections.model import Correction, Gate, RatioSource, Weight
from mismatchctl.corrections.presets import BYPASS_SOURCE, MISMATCH_SOURCE
from mismatchctl.frameworks.verl.configuration import RS_OPTIONS, UnappliedCorrection
from mismatchctl.frameworks.verl.versions import VerlVersion

_RS_OPTION_NAMES = {rule: option for option, rule in RS_OPTIONS.items()}
_K1_LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}
_RATIO_LEVELS = {"flat": ("token", "sequence", "geometric"), "ratio": ("token", "sequence")}


@dataclass(frozen=True)
class VerlPlan:
    """The parts of a correction that verl applies.

    Attributes:
        weight: rollout_is, or None.
        applied: True if the trainer gets the weights.
        rejections: rollout_rs. At most one gate before 2026.
        veto: threshold of the per-token veto, before 2026.
        source: the compared policies, the same for all parts.
    """

    weight: Weight | None
    applied: bool
    rejections: tuple[Gate, ...]
    veto: float | None
    source: RatioSource


def find_rs_option(gate: Gate) -> str:
    """Return verl's name of a rejection by k1, k2 or k3."""
    return _RS_OPTION_NAMES[gate.statistic, gate.level]


def make_plan(correction: Correction, version: VerlVersion) -> tuple[VerlPlan, list[str]]:
    """Assign the parts of a correction to verl's roles, and list the parts that this version does not support."""
    problems: list[str] = correction.unusual_rules
    applied = not isinstance(correction, UnappliedCorrection) or version.dialect != "flat"
    correction = correction.measured if isinstance(correction, UnappliedCorrection) else correction
    source: RatioSource = MISMATCH_SOURCE if correction.loss == "ppo" else BYPASS_SOURCE
    if others := correction.sources - {source}:
        problems.append(f"with loss {correction.loss} verl compares {source} only, not {', '.join(sorted(others))}")
    weight = correction.weight
    if weight is not None and (reasons := list(_explain_weight_limits(weight, correction, version))):
        problems += reasons
        weight = None
    rejections: list[Gate] = []
    veto = None
    for gate in correction.gates:
        if reasons := list(_explain_gate_limits(gate, version)):
            problems += [f"{gate.title}: {reason}" for reason in reasons]
        elif gate.level == "min":
            veto = max(veto or 0.0, gate.keep[0] or 0.0)
        elif rejections and version.dialect != "estimator":
            problems.append(f"{gate.title}: verl@{version.name} rejects by one rule only")
        else:
            rejections.append(gate)
    if version.dialect == "flat":
        if correction.loss != "ppo":
            problems.append(f"verl@{version.name} has no bypass mode")
        if weight is None and correction.gates:
            problems.append(f"verl@{version.name} rejects only with the ratio that it weights with")
        if weight is not None and rejections and rejections[0].level != weight.level:
            problems.append(f"verl@{version.name} weights and rejects at one level")
    return VerlPlan(weight, applied, tuple(rejections), veto, source), problems


def _explain_weight_limits(weight: Weight, correction: Correction, version: VerlVersion) -> Iterator[str]:
    """Explain why this version does not support the weights."""
    if weight.level not in _RATIO_LEVELS.get(version.dialect, ("token", "sequence")):
        yield f"verl@{version.name} has no {weight.level} weights"
    if weight.clip is not None:
        yield "verl has no lower bound that weights are raised to"
    if weight.zero is not None and (not version.icepop or not all(weight.zero)):
        yield f"verl@{version.name} zeroes no weights that way: it wants two bounds above 0"
    rejects = any(gate.level == weight.level and gate.statistic == "ratio" for gate in correction.gates)
    if version.dialect == "flat" and (weight.truncate is None) is not rejects:
        yield f"verl@{version.name} either truncates weights or rejects by them"
    if weight.watch_low is not None and version.dialect != "flat":
        yield f"verl@{version.name} derives the lower bound of its statistics"
    if weight.normalize != "none" and not version.normalizes:
        yield f"verl@{version.name} does not normalize weights"
    if weight.normalize != "none" and (weight.normalize != weight.level or weight.normalize_over != "group"):
        yield "verl normalizes weights over the batch, at their own level"


def _explain_gate_limits(gate: Gate, version: VerlVersion) -> Iterator[str]:
    """Explain why this version does not support the rejection."""
    plain = {field: Gate.model_fields[field].default for field in ("over", "inclusive", "sees", "when")}
    for field, usual in (plain | {"effect": version.effect}).items():
        if getattr(gate, field) != usual:
            yield f"verl@{version.name} knows no {field} {getattr(gate, field)!r}"
    if version.dialect == "estimator":
        if (gate.statistic, gate.level) not in _RS_OPTION_NAMES or gate.clamp != "token":
            yield f"verl@{version.name} rejects by k1, k2 and k3 with log ratios clamped per token"
        elif gate.keep[1] is None or (gate.statistic == "k1") is (gate.keep[0] is None):
            yield "k1 needs both bounds, k2 and k3 an upper one only"
    elif gate.statistic == "ratio" and gate.level == "min":
        if gate.keep[1] is not None or gate.clamp != "none":
            yield "verl's veto has a lower bound only and does not clamp"
    elif gate.statistic != "ratio" or gate.level == "max" or gate.clamp != "aggregate":
        yield f"verl@{version.name} rejects by the ratio of a token, a sequence or its geometric mean"
    elif gate.keep[1] is None:
        yield "verl's rejection needs an upper bound"


def write_keys(correction: Correction, version: VerlVersion) -> tuple[dict[str, Any], list[str]]:
    """Convert a Correction to verl's keys, and list rules without an exact equivalent."""
    applied = not isinstance(correction, UnappliedCorrection) or version.dialect != "flat"
    correction = correction.measured if isinstance(correction, UnappliedCorrection) else correction
    said = [_convert_gate(gate, version) for gate in correction.gates]
    notes = [
        f"{gate.title}: said as {other.title}, which differs where a token's log ratio is beyond 20"
        for gate, other in zip(correction.gates, said, strict=True)
        if other is not gate
    ]
    roles, problems = make_plan(correction.model_copy(update={"gates": tuple(said)}), version)
    roles = replace(roles, applied=applied)
    writers = {"flat": _write_flat, "ratio": _write_ratio, "estimator": _write_estimator}
    return writers[version.dialect](roles, correction, version), [*notes, *problems]


def _convert_gate(gate: Gate, version: VerlVersion) -> Gate:
    """Convert a bound on train/rollout to one on k1 = log rollout/train or back, if the version requires it."""
    low, high = gate.keep
    if version.dialect == "estimator" and gate.statistic == "ratio" and gate.level in _K1_LEVELS and high:
        keep = (-math.log(high), -math.log(low) if low else math.inf)
        level = _K1_LEVELS[gate.level]
        return gate.model_copy(update={"statistic": "k1", "level": level, "keep": keep, "clamp": "token"})
    if version.dialect != "estimator" and gate.statistic == "k1" and low is not None and high is not None:
        levels = {k1: ratio for ratio, k1 in _K1_LEVELS.items()}
        if gate.level in levels:
            keep = (math.exp(-high), math.exp(-low))
            level, clamp = levels[gate.level], "aggregate"
            return gate.model_copy(update={"statistic": "ratio", "level": level, "keep": keep, "clamp": clamp})
    return gate


def _write_flat(roles: VerlPlan, correction: Correction, version: VerlVersion) -> dict[str, Any]:
    weight = roles.weight
    if weight is None:
        return {"rollout_is_threshold": None}
    keep = roles.rejections[0].keep if roles.rejections else (weight.watch_low, weight.truncate)
    return {
        "rollout_is": roles.applied,
        "rollout_is_threshold": keep[1],
        "rollout_is_threshold_lower": keep[0],
        "rollout_is_level": weight.level,
        "rollout_is_mode": "mask" if roles.rejections else "truncate",
        "rollout_is_veto_threshold": roles.veto,
    }


def _write_ratio(roles: VerlPlan, correction: Correction, version: VerlVersion) -> dict[str, Any]:
    keys = _write_weight(roles.weight, version)
    if roles.rejections:
        low, high = roles.rejections[0].keep
        keys |= {
            "rollout_rs": roles.rejections[0].level,
            "rollout_rs_threshold": high,
            "rollout_rs_threshold_lower": low or 0.0,
        }
    if roles.veto is not None:
        keys["rollout_token_veto_threshold"] = roles.veto
    if correction.loss != "ppo":
        pure = correction.loss == "policy_gradient"
        keys |= {
            version.bypass_key: True,
            version.pure_key: ("reinforce" if pure else "ppo_clip") if version.names_loss else pure,
        }
    return keys


def _write_estimator(roles: VerlPlan, correction: Correction, version: VerlVersion) -> dict[str, Any]:
    keys = _write_weight(roles.weight, version)
    if roles.rejections:
        keys["rollout_rs"] = ",".join(find_rs_option(gate) for gate in roles.rejections)
        keys["rollout_rs_threshold"] = ",".join(_format_threshold(gate) for gate in roles.rejections)
    if correction.loss != "ppo":
        keys |= {"bypass_mode": True, "loss_type": "ppo_clip" if correction.loss == "ppo_bypass" else "reinforce"}
    return keys


def _write_weight(weight: Weight | None, version: VerlVersion) -> dict[str, Any]:
    if weight is None:
        return {"rollout_is": None}
    low, high = weight.bounds
    keys: dict[str, Any] = {
        "rollout_is": weight.level,
        "rollout_is_threshold": high if weight.zero is None else f"{low!r}_{high!r}",
    }
    if weight.normalize != "none":
        keys["rollout_is_batch_normalize"] = True
    return keys


def _format_threshold(gate: Gate) -> str:
    low, high = gate.keep
    if gate.statistic != "k1" or low is None or high is None:
        return repr(high)
    return f"{_format_exp(low)}_{_format_exp(high)}"


def _format_exp(logarithm: float) -> str:
    """Return the shortest number with this logarithm."""
    value = math.exp(logarithm)
    digits = (f"{value:.{count}g}" for count in range(1, 17))
    return next((text for text in digits if math.log(float(text)) == logarithm), repr(value))
