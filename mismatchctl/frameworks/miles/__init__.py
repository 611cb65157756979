"""Miles, which forked slime and runs the same correction: what is its own; the rest is slime's."""

from pathlib import Path

from mismatchctl.frameworks.framework import Shelf
from mismatchctl.frameworks.miles.layout import DASHBOARD, LAYOUT
from mismatchctl.frameworks.slime.arguments import recognize
from mismatchctl.frameworks.slime.replay import load_miles
from mismatchctl.frameworks.slime.versions import months

SHELF = Shelf(
    name="miles",
    versions=months("miles"),
    load=load_miles,
    recognize=recognize,
    presets=Path(__file__).with_name("presets.yaml"),
    layouts=(LAYOUT, DASHBOARD),
    compared=("miles-moe-2",),
)
