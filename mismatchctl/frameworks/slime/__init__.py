"""slime, and Miles, which forked it: everything that is theirs and nothing else's. One file per matter.

versions    the releases, and in what they differ
config      slime's arguments, checked as slime checks them; translate: arguments <-> Correction
lint        traps of its arguments
call        one micro-batch: weights and kept tokens; loss: its policy loss
metrics     the logged names; names: their meanings in words; reduce: from tokens to the scalar of a step
framework   replay and loss of a step
presets     named corrections; column names
"""

from mismatchctl.frameworks.slime.config import recognizes
from mismatchctl.frameworks.slime.framework import Slime, load_miles, load_slime
from mismatchctl.frameworks.slime.metrics import DOCUMENTED, METRICS, NEVER_LOGGED, LoggedMetric, metric
from mismatchctl.frameworks.slime.presets import COLUMNS, PRESETS
from mismatchctl.frameworks.slime.versions import VERSIONS, Version

__all__ = [
    "COLUMNS",
    "DOCUMENTED",
    "METRICS",
    "NEVER_LOGGED",
    "PRESETS",
    "VERSIONS",
    "LoggedMetric",
    "Slime",
    "Version",
    "load_miles",
    "load_slime",
    "metric",
    "recognizes",
]
