"""NeMo-RL of 2026-08 (7ea279abfbeb)."""

from mismatchctl.frameworks.nemo_rl.framework import NemoRl
from mismatchctl.frameworks.nemo_rl.layout import LAYOUT
from mismatchctl.frameworks.plain import shelf_of

SHELF = shelf_of(NemoRl, versions=("2026-08",), layouts=(LAYOUT,))
