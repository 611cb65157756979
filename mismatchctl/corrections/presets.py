"""Create corrections from the names of presets, mappings and files, and describe presets for a table."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mismatchctl.core.validation import explain_error
from mismatchctl.corrections.labels import gate_label, weight_label
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.errors import ConfigError
from mismatchctl.io.yaml import read_data


@dataclass(frozen=True)
class Preset:
    """A named Correction and its origin: a framework, a commit or a document."""

    correction: Correction  # its `name` is the name of the preset, its `about` a description
    framework: str = ""  # the framework that ships it. Empty for generic presets.
    version: str = ""  # year and month of the framework's release
    source: str = ""  # commit or document
    alias_of: str | None = None  # name of the original preset, for an alias
    documented: str = ""  # how the framework's documentation differs from its code. Empty: they agree.

    @property
    def name(self) -> str:
        return self.correction.name

    def alias(self, name: str) -> Preset:
        return replace(self, correction=self.correction.model_copy(update={"name": name}), alias_of=self.name)

    def to_mapping(self) -> dict[str, Any]:
        facts = ("name", "framework", "version", "source", "alias_of", "documented")
        return {fact: getattr(self, fact) for fact in facts} | {"correction": self.correction.to_mapping()}


NO_CORRECTION = Preset(Correction(name="none", about="No correction: every weight is 1 and every token is kept."))

PRESETS = (
    NO_CORRECTION,
    *(
        Preset(
            Correction(name=name, about=f"{about} The bound is an example.", gates=(Gate.model_validate(gate),)),
            source=source or "articles on off-policy correction; no framework ships it",
        )
        for name, (about, source, gate) in read_data(Path(__file__).with_name("presets.yaml")).items()
    ),
)


def _ratio_gate(level: str, low: float | None, high: float | None) -> dict[str, Any]:
    return {"statistic": "ratio", "level": level, "keep": [low, high]}


_NAMED_RULES: dict[str, tuple[tuple[float, ...], Callable[..., dict[str, Any]]]] = {
    "token_truncate": ((2.0,), lambda high: {"weight": {"level": "token", "truncate": high}}),
    "token_clip": ((0.5, 2.0), lambda low, high: {"weight": {"level": "token", "clip": [low, high]}}),
    "icepop": ((0.5, 5.0), lambda low, high: {"weight": {"level": "token", "zero": [low, high]}}),
    "token_mask": (
        (0.5, 2.0), lambda low, high: {"weight": {"level": "token"}, "gates": [_ratio_gate("token", low, high)]}
    ),
    "seq_truncate": ((2.0,), lambda high: {"weight": {"level": "sequence", "truncate": high}}),
    "seq_mis": (
        (2.0,),
        lambda high: {
            "weight": {"level": "sequence", "truncate": high}, "gates": [_ratio_gate("sequence", 0.0, high)],
        },
    ),
    "seq_reject": ((2.0,), lambda high: {"gates": [_ratio_gate("sequence", 1 / high, high)]}),
    "geo": ((1.001,), lambda high: {"gates": [_ratio_gate("geometric", 1 / high, high)]}),
    "veto": ((1e-4,), lambda low: {"gates": [_ratio_gate("min", low, None) | {"clamp": "none"}]}),
}  # fmt: skip
"""Maps the name of a rule to (default bounds, function that takes bounds and returns the fields of a correction).

