"""What a name on somebody's dashboard means: looked up in every framework, in the newest version that has it."""

from __future__ import annotations

from mismatchctl.frameworks import load
from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.slime.versions import VERSIONS as SLIME_VERSIONS
from mismatchctl.frameworks.verl.versions import VERSIONS as VERL_VERSIONS

VERSIONS: dict[str, list[str]] = {
    "verl": [version.name for version in reversed(VERL_VERSIONS)],
    "slime": [version.name for version in reversed(SLIME_VERSIONS) if version.framework == "slime"],
    "miles": [version.name for version in reversed(SLIME_VERSIONS) if version.framework == "miles"],
}
"""Versions of each framework, the newest first."""


def find_meanings(name: str) -> dict[Meaning, list[str]]:
    """What a logged or documented name means, and in which frameworks; its prefix (`train/`) may be left out."""
    found: dict[Meaning, list[str]] = {}
    for framework, versions in VERSIONS.items():
        for version in versions:
            source = load(f"{framework}@{version}")
            meanings = [item for item in source.meanings() if item.name == name or item.name.endswith(f"/{name}")]
            for meaning in meanings:
                found.setdefault(meaning, []).append(source.title)
            if meanings:
                break
    return found
