"""open-instruct of 2026-08 (e6c3044aa620)."""

from mismatchctl.frameworks.open_instruct.framework import OpenInstruct
from mismatchctl.frameworks.open_instruct.layout import LAYOUT
from mismatchctl.frameworks.plain import shelf_of

SHELF = shelf_of(OpenInstruct, versions=("2026-08",), layouts=(LAYOUT,))