The correction `geo_1.01_token_truncate_2` has the rules `geo` and `token_truncate`, with the bounds 1.01 and 2.
"""
_NAMED_RULE = re.compile(rf"({'|'.join(_NAMED_RULES)})((?:_\d+(?:\.\d+)?(?:e-?\d+)?)*)(?:_|$)")


def named_correction(name: str) -> Correction | None:
    """Build the correction that a name such as `geo_1.01_token_truncate_2` describes, or `None` for other names."""
    merged: dict[str, Any] = {"name": name}
    name, place = re.sub(r"(?<!\de)-", "_", name), 0
    while place < len(name):
        found = _NAMED_RULE.match(name, place)
        if found is None:
            return None
        usual, build = _NAMED_RULES[found[1]]
        bounds = [float(text) for text in found[2].split("_")[1:]] or list(usual)
        if len(bounds) != len(usual) or not all(0 < bound < math.inf for bound in bounds):
            example = "_".join([found[1], *(f"{bound:g}" for bound in usual)])
            raise ConfigError(f"correction {name}: expected positive bounds, as in {example}")
        fields = build(*bounds)
        if "weight" in fields and "weight" in merged:
            raise ConfigError(f"correction {name}: only one rule of a correction can set weights")
        merged |= fields | {"gates": [*merged.get("gates", []), *fields.get("gates", [])]}
        place = found.end()
    return parse_correction(merged, f"correction {name}")


def format_bound(bound: float) -> str:
    """Format a bound without losing digits: 2, 1.001, 1e-4."""
    text = next(text for digits in range(3, 18) if float(text := f"{bound:.{digits}g}") == bound)
    mantissa, mark, exponent = text.partition("e")
    if not mark and bound < 1e-3:
        mantissa, mark, exponent = f"{bound:e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if mark else text


def format_rule_name(rule: str, *bounds: float) -> str:
    """Return the name of a rule with its bounds, such as `geo_1.01` or `veto_1e-4`."""
    return "_".join([rule, *map(format_bound, bounds)])


CORRECTION_SUFFIXES = (".yaml", ".yml", ".toml")


def parse_correction(data: Mapping[str, Any], where: str = "correction") -> Correction:
    try:
        return Correction.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain_error(error, Correction)}") from None


def read_corrections(path: str | Path) -> list[Correction]:
    """Read a YAML or TOML file with one Correction, a list of them, or a list under the key `corrections`."""
    path = Path(path)
    data = read_data(path)
    items = data.get("corrections", data) if isinstance(data, dict) else data
    items = items if isinstance(items, list) else [items]
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            where = f"{path}: correction {number}" if len(items) > 1 else str(path)
            raise ConfigError(f"{where}: expected a mapping such as {{weight: {{truncate: 2}}}}, found {item!r}")
    named = [{"name": path.stem if len(items) == 1 else f"{path.stem}-{i + 1}", **item} for i, item in enumerate(items)]
    return [parse_correction(item, str(path)) for item in named]


TRAIT_TITLES = {
    "name": "preset", "weight": "IS weight", "rejection": "rejection", "clip": "PPO clip", "bypass": "bypass",
    "old_policy": "old policy", "policies": "policies", "batch_invariant": "batch invariant",
    "corrects": "corrects", "forward_pass": "extra forward pass", "cost": "extra cost", "assumes": "assumes",
    "severity": "for a mismatch that is", "recommended": "recommended in documentation",
}  # fmt: skip
_EMPTY = "-"


def describe_traits(name: str, correction: Correction) -> dict[str, str]:
    loss = correction.loss
    traits = (
        name,
        _EMPTY if correction.weight is None else weight_label(correction.weight),
        "; ".join(gate_label(gate) for gate in correction.gates) or _EMPTY,
        {"ppo": "on current/train", "ppo_bypass": "on current/rollout", "policy_gradient": _EMPTY}[loss],
        "no" if loss == "ppo" else "yes",
        {"ppo": "recomputed", "ppo_bypass": "= rollout", "policy_gradient": "none"}[loss],
        str(_count_policies(correction)), "yes" if _count_policies(correction) == 3 else "no",
        _describe_effect(correction), "yes, to recompute" if loss == "ppo" else "none",
        "; ".join(_list_costs(correction)) or _EMPTY, "; ".join(_list_assumptions(correction)),
        suitable_severity(correction), _describe_recommendation(correction) or _EMPTY,
    )  # fmt: skip
    return dict(zip(TRAIT_TITLES, traits, strict=True))


def _count_policies(correction: Correction) -> int:
    uses_rollout = correction.weight is not None or bool(correction.gates)
    return 3 if correction.loss == "ppo" and uses_rollout else 2


SEVERITIES = ("negligible", "moderate", "severe")
"""Severities of a mismatch. Typical causes, in this order: numerical differences, stale weights, another policy."""
_MIN_ESS = (0.99, 0.9)
"""Minimum ESS of token weights for `negligible` and for `moderate`. These limits lack a published source."""


def classify_severity(ess_token: float) -> str:
    """Return the severity of a mismatch, given the ESS of its token weights (between 0 and 1)."""
    return SEVERITIES[sum(ess_token < least for least in _MIN_ESS)]


def suitable_severity(correction: Correction) -> str:
    if correction.weight is None and not correction.gates:
        return "negligible"
    return "severe" if correction.gates else "moderate"


def _describe_recommendation(correction: Correction) -> str:
    weight, gates = correction.weight, correction.gates
    if correction.loss == "ppo_bypass" and not gates and weight is None:
        return "for most users: faster, without correction or measurement"
    if correction.loss == "ppo" and weight == Weight(truncate=2.0) and not gates:
        return "by default for a moderate mismatch"
    if weight is not None and weight.level == "sequence" and not gates:
        return "only for a very small mismatch or a large batch"
    if weight is not None and gates and weight.level == "token" and weight.normalize != "none":
        return "if the mismatch is large"
    return ""


def _describe_effect(correction: Correction) -> str:
    if correction.loss == "ppo_bypass":
        return "rollout to current by PPO's ratio (weights are 1)"
    if correction.weight is not None:
        return "rollout to current" if correction.loss == "policy_gradient" else "rollout to train"
    return "rejection only" if correction.gates else _EMPTY


def _list_costs(correction: Correction) -> list[str]:
    found = []
    if correction.weight is not None and correction.weight.level == "sequence":
        found.append("variance that grows with the response length")
    if any(gate.effect == "mask" for gate in correction.gates):
        found.append("rejected data")
    if any(gate.effect == "zero" for gate in correction.gates):
        found.append("rejected data, which still counts in the denominator of the loss")
    return found


def _list_assumptions(correction: Correction) -> list[str]:
    found = []
    if correction.loss == "ppo_bypass":
        found.append("rollout and train nearly agree, so PPO's clip can limit the mismatch and the update together")
    if correction.loss == "policy_gradient":
        found.append("updates are small, although no clip limits them")
    if correction.weight is not None:
        found.append(
            {
                "token": "a token's weight can ignore the ratios of earlier tokens (biased, little variance)",
                "sequence": "sequences are short, the mismatch is tiny or batches are large (no bias below the bound)",
                "geometric": "one mean ratio per sequence can replace its token ratios (biased, little variance)",
            }[correction.weight.level]
        )
        if correction.weight.normalize != "none":
            found.append("batches are large, so their mean weight is about 1")
    if correction.gates:
        found.append("training can do without the data outside the bounds")
    return found or ["rollout and train agree"]


def list_traits(presets: Mapping[str, Preset]) -> list[dict[str, str]]:
    return [describe_traits(name, item.correction) for name, item in presets.items() if item.alias_of is None]
