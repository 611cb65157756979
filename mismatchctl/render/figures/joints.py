"""Both sides' probabilities of the sampled tokens against each other."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.shapes import HEIGHT, WIDTH, Layout
from mismatchctl.render.figures.theme import INK, MUTED, RAMP
from mismatchctl.result import Joint

_KEY = 24.0
_APART = 0.1


def joint_figure(joint: Joint, name: str) -> Figure | None:
    """Hexagons of rollout against train probability; a colour is a power of the count."""
    if not joint.tokens:
        return None
    counts, x, y = np.array(joint.tokens, np.float64), np.array(joint.x), np.array(joint.y)
    level = np.minimum((np.log(counts) / np.log(max(counts.max(), 2) + 1) * len(RAMP)).astype(int), len(RAMP) - 1)
    layout = Layout(height=HEIGHT + 30, below=_KEY)

    def paint(canvas: Canvas) -> None:
        canvas.polygons(_hexagons(x, y, joint.width), [RAMP[index] for index in level])
        canvas.line([0, 1], [0, 1], color=INK, dash="--", width=0.9)
        canvas.linear("x", -0.02, 1.02)
        canvas.linear("y", -0.02, 1.02)
        canvas.labels("rollout probability", "train probability")
        _colour_key(canvas, float(counts.max()))

    apart = float(counts[np.abs(x - y) > _APART].sum() / counts.sum())
    return Figure(
        name, f"{number(apart, 'fraction')} of tokens differ by more than {_APART:g} in probability",
        "Rollout against train probability",
        "Tokens by the probability that each side gave the sampled token; a stronger colour is more. "
        "On the dashed line both agree; a cloud off the line is another distribution, not noise.",
        f"{int(counts.sum()):,} tokens by rollout and train probability in {len(counts):,} hexagons; "
        f"{number(apart, 'fraction')} lie more than {_APART:g} off the diagonal.",
        Data.of(("rollout probability", "train probability", "tokens"), joint.x, joint.y, joint.tokens),
        paint, layout,
    )  # fmt: skip


def _hexagons(x: Float64s, y: Float64s, width: float) -> Float64s:
    """Corners of pointy-topped hexagons [N, 6, 2]."""
    angles = np.pi / 6 + np.pi / 3 * np.arange(6)
    radius = width / math.sqrt(3) * 1.02
    return np.stack([x[:, None] + radius * np.cos(angles), y[:, None] + radius * np.sin(angles)], axis=2)


def _colour_key(canvas: Canvas, most: float) -> None:
    """A strip of the ramp below the axes, with the counts that its ends stand for."""
    left, top, right, bottom = canvas.layout.box
    low, high = 0.42 * WIDTH, 0.72 * WIDTH
    base = canvas.layout.height - 13  # downwards
    up, down = ((bottom - at) / (bottom - top) for at in (base - 8, base))
    ends = (np.linspace(low, high, len(RAMP) + 1) - left) / (right - left)
    strips = [[(a, down), (b, down), (b, up), (a, up)] for a, b in pairwise(ends)]
    canvas.polygons(np.array(strips), RAMP, space="axes")
    for at, text, side in ((low - 6, "1", "right"), (high + 6, f"{int(most):,} tokens", "left")):
        canvas.words(at, base, text, side=side, color=MUTED)
