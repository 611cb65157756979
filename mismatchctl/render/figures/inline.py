"""matplotlib's drawing as SVG for a page: classes for colours, text that the page's font shows, few bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from markupsafe import escape
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path

from mismatchctl.render.figures.theme import name_of

_LETTER = 0.56
"""Width of a letter as a share of the font's size; a page's font is not known here."""
_ANCHORS = {"center": "middle", "right": "end"}
_OPAQUE = 0.999


class InlineRenderer(RendererBase):
    """What matplotlib draws becomes elements, in units of a point; nothing in them has an id or a colour of its own."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__()
        self._size = width, height
        self._elements: list[str] = []

    @property
    def elements(self) -> str:
        """All that was drawn."""
        return "".join(self._elements)

    def get_canvas_width_height(self) -> tuple[float, float]:
        """Points across and down."""
        return self._size

    def flipy(self) -> bool:
        """SVG counts downwards."""
        return True

    def points_to_pixels(self, points: Any) -> Any:
        """A unit is a point."""
        return points

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        """About what a page's letters take."""
        size = prop.get_size_in_points()
        return _LETTER * size * len(s), 0.73 * size, 0.0

    def _get_font_height_metrics(self, prop: Any) -> tuple[float, float, float]:
        """The same of a line, for matplotlib from 3.11 on: no font file has to be read."""
        size = prop.get_size_in_points()
        return 0.9 * size, 0.22 * size, 0.0

    def draw_path(self, gc: Any, path: Path, transform: Any, face: Any = None) -> None:
        """A line is cut at the axes; areas stay within them by themselves."""
        box = gc.get_clip_rectangle() if face is None else None
        clip = None if box is None else tuple(box.extents)
        found = path.cleaned(transform, remove_nans=True, clip=clip, simplify=path.should_simplify)
        self._add(self._data(found), _paint(gc, face))

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Any, path: Path, trans: Any, face: Any = None
    ) -> None:
        """All marks of a line as one element."""
        places = trans.transform(path.vertices)
        shape = marker_path.transformed(marker_trans)
        marks = (self._data(Path(shape.vertices + place, shape.codes)) for place in places[np.isfinite(places).all(1)])
        self._add("".join(marks), _paint(gc, face))

    def draw_path_collection(
        self, gc: Any, master_transform: Any, paths: Any, all_transforms: Any, offsets: Any, offset_trans: Any,
        facecolors: Any, edgecolors: Any, linewidths: Any, linestyles: Any, antialiaseds: Any, urls: Any,
        offset_position: Any, **hatches: Any,
    ) -> None:  # fmt: skip
        """Paths of one look become one element; newer matplotlib gives colors of hatches too."""
        looks: dict[str, list[str]] = {}
        base: Any = self
        drawn = base._iter_collection_raw_paths(master_transform, paths, all_transforms)
        shapes = [path.transformed(transform) for path, transform in drawn]
        for x, y, shape, one, face in base._iter_collection(
            gc, shapes, offsets, offset_trans, facecolors, edgecolors, linewidths, linestyles, antialiaseds, urls,
            offset_position, **hatches,
        ):  # fmt: skip
            moved = Path(shape.vertices + np.array([x, y]), shape.codes)
            looks.setdefault(_paint(one, face), []).append(self._data(moved))
        for look, parts in looks.items():
            self._add("".join(parts), look)

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False,
        mtext: Any = None,
    ) -> None:  # fmt: skip
        """Text stays text, in the page's font."""
        anchor = ""
        if mtext is not None:  # the page's letters are wider or narrower: the anchor is what stays
            across, up = mtext.get_transform().transform(mtext.get_unitless_position())
            x, y = (x, self._size[1] - up) if angle else (across, y)
            anchor = _ANCHORS.get(mtext.get_horizontalalignment(), "")
        place = f'transform="translate({_short(x)} {_short(y)})rotate({-angle:g})"'
        if not angle:
            place = f'x="{_short(x)}" y="{_short(y)}"'
        ending = f' text-anchor="{anchor}"' if anchor else ""
        color = f' class="f-{name_of(to_hex(gc.get_rgb()))}"'
        self._elements.append(
            f'<text {place} font-size="{_short(prop.get_size_in_points())}"{ending}{color}>{escape(s)}</text>'
        )

    def _add(self, data: str, look: str) -> None:
        if data and look:
            self._elements.append(f'<path d="{data}"{look}/>')

    def _data(self, path: Path) -> str:
        """The path as SVG says it, downwards, to a tenth of a unit."""
        points = np.round(np.asarray(path.vertices) * (1, -1) + (0, self._size[1]), 1).tolist()
        codes = (
            [Path.MOVETO, *[Path.LINETO] * (len(points) - 1)] if path.codes is None else np.asarray(path.codes).tolist()
        )
        said: list[str] = []
        last = None
        for code, (x, y) in zip(codes, points, strict=True):
            if code == Path.STOP:
                break
            if code == Path.CLOSEPOLY:
                said.append("z")
            else:
                letter = "" if code == last and code != Path.MOVETO else _LETTERS[code]
                said.append(f"{letter}{x:g} {y:g}" if letter else f" {x:g} {y:g}")
                # further points of a curve, and of a line after its start, follow without a letter
            last = code
        return "".join(said)


_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def _paint(gc: Any, face: Any) -> str:
    """Classes and attributes of what is filled, outlined or both; nothing where it is neither."""
    classes, extra = [], ""
    if face is not None and (len(face) < 4 or face[3] > 0):
        classes.append(f"f-{name_of(to_hex(face[:3]))}")
        alpha = gc.get_alpha() if gc.get_forced_alpha() else face[3] if len(face) > 3 else 1.0
        extra += f' fill-opacity="{alpha:.2g}"' if alpha < _OPAQUE else ""
    width, rgb = gc.get_linewidth(), gc.get_rgb()
    if width > 0 and rgb[3] > 0:
        classes.append(f"l-{name_of(to_hex(rgb[:3]))}")
        extra += f' stroke-width="{_short(width)}"'
        alpha = gc.get_alpha() if gc.get_forced_alpha() else rgb[3]
        extra += f' stroke-opacity="{alpha:.2g}"' if alpha < _OPAQUE else ""
        dashes = gc.get_dashes()[1]
        extra += f' stroke-dasharray="{" ".join(map(_short, dashes))}"' if dashes is not None else ""
        extra += ' stroke-linecap="round"' if gc.get_capstyle() == "round" else ""
    if not classes:
        return ""
    hollow = "" if classes[0].startswith("f-") else ' fill="none"'
    return f' class="{" ".join(classes)}"{hollow}{extra}'


def _short(value: float) -> str:
    return f"{round(float(value), 2):g}"
