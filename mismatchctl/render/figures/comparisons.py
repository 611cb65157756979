"""Figures that compare corrections: one row each, a dot with its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mismatchctl.render.figures.canvas import INK, MUTED, SERIES, SURFACE, WIDTH, Canvas, Figure, percent
from mismatchctl.render.series import SURE
from mismatchctl.render.text import short
from mismatchctl.result import Value

_NAME_LENGTH = 24
_LETTER = 6.1  # width of one, in the units of the figure
_ROW = 0.27  # inches
_BARS = "Bars are ± 2 standard errors."


@dataclass(frozen=True)
class Dots:
    """What one figure compares: up to two metrics per correction, as a filled and a hollow dot."""

    name: str
    title: str
    axis: str
    keys: tuple[tuple[str, str], ...]
    share: bool = False
    reference: float | None = None
    log: bool = False
    caption: str = ""


COMPARED = (
    Dots(
        "rejected", "What each correction rejects", "share rejected",
        (("rejected_tokens", "tokens"), ("fully_rejected_sequences", "whole sequences")), share=True,
        caption="The data that is thrown away.",
    ),
    Dots(
        "ess-after", "Effective sample size after", "share left, in effect",
        (("ess_token", "tokens"), ("ess_sequence", "sequences")), share=True,
        caption="What weighting and rejection together leave of the data; further right is cheaper.",
    ),
    Dots(
        "scale", "Bias: mean weight and loss scale", "ratio",
        (("weight_mean", "mean weight"), ("loss_scale", "loss scale")), reference=1.0,
        caption="1 is unbiased. Below 1 the bound takes away more than it gives, or rejected tokens stay in the "
        "denominator.",
    ),
    Dots(
        "k3-kept", "K3 of what is kept", "K3 (nats/token)", (("k3_kept", "K3 of kept tokens"),), log=True,
        caption="The mismatch that remains in the data that trains.",
    ),
)  # fmt: skip

KEPT_AGAINST_REJECTED = tuple(
    Dots(
        f"kept-{name}", f"Mean {name}, kept against rejected", axis,
        ((f"kept_{name}", "kept"), (f"rejected_{name}", "rejected")),
        caption="Where the two differ beyond their bars, rejection selects, and changes what is learned.",
    )
    for name, axis in (("reward", "mean reward"), ("advantage", "mean advantage"), ("length", "mean length (tokens)"))
)  # fmt: skip


def dots_figure(dots: Dots, corrections: Mapping[str, Mapping[str, Value]], name: str) -> Figure | None:
    """One figure; None where no correction has a value for it, or none has both sides of a comparison."""
    rows = {
        correction: [values.get(key, Value(value=None)) for key, _ in dots.keys]
        for correction, values in corrections.items()
    }
    complete = [values for values in rows.values() if all(value.value is not None for value in values)]
    if not complete or (dots.log and not any((v.value or 0) > 0 for values in complete for v in values)):
        return None
    names = [short(correction, _NAME_LENGTH) for correction in rows]
    height = 1.05 + _ROW * len(rows) + (0.1 if len(dots.keys) > 1 else 0)
    canvas = Canvas(
        name, height=height, left=20 + _LETTER * max(map(len, names)), bottom=18 if len(dots.keys) > 1 else 0
    )
    canvas.axes.set_ylim(len(rows) - 0.4, -0.6)
    canvas.ticks("y", range(len(rows)), lambda place: names[int(place)])
    _horizontal(canvas, dots, [value for values in rows.values() for value in values])
    if dots.reference is not None:
        canvas.axes.axvline(dots.reference, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    for place, values in enumerate(rows.values()):
        for index, value in enumerate(values):
            _dot(canvas, value, place + (0.16 * (2 * index - 1) if len(values) > 1 else 0), index)
    canvas.labels(dots.axis)
    if len(dots.keys) > 1:
        _key(canvas, [text for _, text in dots.keys], height)
    return canvas.finish(dots.title, f"{dots.caption} {_BARS}")


def _horizontal(canvas: Canvas, dots: Dots, values: Sequence[Value]) -> None:
    known = [(value.value, SURE * (value.se or 0.0)) for value in values if value.value is not None]
    if dots.log:
        positive = [value for value, _ in known if value > 0]
        canvas.log("x", min(positive) / 2, max(value + se for value, se in known) * 1.5)
        return
    if dots.share:
        top = min(1.0, max([value + se for value, se in known] + [1e-3]))
        canvas.linear("x", -0.03 * top, 1.05 * top, percent)
        return
    ends = [value + side * min(se, 3 * abs(value) + 1) for value, se in known for side in (-1, 1)]
    ends += [] if dots.reference is None else [dots.reference]
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    text: Callable[[float], str] | None = None
    canvas.linear("x", min(ends) - margin, max(ends) + margin, text)


def _dot(canvas: Canvas, value: Value, place: float, index: int) -> None:
    if value.value is None:
        return
    reach = SURE * (value.se or 0.0)
    low, high = canvas.axes.get_xlim()
    ends = max(value.value - reach, low), min(value.value + reach, high)
    canvas.axes.plot(ends, [place, place], color=SERIES[index], linewidth=1.6, alpha=0.55, solid_capstyle="round")
    face = SERIES[index] if index == 0 else SURFACE
    canvas.axes.plot(
        [value.value], [place], "o", markersize=5.5, color=SERIES[index], markerfacecolor=face, markeredgewidth=1.5,
        clip_on=False, zorder=4,
    )  # fmt: skip


def _key(canvas: Canvas, names: Sequence[str], height: float) -> None:
    """What the filled and the hollow dot are, in a line below the axes."""
    wide, high = 72 * WIDTH, 72 * height
    place = 62.0
    for index, name in enumerate(names):
        face = SERIES[index] if index == 0 else SURFACE
        canvas.mark(place / wide, 11 / high, SERIES[index], face)
        canvas.figure.text((place + 9) / wide, 7 / high, name, color=INK, va="bottom")
        place += 30 + 6.2 * len(name)
