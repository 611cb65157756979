"""Figures that compare corrections: one row each, a dot with its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import LEGEND_ROW, LETTER, Canvas
from mismatchctl.render.figures.figure import Cell, Data, Figure
from mismatchctl.render.figures.scales import percent, plain
from mismatchctl.render.figures.series import SURE
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import SERIES, SURFACE
from mismatchctl.render.text import clean, short
from mismatchctl.result import Value

_NAME_LENGTH = 22
_ROW = 20.0
"""Points of height of a row."""
_BARS = "Bars are ± 2 standard errors."


@dataclass(frozen=True)
class Dots:
    """What one figure compares: up to two metrics per correction, as a filled and a hollow dot.

    `says` is its message about the correction that stands out: {name}, {value}; `least` picks the smallest, `off` the
    farthest from 1.
    """

    name: str
    subject: str
    axis: str
    keys: tuple[tuple[str, str], ...]
    share: bool = False
    reference: float | None = None
    log: bool = False
    caption: str = ""
    says: str = ""
    least: bool = False


COMPARED = (
    Dots(
        "rejected", "What each correction rejects", "share rejected",
        (("rejected_tokens", "tokens"), ("fully_rejected_sequences", "whole sequences")), share=True,
        caption="The data that is thrown away.", says="{name} rejects most: {value} of tokens",
    ),
    Dots(
        "ess-after", "Effective sample size after", "share left, in effect",
        (("ess_token", "tokens"), ("ess_sequence", "sequences")), share=True,
        caption="What weighting and rejection together leave of the data; further right is cheaper.",
        says="{name} leaves least of the tokens: {value}", least=True,
    ),
    Dots(
        "scale", "Bias: mean weight and loss scale", "ratio",
        (("weight_mean", "mean weight"), ("loss_scale", "loss scale")), reference=1.0,
        caption="1 is unbiased. Below 1 the bound takes away more than it gives, or rejected tokens stay in the "
        "denominator.", says="Mean weight is farthest from 1 under {name}: {value}",
    ),
    Dots(
        "k3-kept", "K3 of what is kept", "K3 (nats/token)", (("k3_kept", "K3 of kept tokens"),), log=True,
        caption="The mismatch that remains in the data that trains.",
        says="{name} leaves the smallest K3: {value}", least=True,
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


def sides_dots(by: str) -> Dots:
    """The errors of both sides against a reference, by something."""
    return Dots(
        f"errors-by-{by}", f"Errors against the reference by {by}", "root mean square error (nats)",
        (("rollout", "rollout"), ("train", "train")), log=True,
        caption="Whose dots lie further right is further from the reference there.",
        says=f"{by} {{name}} has the rollout's largest error: {{value}}",
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
    two = len(dots.keys) > 1
    height = 70 + _ROW * len(rows) + (LEGEND_ROW if two else 0)
    layout = FigureLayout(height, left=12 + LETTER * max(map(len, names)), below=LEGEND_ROW if two else 0)

    def paint(canvas: Canvas) -> None:
        canvas.ticks("y", range(len(rows)), lambda place: names[int(place)], (len(rows) - 0.4, -0.6))
        _horizontal(canvas, dots, [value for values in rows.values() for value in values])
        if dots.reference is not None:
            canvas.rule([dots.reference] * 2, [len(rows) - 0.4, -0.6])
        for index in range(len(dots.keys)):
            _column(canvas, index, [values[index] for values in rows.values()], 0.16 * (2 * index - 1) if two else 0)
        canvas.labels(dots.axis)
        if two:
            canvas.legend([(text, _mark(index)) for index, (_, text) in enumerate(dots.keys)])

    return Figure(
        name, _message(dots, rows), dots.subject, _caption(dots, rows), _alt(dots, rows), _data(dots, rows), paint,
        layout,
    )  # fmt: skip


def _caption(dots: Dots, rows: Mapping[str, Sequence[Value]]) -> str:
    bars = any(value.se for values in rows.values() for value in values)
    return f"{dots.caption} {_BARS}" if bars else dots.caption


def _mark(index: int) -> dict[str, Any]:
    """A filled or a hollow dot."""
    face = SERIES[index] if index == 0 else SURFACE
    return {"dash": "", "mark": "o", "size": 6, "color": SERIES[index], "face": face, "edge": 1.5}


def _column(canvas: Canvas, index: int, values: Sequence[Value], shift: float) -> None:
    """One metric of every correction: bars, and dots above them."""
    known = [(place + shift, v.value, SURE * (v.se or 0.0)) for place, v in enumerate(values) if v.value is not None]
    low, high = canvas.axis("x").limits
    bars = np.array([(y, max(x - reach, low), min(x + reach, high)) for y, x, reach in known if reach]).reshape(-1, 3)
    canvas.bars(*bars.T, across=True, color=SERIES[index], width=1.6, opacity=0.55)
    canvas.line([x for _, x, _ in known], [y for y, _, _ in known], clip=False, order=4, **_mark(index))


def _horizontal(canvas: Canvas, dots: Dots, values: Sequence[Value]) -> None:
    known = [(value.value, SURE * (value.se or 0.0)) for value in values if value.value is not None]
    if dots.log:
        positive = [value for value, _ in known if value > 0]
        canvas.log("x", min(positive) / 2, max(value + se for value, se in known) * 1.5)
        return
    if dots.share:
        top = min(1.0, max([value + se for value, se in known] + [1e-3]))
        canvas.linear("x", -0.03 * top, 1.05 * top, percent, 5)
        return
    ends = [value + side * min(se, 3 * abs(value) + 1) for value, se in known for side in (-1, 1)]
    ends += [] if dots.reference is None else [dots.reference]
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    canvas.linear("x", min(ends) - margin, max(ends) + margin, plain, 5)


def _message(dots: Dots, rows: Mapping[str, Sequence[Value]]) -> str:
    """The correction that stands out; of kept against rejected, where they are farthest apart by their errors."""
    if not dots.says:
        return _apart(dots, rows)
    first = {name: values[0].value for name, values in rows.items() if values[0].value is not None}
    if not first:
        return dots.subject
    far = {name: abs(value - dots.reference) if dots.reference is not None else value for name, value in first.items()}
    if len(set(far.values())) == 1:
        return f"{dots.keys[0][1][:1].upper()}{dots.keys[0][1][1:]}: {_text(dots, next(iter(first.values())))} for all"
    name = (min if dots.least else max)(far, key=far.__getitem__)
    return dots.says.format(name=short(name, 40), value=_text(dots, first[name]))


def _apart(dots: Dots, rows: Mapping[str, Sequence[Value]]) -> str:
    noun = dots.subject.partition(",")[0].lower()
    distance = {}
    for name, (kept, rejected) in rows.items():
        if kept.value is not None and rejected.value is not None:
            error = float(np.hypot(kept.se or 0.0, rejected.se or 0.0))
            distance[name] = (rejected.value - kept.value) / error if error else 0.0
    name = max(distance, key=lambda key: abs(distance[key]))
    if abs(distance[name]) < SURE:
        return f"The {noun} of what is rejected is that of what is kept, within the errors"
    kept, rejected = rows[name]
    word = "higher" if distance[name] > 0 else "lower"
    return f"{short(name, 40)} rejects a {word} {noun}: {_text(dots, rejected.value)} against {_text(dots, kept.value)}"


def _text(dots: Dots, value: float | None) -> str:
    return number(value, "fraction" if dots.share else "")


def _alt(dots: Dots, rows: Mapping[str, Sequence[Value]]) -> str:
    said = []
    for name, values in rows.items():
        shown = [f"{text} {_text(dots, value.value)}" for (_, text), value in zip(dots.keys, values, strict=True)]
        said.append(f"{short(name, 40)}: {', '.join(shown)}.")
    return clean(f"Dots of {dots.axis} by correction. {' '.join(said)}")


def _data(dots: Dots, rows: Mapping[str, Sequence[Value]]) -> Data:
    heads = ["correction"]
    for _, text in dots.keys:
        heads += [f"{text} ({dots.axis})", "standard error"]
    cells: list[tuple[Cell, ...]] = []
    for name, values in rows.items():
        cells.append((name, *(cell for value in values for cell in (value.value, value.se))))
    return Data(tuple(heads), tuple(cells))
