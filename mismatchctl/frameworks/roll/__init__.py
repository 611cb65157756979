"""ROLL of 2026-08 (8eb27cc2dc34)."""

from mismatchctl.frameworks.plain import shelf_of
from mismatchctl.frameworks.roll.framework import Roll
from mismatchctl.frameworks.roll.layout import LAYOUT

SHELF = shelf_of(Roll, versions=("2026-08",), layouts=(LAYOUT,))
