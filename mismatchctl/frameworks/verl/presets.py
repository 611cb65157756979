"""verl's presets of three releases: its factories, read as verl reads the keys that they set.

What changed between them, under the same or similar names:
    2025-11 (PR #3984): rejection by the ratio, clamped after aggregation; veto.
    2025-11-25 (PR #3980): presets are called decoupled_* and pg_*. Names that the next release kept stand
        below with the meaning that it gave them.
    2026-08: rejection by the estimators k1, k2, k3, clamped per token before aggregation; no veto. k1 is
        rollout minus train, so that "lo_hi" bounds rollout/train; verl's documentation says train/rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatchctl.correction.model import Correction
from mismatchctl.correction.presets import Preset
from mismatchctl.frameworks.verl.config import read
from mismatchctl.frameworks.verl.factories import FACTORIES
from mismatchctl.frameworks.verl.versions import find_version
from mismatchctl.texts import read_data


def _presets(releases: list[dict[str, Any]]) -> Iterator[Preset]:
    """The presets of each release, oldest first, an alias after the preset that it names again."""
    for release in releases:
        for name, words in release["presets"].items():
            source = f"{release['source']}: RolloutCorrectionConfig.{name}()"
            made = _correction(name, words["about"], release["reader"])
            preset = Preset(made, "verl", release["version"], source, documented=words.get("documented", ""))
            yield preset
            if "alias" in words:
                yield preset.alias(words["alias"])


def _correction(name: str, about: str, version: str) -> Correction:
    """What verl makes of a factory's keys, with its defaults."""
    factory = FACTORIES[version][name]
    keys: Mapping[str, Any] = {"rollout_correction": factory.keys(factory.defaults)}
    made = read(keys, find_version(version))
    return Correction(name=name, about=about, weight=made.weight, gates=made.gates, loss=made.loss)


PRESETS: tuple[Preset, ...] = tuple(_presets(read_data(Path(__file__).parent / "presets.yaml")))
