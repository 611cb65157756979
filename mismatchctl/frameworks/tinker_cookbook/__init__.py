"""tinker-cookbook of 2026-08 (9dfcc3a2cf44): losses run on the server, the client measures."""

from mismatchctl.frameworks.plain import shelf_of
from mismatchctl.frameworks.tinker_cookbook.framework import CLASS, TinkerCookbook, keys_of
from mismatchctl.frameworks.tinker_cookbook.layout import LAYOUT

SHELF = shelf_of(TinkerCookbook, versions=("2026-08",), layouts=(LAYOUT,), classes={CLASS: keys_of})
