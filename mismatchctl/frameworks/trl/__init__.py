"""TRL's GRPO trainer, 1.10 (2026-07, f2cd57710ae3)."""

from mismatchctl.frameworks.plain import shelf_of
from mismatchctl.frameworks.trl.framework import CLASS, Trl, keys_of
from mismatchctl.frameworks.trl.layout import COMPLETIONS, LAYOUT

SHELF = shelf_of(Trl, versions=("2026-08",), layouts=(LAYOUT, COMPLETIONS), classes={CLASS: keys_of})
