"""What a figure's SVG shows, and what matplotlib draws of the same figure, in the same terms: for tests."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

import numpy as np
import pytest
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path

from mismatchctl.report.figures.figure import Figure
from mismatchctl.report.figures.matplotlib_backend import draw_with_matplotlib
from mismatchctl.report.figures.svg import FIGURE_WIDTH, Drawing, color_name


class Seen(NamedTuple):
    """One element: its classes and attributes, and where it lies: the box of each part, or the place of a text."""

    look: tuple[str, ...]
    boxes: list[tuple[float, ...]]


def assert_shown_as_drawn(figure: Figure) -> None:
    """A page's SVG has what matplotlib draws, in the same order: texts, lines, marks, areas, their looks and places."""
    shown, expected = of_svg(str(figure.svg)), of_matplotlib(figure.drawing)
    assert [one.look for one in shown] == [one.look for one in expected], figure.name
    for one, other in zip(shown, expected, strict=True):
        boxes, held = (np.array(sorted(seen.boxes)) for seen in (one, other))
        assert boxes == pytest.approx(held, abs=0.11), (figure.name, one.look)


def of_svg(svg: str) -> list[Seen]:
    """The elements of a page's figure."""
    found = []
    for element in ET.fromstring(svg).iter():
        given = dict(element.attrib)
        if element.tag == "path":
            parts = [_numbers(part) for part in re.findall("M[^M]*", given.pop("d"))]
            circles = "a" in element.attrib["d"]
            boxes = [_circle(*part[:3]) if circles else _box(np.reshape(part, (-1, 2))) for part in parts]
            found.append(Seen(tuple(sorted(f"{key} {value}" for key, value in given.items())), boxes))
        elif element.tag == "text":
            x, y, *turned = _numbers(given.get("transform") or f"{given['x']} {given['y']}")
            look = given["class"], given["font-size"], given.get("text-anchor", "start"), str(element.text), str(turned)
            found.append(Seen(look, [(x, y)]))
    return found


def of_matplotlib(drawing: Drawing) -> list[Seen]:
    """The same of what matplotlib draws, without the grounds of the figure and of its axes."""
    with draw_with_matplotlib(drawing) as figure:
        renderer = _Renderer(drawing.layout.height)
        figure.draw(renderer)
    return renderer.seen[2:]


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d*\.?\d+(?:e-?\d+)?", text)]


def _circle(x: float, y: float, half: float) -> tuple[float, ...]:
    return x, y - half, x + 2 * half, y + half


def _box(points: Any) -> tuple[float, ...]:
    return (*points.min(axis=0).tolist(), *points.max(axis=0).tolist())


class _Renderer(RendererBase):
    """Takes down what matplotlib draws, in points from the upper left corner."""

    def __init__(self, height: float) -> None:
        super().__init__()
        self._height = height
        self.seen: list[Seen] = []

    def get_canvas_width_height(self) -> tuple[float, float]:
        return FIGURE_WIDTH, self._height

    def flipy(self) -> bool:
        return True

    def points_to_pixels(self, points: Any) -> Any:
        return points

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        size = prop.get_size_in_points()
        return 0.56 * size * len(s), 0.73 * size, 0.0

    def _get_font_height_metrics(self, prop: Any) -> tuple[float, float, float]:
        size = prop.get_size_in_points()
        return 0.9 * size, 0.22 * size, 0.0

    def draw_path(self, gc: Any, path: Path, transform: Any, face: Any = None) -> None:
        box = gc.get_clip_rectangle() if face is None else None
        clip = None if box is None else tuple(box.extents)
        self._see(gc, face, [path.cleaned(transform, remove_nans=True, clip=clip, simplify=False)])

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Any, path: Path, trans: Any, face: Any = None
    ) -> None:
        shape = marker_path.transformed(marker_trans)
        places = trans.transform(path.vertices)
        self._see(gc, face, [Path(shape.vertices + at, shape.codes) for at in places[np.isfinite(places).all(1)]])

    def draw_path_collection(self, gc: Any, master: Any, paths: Any, transforms: Any, *rest: Any, **more: Any) -> None:
        base: Any = self
        shapes = [path.transformed(by) for path, by in base._iter_collection_raw_paths(master, paths, transforms)]
        looks: dict[tuple[float, ...], tuple[Any, list[Path]]] = {}
        for x, y, shape, one, face in base._iter_collection(gc, shapes, *rest, **more):
            looks.setdefault(tuple(face), (one, []))[1].append(Path(np.add(shape.vertices, (x, y)), shape.codes))
        for face, (one, parts) in looks.items():
            self._see(one, face, parts)

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        across, up = mtext.get_transform().transform(mtext.get_unitless_position())
        place = (x, self._height - up) if angle else (across, y)
        anchor = {"left": "start", "center": "middle", "right": "end"}[mtext.get_horizontalalignment()]
        turned = str([-angle] if angle else [])
        look = f"f-{color_name(to_hex(gc.get_rgb()))}", f"{prop.get_size_in_points():g}", anchor, s, turned
        self.seen.append(Seen(look, [place]))

    def _see(self, gc: Any, face: Any, paths: list[Path]) -> None:
        parts = [part * (1, -1) + (0, self._height) for path in paths for part in _parts(path)]
        classes, look = [], []
        if face is not None:
            classes.append(f"f-{color_name(to_hex(face[:3]))}")
            opacity = gc.get_alpha() if gc.get_forced_alpha() else face[3]
            look += [f"fill-opacity {opacity:.2g}"] if opacity < 1 else []
        else:
            look.append("fill none")
        if gc.get_linewidth() > 0:
            classes.append(f"l-{color_name(to_hex(gc.get_rgb()[:3]))}")
            look.append(f"stroke-width {gc.get_linewidth():g}")
            opacity = gc.get_alpha() if gc.get_forced_alpha() else gc.get_rgb()[3]
            look += [f"stroke-opacity {opacity:.2g}"] if opacity < 1 else []
            dashes = gc.get_dashes()[1] or []
            look += [f"stroke-dasharray {' '.join(f'{round(length, 2):g}' for length in dashes)}"] * bool(dashes)
        if parts and classes:
            self.seen.append(Seen(tuple(sorted([f"class {' '.join(classes)}", *look])), [_box(part) for part in parts]))


def _parts(path: Path) -> list[Any]:
    """Points of each part; what closes a path repeats none."""
    codes = np.full(len(path.vertices), Path.LINETO) if path.codes is None else np.asarray(path.codes)
    real = ~np.isin(codes, (Path.STOP, Path.CLOSEPOLY))
    points, starts = path.vertices[real], np.flatnonzero(codes[real] == Path.MOVETO)
    return [part for part in np.split(points, starts) if len(part) > 1]
