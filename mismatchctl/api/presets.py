"""Compare the presets of one correction method across frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.corrections.model import Correction, Gate
from mismatchctl.corrections.presets import METHODS, find_rule
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.frameworks.config_files import write_keys
from mismatchctl.frameworks.registry import find_adapter, load_framework, load_presets

COMPARED_METRICS = ("rejected_tokens", "rejected_sequences", "weight_mean", "ess_token", "loss_scale")
"""Metrics in which presets are compared."""


def presets_of_method(method: str) -> list[dict[str, Any]]:
    """Return the presets of a method: framework, bounds, whether bounds are included, effect outside of them.

    Raises:
        ConfigError: the method does not exist.
    """
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}{suggestion(method, METHODS)}: there are {', '.join(METHODS)}")
    rows = []
    for name, item in load_presets().items():
        rule = find_rule(method, item.correction)
        if rule is None or item.alias_of is not None:
            continue
        gated = isinstance(rule, Gate)
        low, high = rule.keep if isinstance(rule, Gate) else (rule.clip or rule.zero or (None, rule.truncate))
        ends = rule.inclusive if isinstance(rule, Gate) else (True, True)
        rows.append(
            {
                "preset": name,
                "framework": f"{item.framework}@{item.version}" if item.framework else "",
                "rule": ("gate: " if gated else "weight: ") + rule.level,
                "source": rule.source,
                "interval": _format_interval(low, high, ends, getattr(rule, "statistic", "ratio") == "ratio"),
                "low": low,
                "high": high,
                "inclusive": list(ends),
                "outside": _outside_effect(rule),
                "options": _native_options(item.correction, item.framework, item.version) if item.framework else {},
            }
        )
    return rows


def _format_interval(low: float | None, high: float | None, ends: tuple[bool, bool], ratio: bool) -> str:
    low = 0.0 if low is None and ratio else low
    left = "(" if low is None or not ends[0] else "["
    right = ")" if high is None or not ends[1] else "]"
    return f"{left}{'-inf' if low is None else f'{low:g}'}, {'inf' if high is None else f'{high:g}'}{right}"


def _outside_effect(rule: Any) -> str:
    if isinstance(rule, Gate):
        what = "token" if rule.per_token else "sequence"
        return f"{what} leaves the denominators" if rule.effect == "mask" else f"{what} counts, contributes nothing"
    if rule.zero is not None:
        return "weight 0"
    return "nearer bound" if rule.clip is not None or rule.truncate is not None else "raw weight"


def _native_options(correction: Correction, framework: str, version: str) -> dict[str, Any]:
    """Return a preset in the framework's own keys, for another version if its own cannot express it."""
    for title in (f"{framework}@{version}", *find_adapter(framework).titles):
        try:
            return write_keys(correction, load_framework(title))
        except ConfigError:
            continue
    return {}


def method_results(
    method: str, dumps: Sequence[str], rename: Mapping[str, str] | None = None
) -> dict[str, dict[str, dict[str, float | None] | str]]:
    """Apply each preset of a method to dumps: run -> preset -> metrics, or the reason why it does not apply."""
    chosen = [load_presets()[row["preset"]].correction for row in presets_of_method(method)]
    found: dict[str, dict[str, dict[str, float | None] | str]] = {}
    groups: dict[frozenset[str], list[Correction]] = {}
    for correction in chosen:
        groups.setdefault(correction.columns, []).append(correction)
    refused: dict[str, str] = {}
    for corrections in groups.values():
        try:
            applied_results = analyze(dumps, corrections, rename=rename or {}, findings=False)
        except (ConfigError, DataError) as error:
            if len(groups) == 1:
                raise
            refused |= {correction.name: str(error) for correction in corrections}
            continue
        for run, measured in applied_results.runs.items():
            for name, values in measured.overall.corrections.items():
                shown = {key: values[key].value for key in COMPARED_METRICS if key in values}
                found.setdefault(run, {})[name] = dict(shown)
    for rows in found.values():
        rows.update(refused)
    return found
