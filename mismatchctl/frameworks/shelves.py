"""The shelves: a framework of which only the options, the numbers and the traps are known is one line here."""

from __future__ import annotations

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.frameworks.areal import Areal
from mismatchctl.frameworks.ms_swift import MsSwift
from mismatchctl.frameworks.nemo_rl import NemoRl
from mismatchctl.frameworks.open_instruct import OpenInstruct
from mismatchctl.frameworks.openrlhf import OpenRlhf
from mismatchctl.frameworks.prime_rl import PrimeRl
from mismatchctl.frameworks.roll import Roll
from mismatchctl.frameworks.shelf import Shelf
from mismatchctl.frameworks.skyrl import SkyRl
from mismatchctl.frameworks.tinker_cookbook import TinkerCookbook
from mismatchctl.frameworks.trl import Trl

SHELVES: tuple[tuple[type[Shelf], tuple[str, ...]], ...] = (
    (Trl, ("2026-08",)),
    (NemoRl, ("2026-08",)),
    (OpenRlhf, ("0.11",)),
    (PrimeRl, ("2026-08", "2026-09", "2026-10")),
    (Areal, ("4aef98d", "2026-08")),
    (SkyRl, ("2026-08",)),
    (Roll, ("2026-08",)),
    (TinkerCookbook, ("2026-08",)),
    (OpenInstruct, ("2026-08",)),
    (MsSwift, ("2026-08",)),
)
"""Each with its versions; the first is what the plain name means."""


def load_shelf(name: str, version: str) -> Shelf | None:
    """The shelf of this name at a version; None where there is none of the name.

    Raises:
        ConfigError: it has no such version.
    """
    for shelf, versions in SHELVES:
        if shelf.name == name:
            if version and version not in versions:
                raise ConfigError(f"{name} has no version {version!r}{suggestion(version, versions)}")
            return shelf(version or versions[0])
    return None
