"""Which release of verl a configuration was written for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.verl.dialect import read
from mismatchctl.frameworks.verl.keys import ACTOR_BLOCK, ACTOR_CAP, BLOCK, find
from mismatchctl.frameworks.verl.versions import KEYS, VERSIONS, Version

_COMMON = {"loss_type"}
"""Keys outside of a block by which nobody is recognized: other frameworks have the word."""


def recognize(native: Mapping[str, Any]) -> str | None:
    """The version of a configuration; None where nothing in it is of rollout correction.

    Of the versions that know most of its keys, the newest in which it does something; else the newest that takes it;
    else the newest, whose error it then gets.
    """
    section, versions = _section(native)
    elsewhere = isinstance(find(native, *ACTOR_BLOCK), Mapping) or find(native, *ACTOR_CAP) is not None
    if elsewhere and not section.keys() & KEYS:
        return VERSIONS[-1].name
    if section is native and section.keys() & KEYS <= _COMMON:
        return None
    known = {version.name: len(section.keys() & version.keys.keys()) for version in versions}
    most = max(known.values(), default=0)
    if not most and BLOCK not in _outer(native):
        return None
    candidates = [version for version in reversed(versions) if known[version.name] == most]
    return max(candidates, key=lambda version: _takes(native, version)).name  # the first of several is the newest


def _takes(native: Mapping[str, Any], version: Version) -> int:
    """0 rejected, 1 taken, 2 taken and something comes of it."""
    try:
        correction = read(native, version)
    except ConfigError:
        return 0
    return 1 + (correction != Correction(name=correction.name, about=correction.about))


def _outer(native: Mapping[str, Any]) -> Mapping[str, Any]:
    algorithm = native.get("algorithm")
    return algorithm if isinstance(algorithm, Mapping) else native


def _section(native: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Version]]:
    """The keys of rollout correction among others, and the versions that look for them there."""
    outer = _outer(native)
    blocks = [version for version in VERSIONS if version.dialect != "flat"]
    flat = [version for version in VERSIONS if version.dialect == "flat"]
    if BLOCK in outer:
        block = outer[BLOCK]
        return (block if isinstance(block, Mapping) else {}), blocks
    if outer is not native:
        return outer, flat
    level = native.get("rollout_is", True)  # a switch in the flat keys, a level or null in all others
    return native, [*(flat if isinstance(level, bool) else []), *blocks]
