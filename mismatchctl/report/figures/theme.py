"""Colors, dashes and marks of figures, and their CSS."""

from __future__ import annotations

LIGHT = {
    "ink": "#1b2330", "muted": "#566172", "grid": "#e3e7ec", "surface": "#ffffff",
    "s0": "#2166ac", "s1": "#c4570f", "s2": "#1b7f5c", "s3": "#8e4aa8", "s4": "#9a6f05", "s5": "#c2366b",
    "s6": "#2f83ad", "s7": "#7a6a53", "s8": "#5f7d14", "s9": "#6565d0",
    "r0": "#dcebf7", "r1": "#c3dcf0", "r2": "#a5cae7", "r3": "#82b4da", "r4": "#5f9ccb", "r5": "#4184ba",
    "r6": "#2a6ba5", "r7": "#18528a", "r8": "#0a3767",
}  # fmt: skip
"""Text, secondary text, grid and background, then ten series colors and a ramp of nine shades."""
DARK = {
    "ink": "#e4e9f0", "muted": "#9fabba", "grid": "#2b333e", "surface": "#1a2028",
    "s0": "#6db0f2", "s1": "#f0955a", "s2": "#53c79c", "s3": "#c792e0", "s4": "#dcb24b", "s5": "#f07fa8",
    "s6": "#6fc3e6", "s7": "#bfae93", "s8": "#a9c653", "s9": "#a3a3f5",
    "r0": "#1f3247", "r1": "#24435f", "r2": "#2a567b", "r3": "#336b99", "r4": "#4183b6", "r5": "#599dd0",
    "r6": "#7fb8e4", "r7": "#add4f2", "r8": "#e3f1fc",
}  # fmt: skip
PRINT = LIGHT | {"ink": "#000000", "muted": "#444c58"}

INK, MUTED, GRID, SURFACE = (LIGHT[name] for name in ("ink", "muted", "grid", "surface"))
SERIES = tuple(LIGHT[f"s{index}"] for index in range(10))
RAMP = tuple(LIGHT[f"r{index}"] for index in range(9))
READABLE_SHADES = (0, 1, 2, 3, 6, 7, 8)
"""Shades of the ramp with readable text on top."""
DASHES = {"-": (), "--": (5.0, 2.0), "-.": (6.0, 1.6, 1.2, 1.6), ":": (1.2, 1.6)}
MARKS = ("o", "s", "^", "D")
"""Marks in order of use. Dashes and gaps in `DASHES` are multiples of the line width."""

_COLOR_NAMES = {color: name for name, color in LIGHT.items()}


def color_name(color: str) -> str:
    """Return the name of a theme color.

    Raises:
        KeyError: the color is not in the theme.
    """
    return _COLOR_NAMES[color]


def page_css() -> str:
    """Return CSS variables for light, dark and printed pages, and the classes that use them."""
    dark = f"@media (prefers-color-scheme: dark) {{ {_css_variables(DARK)} }}"
    printed = f"@media print {{ {_css_variables(PRINT)} }}"
    return "\n".join([_css_variables(LIGHT), dark, printed, _css_classes({name: f"var(--{name})" for name in LIGHT})])


def file_css() -> str:
    """Return CSS for a standalone file, with a dark variant."""
    return f"{_css_classes(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_css_classes(DARK)} }}"


def _css_variables(palette: dict[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {color};' for name, color in palette.items())} }}"


def _css_classes(colors: dict[str, str]) -> str:
    return " ".join(f".l-{name} {{ stroke: {color} }} .f-{name} {{ fill: {color} }}" for name, color in colors.items())
