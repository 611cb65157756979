"""OpenRLHF 0.11 (3c3be6234e0c)."""

from mismatchctl.frameworks.openrlhf.framework import OpenRlhf
from mismatchctl.frameworks.openrlhf.layout import LAYOUT
from mismatchctl.frameworks.plain import shelf_of

SHELF = shelf_of(OpenRlhf, versions=("0.11",), layouts=(LAYOUT,))
