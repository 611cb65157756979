"""What figures take of matplotlib, loaded in half the time: its docstrings go without their lists of properties.

matplotlib puts those lists together while it is loaded, for each of its classes. Somebody at a prompt, who may ask for
them, gets them.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from matplotlib import artist

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def _without_lists() -> Iterator[None]:
    made = artist.kwdoc
    if not hasattr(sys, "ps1") and "IPython" not in sys.modules:
        vars(artist)["kwdoc"] = lambda _: ""
    try:
        yield
    finally:
        vars(artist)["kwdoc"] = made


with _without_lists():
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["Figure", "Line2D", "LineCollection", "PolyCollection"]
