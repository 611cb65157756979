"""AReaL before it moved (4aef98d8d818) and of 2026-08 (cbff54d645d2)."""

from mismatchctl.frameworks.areal.framework import Areal
from mismatchctl.frameworks.areal.layout import LAYOUT
from mismatchctl.frameworks.plain import shelf_of

SHELF = shelf_of(Areal, versions=("2026-08", "4aef98d"), default="4aef98d", layouts=(LAYOUT,))
