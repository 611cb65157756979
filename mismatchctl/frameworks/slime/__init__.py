"""Adapter of slime: dump files, versions and registration."""

from mismatchctl.frameworks.adapter import Adapter
from mismatchctl.frameworks.slime.arguments import recognize
from mismatchctl.frameworks.slime.framework import Slime
from mismatchctl.frameworks.slime.layout import LAYOUT, ROLLOUT_LAYOUT, VIME_LAYOUTS
from mismatchctl.frameworks.slime.versions import find_version, list_months

ADAPTER = Adapter(
    name="slime",
    versions=list_months("slime"),
    load=lambda version: Slime(find_version("slime", version)),
    recognize=recognize,
    columns=Slime.columns,
    layouts=(LAYOUT, ROLLOUT_LAYOUT, *VIME_LAYOUTS),
)
