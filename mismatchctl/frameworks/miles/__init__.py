"""Miles, which forked slime and runs the same correction: what is its own; the rest is slime's."""

from pathlib import Path

from mismatchctl.frameworks.framework import Shelf
from mismatchctl.frameworks.miles.layout import DASHBOARD, LAYOUT
from mismatchctl.frameworks.slime.arguments import recognize
from mismatchctl.frameworks.slime.replay import Slime
from mismatchctl.frameworks.slime.versions import find_version, months

SHELF = Shelf(
    name="miles",
    versions=months("miles"),
    load=lambda version: Slime(find_version("miles", version)),
    recognize=recognize,
    presets=Path(__file__).with_name("presets.yaml"),
    layouts=(LAYOUT, DASHBOARD),
    compared=("miles-moe-2",),
)
