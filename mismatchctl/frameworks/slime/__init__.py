"""slime, and Miles, which forked it: everything that is theirs and nothing else's. One file per matter.

versions    the releases, and in what they differ
arguments   slime's arguments, checked as slime checks them; dialect: arguments <-> Correction
lint        traps of its arguments
call        one micro-batch: weights and kept tokens; loss: its policy loss
metrics     the logged names and their meanings in words
replay      column names, replay and loss of a step, from tokens to its scalars
layout, zigzag: their files
"""

from mismatchctl.frameworks.framework import Shelf
from mismatchctl.frameworks.slime.arguments import recognize
from mismatchctl.frameworks.slime.layout import LAYOUT, ROLLOUTS
from mismatchctl.frameworks.slime.replay import Slime
from mismatchctl.frameworks.slime.versions import find_version, months

SHELF = Shelf(
    name="slime",
    versions=months("slime"),
    load=lambda version: Slime(find_version("slime", version)),
    recognize=recognize,
    columns=Slime.columns,
    layouts=(LAYOUT, ROLLOUTS),
)
