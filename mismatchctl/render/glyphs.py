"""Characters that draw in a terminal: Unicode ones, and plain stand-ins where the terminal has only ASCII."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from mismatchctl.ratios import DENSE_RANGE, MOE_RANGE, SCALE, place
from mismatchctl.render.text import clean

_PLAIN = str.maketrans(
    {"±": "+-", "−": "-", "–": "-", "→": "->", "…": "...", "×": "x", "▲": "up", "▼": "down", "⟨": "<", "⟩": ">"}
)
_BARS, _PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
WIDTH = 40
"""Of a drawn series, unless there is less room."""
LEAST_SPREAD = math.log(1.5)
"""A series that varies less than by this factor is not stretched over the whole height."""
_LABELS = ((SCALE[0], "1e-8"), (DENSE_RANGE[0], "1e-5 dense"), (MOE_RANGE[0], "1e-3 MoE"), (MOE_RANGE[1], "1e-1"))


class Glyphs:
    """How one console writes text and draws."""

    def __init__(self, console: Console) -> None:
        self.plain = console.options.ascii_only

    def text(self, text: str) -> str:
        """A string from outside, or with signs in it, as this console can show it."""
        shown = clean(text)
        return shown.translate(_PLAIN).encode("ascii", "backslashreplace").decode() if self.plain else shown

    def short(self, text: str, length: int) -> str:
        """The same, without its middle where it is longer than `length`: names tend to differ at their ends."""
        shown, dots = self.text(text), "..." if self.plain else "…"
        if len(shown) <= length:
            return shown
        room = max(length - len(dots), 2)
        return f"{shown[: room - room // 2]}{dots}{shown[len(shown) - room // 2 :]}"

    def sparkline(self, values: Sequence[float | None], width: int = WIDTH) -> str:
        """A positive series as bars on a log scale; undefined values are blank, long series averaged to `width`."""
        heights = [_log(value) for value in values]
        if len(heights) > width:
            cuts = [round(i * len(heights) / width) for i in range(width + 1)]
            heights = [_mean(heights[start:end]) for start, end in pairwise(cuts)]
        known = [height for height in heights if height is not None and math.isfinite(height)]
        if not known:
            return ""
        spread = max(max(known) - min(known), LEAST_SPREAD)
        low = (max(known) + min(known) - spread) / 2
        return "".join(self._bar(height, low, spread) for height in heights)

    def shares(self, values: Sequence[float | None]) -> str:
        """Fractions as bars on the scale from 0 to 1; long series are thinned."""
        count = min(len(values), WIDTH)
        places = [round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)]
        return "".join(self._bar(values[place], 0.0, 1.0) for place in places)

    def _bar(self, height: float | None, low: float, spread: float) -> str:
        if height is None:
            return " "
        bars = _PLAIN_BARS if self.plain else _BARS
        share = 0.0 if height == -math.inf else (height - low) / spread
        return bars[min(int(share * len(bars)), len(bars) - 1)]

    def scale(self, k3: float, width: int) -> Text:
        """A line over the decades with the two usual ranges, a mark where `k3` stands, and its labels below."""
        rule, dense, moe, mark = "-=#X" if self.plain else "─━═●"
        cells = [rule] * width
        for (start, end), fill in ((DENSE_RANGE, dense), (MOE_RANGE, moe)):
            for index in range(_place(start, width), _place(end, width)):
                cells[index] = fill
        here = _place(k3, width)
        outside = (self.text("<"), self.text(">")) if self.plain else ("◂", "▸")
        cells[here] = outside[0] if k3 < SCALE[0] else outside[1] if k3 > SCALE[1] else mark
        line = Text("".join(cells), style="dim")
        line.stylize("not dim bold", here, here + 1)
        return Text.assemble(line, "\n", (_labels(width), "dim"))


def _log(value: float | None) -> float | None:
    return None if value is None else math.log(value) if value > 0 else -math.inf


def _mean(heights: Sequence[float | None]) -> float | None:
    known = [height for height in heights if height is not None]
    return sum(known) / len(known) if known else None


def _place(k3: float, width: int) -> int:
    return round(place(k3) * (width - 1))


def _labels(width: int) -> str:
    line = ""
    for start, name in _LABELS:
        here = _place(start, width)
        if len(line) < here or not line:
            line = line.ljust(here) + name
    return line[:width]
