"""What is weighed against each other: what a framework can do, over grids of thresholds, or what the user names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mismatchctl.correction import Correction, correction_from_mapping
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import load, presets

NONE = Correction(name="none")
_TRUNCATIONS = (1.2, 1.5, 2.0, 3.0, 5.0)
_INTERVALS = ((0.5, 1.5), (0.5, 2.0), (0.5, 5.0))
_SEQUENCES = (2.0, 5.0, 10.0)
_GEOMETRIC = (1.0005, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05)


def usual() -> list[Correction]:
    """Every kind of correction over the thresholds that frameworks use."""
    return [NONE, *(correction_from_mapping(mapping) for mapping in _mappings())]


def expressible(framework: str) -> list[Correction]:
    """Those of `usual` that a framework can say in its own configuration, and accepts, and its presets.

    Raises:
        ConfigError: there is no such framework.
    """
    chosen = load(framework)
    own = [known.correction for known in presets().values() if known.framework == framework.partition("@")[0]]
    found = [NONE]
    for correction in (*own, *usual()[1:]):
        try:
            native, lost = chosen.native(correction)
        except ConfigError:
            continue
        if not lost and not any(trap.level == "error" for trap in chosen.lint(native)):
            found.append(correction)
    return distinct(found)


def distinct(corrections: Sequence[Correction]) -> list[Correction]:
    """The first of those that say the same under different names, with no correction at their head."""
    found: dict[str, Correction] = {}
    for correction in (NONE, *corrections):
        found.setdefault(correction.model_copy(update={"name": "", "about": ""}).model_dump_json(), correction)
    return list(found.values())


def _mappings() -> Iterator[dict[str, Any]]:
    for bound in _TRUNCATIONS:
        yield {"name": f"token_truncate_{bound:g}", "weight": {"level": "token", "truncate": bound}}
    for low, high in _INTERVALS:
        yield {"name": f"token_clip_{low:g}_{high:g}", "weight": {"level": "token", "clip": [low, high]}}
        yield {"name": f"icepop_{low:g}_{high:g}", "weight": {"level": "token", "zero": [low, high]}}
    token = {"statistic": "ratio", "level": "token", "keep": [0.5, 2.0]}
    yield {"name": "token_mask_0.5_2", "weight": {"level": "token"}, "gates": [token]}
    for bound in _SEQUENCES:
        yield {"name": f"seq_truncate_{bound:g}", "weight": {"level": "sequence", "truncate": bound}}
        gate = {"statistic": "ratio", "level": "sequence", "keep": [0.0, bound]}
        yield {"name": f"seq_mis_{bound:g}", "weight": {"level": "sequence", "truncate": bound}, "gates": [gate]}
        both = {"statistic": "ratio", "level": "sequence", "keep": [1 / bound, bound]}
        yield {"name": f"seq_reject_{bound:g}", "gates": [both]}
    truncated = {"level": "token", "truncate": 2.0}
    for bound in _GEOMETRIC:
        gate = {"statistic": "ratio", "level": "geometric", "keep": [1 / bound, bound]}
        yield {"name": f"geo_{bound:g}", "gates": [gate]}
        yield {"name": f"geo_{bound:g}_token_truncate_2", "weight": truncated, "gates": [gate]}
    veto = {"statistic": "ratio", "level": "min", "keep": [1e-4, None], "clamp": "none"}
    yield {"name": "veto_token_truncate_2", "weight": truncated, "gates": [veto]}
