"""prime-rl at its last snapshot (2026-08, 559b44772e47), and two later states of its losses (2026-09, 2026-10).

The later ones come from texts of one file without a commit: weaker evidence than everything else here.
"""

from mismatchctl.frameworks.plain import shelf_of
from mismatchctl.frameworks.prime_rl.framework import PrimeRl
from mismatchctl.frameworks.prime_rl.layout import LAYOUT

SHELF = shelf_of(PrimeRl, versions=("2026-10", "2026-09", "2026-08"), default="2026-08", layouts=(LAYOUT,))
