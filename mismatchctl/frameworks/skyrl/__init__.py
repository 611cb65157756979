"""SkyRL of 2026-08 (a9564572eb8e)."""

from mismatchctl.frameworks.plain import shelf_of
from mismatchctl.frameworks.skyrl.framework import SkyRl
from mismatchctl.frameworks.skyrl.layout import LAYOUT

SHELF = shelf_of(SkyRl, versions=("2026-08",), layouts=(LAYOUT,))
