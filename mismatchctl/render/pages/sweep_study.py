"""One correction of a sweep on one run: its curves and maps, its best points, how it differs from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.correction import correction_from_mapping
from mismatchctl.numbers import counted, number
from mismatchctl.render.document import BRIEF, Facts, Figures, Head, Later, Note, Part, Section, Table, TableCell
from mismatchctl.render.tables import MOST_ROWS, SHORT, Registry, words
from mismatchctl.render.text import clean, label, stems
from mismatchctl.result import Value
from mismatchctl.sweep.front import by_cost
from mismatchctl.sweep.model import GROUP, Mark, Sweep, values_at
from mismatchctl.sweep.study import Study
from mismatchctl.sweep.words import FIGURES, MOST_PRESETS, Row, at_place, telling, thinned, threshold, wish_text

if TYPE_CHECKING:
    from mismatchctl.render.figures import curves as draw
    from mismatchctl.render.figures.figure import Figure

AFFORDABLE = 0.05
"""A point to begin with rejects at most so many tokens, if one does."""
SHOWN, SHOWN_OF_FRONT, SPREAD = 12, 40, 5
"""Best points in a table, those with the front asked for; those of them whose steps are told apart."""
_BOTH_SIDES = ("clip", "zero", "keep")
_CURVES = ("rejected_tokens", "ess_token")


@dataclass(frozen=True)
class Studied:
    """One correction on one run: its overall rows in the order of points; names of its figures begin with `stem`."""

    sweep: Sweep
    run: str
    study: Study
    rows: Sequence[Row]
    anchor: str
    stem: str

    @cached_property
    def start(self) -> int:
        """The point that curves lead through, and exploring begins with."""
        return start_point(self.rows)

    def floats(self, key: str) -> Float64s:
        """One figure of every point, NaN where it is undefined."""
        return np.array([math.nan if row.get(key) is None else row[key] for row in self.rows], np.float64)


def study_section(own: Studied, registry: Registry, *, front: bool = False) -> Section:
    """All of it; `front`: all points that no other beats."""
    rows, study = own.rows, own.study
    best = by_cost([row for row in rows if row["pareto"]])
    chosen = thinned(best or rows, SHOWN_OF_FRONT if front else SHOWN)
    found = "No point has every figure"
    if best:
        found = f"{len(chosen)} of {len(best)} points that no other beats in rejection, ESS and bias"
    points = _points(own, chosen, f"{found}.", registry)
    points.title, points.reach = found, BRIEF

    def every() -> Iterator[Part | None]:
        yield _spread(own, [row["point"] for row in thinned(chosen, SPREAD)])
        table = _points(own, rows[:MOST_ROWS], f"{counted(len(rows), 'point')}.", registry)
        table.title, table.folded = f"All points of {clean(study.name)}", True
        yield table

    return Section(clean(study.name), own.anchor, lead=_lead(study, own.start)).add(
        _axes(study), _along(own), Later(lambda: _drawn(own)), points, _presets_told(own), Later(every)
    )


def _axes(study: Study) -> Note:
    """What varies, from where to where, in how many points."""
    axes = [
        f"{axis.path} {threshold(axis.values[0])} to {threshold(axis.values[-1])}"
        if axis.is_numeric and len(axis.values) > 1
        else f"{axis.path} {', '.join(threshold(value) for value in axis.values)}"
        for axis in study.axes
    ]
    return Note(clean(f"{'; '.join(axes)} ({counted(len(study.points), 'point')})"), "quiet")


def _along(own: Studied) -> Section | None:
    """Rejection and effective sample size along a single axis, as a terminal draws them."""
    axes, rows = own.study.axes, own.rows
    if len(axes) != 1 or not axes[0].is_numeric or len(rows) < 3:
        return None
    curves = {SHORT[key]: [row[key] for row in rows] for key in _CURVES if len({row[key] for row in rows}) > 1}
    ends = {name: f"{number(v[0], 'fraction')} → {number(v[-1], 'fraction')}" for name, v in curves.items()}
    return Section("", "along", terminal=True).add(Facts(list(ends.items()), curves))


def _presets_told(own: Studied) -> Section:
    """Where the presets of frameworks stand on the axes, as a terminal says it."""
    marks = [mark for mark in own.sweep.marks if mark.correction == own.study.name]
    rows = [(f"{mark.path} {threshold(mark.value)}", clean(_named(mark))) for mark in marks]
    return Section("", "presets", terminal=True).add(Facts(rows))


def _named(mark: Mark) -> str:
    """The first few presets that stand there."""
    more = len(mark.presets) - MOST_PRESETS
    return f"{', '.join(mark.presets[:MOST_PRESETS])}{f' and {more} more' if more > 0 else ''}"


def start_point(rows: Sequence[Row]) -> int:
    """The strictest of the best points that is affordable, else the cheapest; of equals the middle one."""
    known = [row for row in rows if row["pareto"]] or list(rows)
    lost = [math.inf if row["rejected_tokens"] is None else row["rejected_tokens"] for row in known]
    affordable = [share for share in lost if share <= AFFORDABLE]
    wanted = max(affordable) if affordable else min(lost)
    equal = [row["point"] for row, share in zip(known, lost, strict=True) if share == wanted]
    return int(equal[len(equal) // 2])


def _lead(study: Study, start: int) -> str:
    about = f"{clean(study.correction.about).rstrip('.')}. " if study.correction.about else ""
    both = [axis.path for axis in study.axes if axis.path.rpartition(".")[2] in _BOTH_SIDES]
    sides = (
        f"A value x of {' and '.join(both)} bounds both sides: [1/x, x], or [-x, x] of a difference. " if both else ""
    )
    held = f"Along each axis, the others stand as at {clean(at_place(study, start))}." if len(study.axes) > 1 else ""
    return clean((about[:1].upper() + about[1:] + sides + held).strip()) or "One threshold varies."


def _drawn(own: Studied) -> Iterator[Part]:
    """Along every axis of numbers: rejection, ESS, and the bias of weights or the K3 that is left; maps, the front."""
    from mismatchctl.render.figures import curves as draw  # draws: what prints to a terminal need not wait for it

    study, start, found, axes = own.study, own.start, [], []
    paths = stems([axis.path for axis in study.axes])
    for place, axis in enumerate(study.axes):
        if not axis.is_numeric or len(axis.values) < 2:
            continue
        markers = [*_presets(own, axis.path), *_solved(own, axis.path)]
        yield from _marked(clean(axis.path), markers)
        order = sorted(range(len(axis.values)), key=lambda index: float(axis.values[index] or 0.0))
        through = list(np.unravel_index(start, study.shape))
        points = [
            int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], study.shape)) for index in order
        ]
        values = np.array([axis.values[index] for index in order], np.float64)
        along = draw.CurveAxis(clean(axis.path), values, axis.log)
        for kind, curves in _kinds(own, points, along, tuple(markers)).items():
            drawn = draw.curves_figure(curves, f"{own.stem}-{paths[place]}-{kind}")
            if drawn is not None:
                found.append(drawn)
                place_of_axis = (*drawn.layout.box, *along.ends, int(along.log))
                name = f"{own.sweep.runs.index(own.run)}-{own.sweep.studies.index(study)}-{place}"
                axes.append((name, " ".join(map(str, place_of_axis))))
    yield Figures(found, axes)
    yield Figures([*_maps(own), _front(own)])


def _kinds(
    own: Studied, points: Sequence[int], along: draw.CurveAxis, markers: tuple[draw.Marker, ...]
) -> dict[str, draw.Curves]:
    """What is drawn along an axis, by what it shows."""
    from mismatchctl.render.figures.curves import Curve, Curves

    def line(name: str, key: str, origin: float = 0.0, *, errors: bool = True) -> Curve:
        return Curve(name, own.floats(key)[points] - origin, own.floats(f"{key}_se")[points] if errors else None)

    rejected = (line("tokens", "rejected_tokens"), line("sequences", "rejected_sequences"))
    effective = (line("tokens", "ess_token"), line("sequences", "ess_sequence"))
    curves = {}
    if own.study.correction.gates:
        thrown = "What is thrown away."
        curves["rejected"] = Curves("Rejected", "share rejected", along, rejected, thrown, True, markers=markers)
    curves["ess"] = Curves(
        "Effective sample size after", "share left, in effect", along, effective,
        "What weights and rejection leave of the data.", True, markers=markers,
    )  # fmt: skip
    if own.study.correction.weight is not None:
        bias = (line("mean weight − 1", "weight_mean", 1.0), line("bias of the bound", "weight_bias", errors=False))
        about = "How far weights are from 1 on average, and how far the bound alone moves them."
        curves["bias"] = Curves("Bias", "bias", along, bias, about, reference=True, markers=markers)
    else:
        kept, about = (line("K3 kept", "k3_kept", errors=False),), "The mismatch that remains in the data that trains."
        curves["k3_kept"] = Curves("K3 of what is kept", "K3 (nats/token)", along, kept, about, markers=markers)
    return curves


def _marked(path: str, markers: Sequence[draw.Marker]) -> Iterator[Note]:
    """What the lines and letters in the curves of an axis stand for."""
    from mismatchctl.render.figures.curves import lettered

    letters = [f"{letter} {marker.text}" for letter, marker in lettered(tuple(markers))]
    if letters:
        yield Note(f"Presets on {path} (dashed): {'; '.join(letters)}.", "quiet")
    for marker in markers:
        if marker.solved:
            shaded = "" if marker.interval is None else ", its 90 % interval shaded"
            yield Note(f"Upright line: {marker.text}{shaded}.", "quiet")


def _presets(own: Studied, path: str) -> Iterator[draw.Marker]:
    from mismatchctl.render.figures.curves import Marker

    for mark in own.sweep.marks:
        if (mark.correction, mark.path) == (own.study.name, path):
            yield Marker(mark.value, clean(f"{_named(mark)} ({threshold(mark.value)})"))


def _solved(own: Studied, path: str) -> Iterator[draw.Marker]:
    """The targets that are solved by just the rule that varies here."""
    from mismatchctl.render.figures.curves import Marker

    correction = own.study.correction
    if (correction.weight is not None) + len(correction.gates) != 1:
        return
    for target in own.sweep.targets:
        if target.run == own.run and target.correction is not None and target.status == "ok":
            solved = correction_from_mapping(target.correction, "target")
            wish = f"{wish_text(target.wish, target.wanted)} at {threshold(target.threshold)}"
            for value in values_at(solved, correction, path):
                yield Marker(value, wish, target.interval, solved=True)


def _maps(own: Studied) -> Iterator[Figure | None]:
    """Rejection and ESS over the first two axes, further ones held."""
    from mismatchctl.render.figures.maps import Map, map_figure

    study, shape = own.study, own.study.shape
    if len(study.axes) < 2:
        return
    held = np.ravel_multi_index(np.unravel_index(own.start, shape)[2:], shape[2:]) if shape[2:] else 0
    up, across = ((clean(a.path), tuple(clean(threshold(value)) for value in a.values)) for a in study.axes[:2])
    titles = {"rejected_tokens": "Rejected tokens"} if study.correction.gates else {}
    for key, title in (titles | {"ess_token": "Effective sample size of tokens after"}).items():
        values = own.floats(key).reshape(*shape[:2], -1)[:, :, held]
        yield map_figure(Map(title, across, up, values, "In percent."), f"{own.stem}-map-{key}")


def _front(own: Studied) -> Figure | None:
    """Rejected against ESS, or the bias against ESS where nothing is rejected."""
    from mismatchctl.render.figures.fronts import Front, front_figure

    rejected, weighs = own.floats("rejected_tokens"), own.study.correction.weight is not None
    bias = np.abs(own.floats("weight_bias")) if weighs else own.floats("k3_kept")
    name = "|bias of the bound|" if weighs else "K3 of what is kept"
    rejects = bool(np.nanmax(rejected, initial=0.0) > 0)
    low, high = np.nanmin(bias, initial=math.inf), np.nanmax(bias, initial=-math.inf)
    front = Front(
        "Points that no other beats",
        ("tokens rejected", rejected) if rejects else (name, bias),
        ("effective sample size of tokens", own.floats("ess_token")),
        (bias - low) / (high - low) if high > low else np.zeros(len(bias)),
        np.array([bool(row["pareto"]) for row in own.rows]),
        tuple(", ".join(threshold(value) for value in values) for values in own.study.points),
        f"Filled: no other point is as good in rejection, ESS and bias at once. A stronger colour has more of the "
        f"{name.strip('|')}. Some are named by their thresholds.",
        rejects,
    )
    return front_figure(front, f"{own.stem}-front")


def _points(own: Studied, rows: Sequence[Row], caption: str, registry: Registry) -> Table:
    """One row per point: its thresholds, then what tells points apart."""
    points, keys = own.study.points, {key: FIGURES[key][1] for key, _ in telling(own.rows)}
    columns: list[Any] = []
    for place, path in enumerate(clean(axis.path) for axis in own.study.axes):
        kind = "number" if place else "name"
        columns.append((
            Head(path, drop=0, short=path.replace(".", ".\n", 1)),
            lambda row, place=place, kind=kind: _at(points[row["point"]][place], kind),
        ))  # fmt: skip
    columns += registry.columns(keys, lambda row: {key: _value(own.sweep, row, key) for key in keys}, "c")
    table = Table.of(caption, rows, columns, sortable=True)
    if len(points) > len(rows) == MOST_ROWS:
        table.left_out = f"The first {MOST_ROWS} of {len(points):,} points; -o writes all of them."
    return table


def _at(value: Any, kind: str) -> TableCell:
    return TableCell(clean(threshold(value)), order=f"{value:.6g}" if isinstance(value, float) else "", kind=kind)


def _value(sweep: Sweep, row: Row, key: str) -> Value:
    reason = sweep.reason(row, key)
    return Value(value=row[key] if reason == "ok" else None, se=row.get(f"{key}_se"), status=reason)


def _spread(own: Studied, points: Sequence[int]) -> Table | None:
    """How much a few points reject from step to step; None with a single step or where nothing rejects."""
    import polars as pl

    mine = (pl.col("run") == own.run) & (pl.col("correction") == own.study.name) & pl.col("point").is_in(list(points))
    steps = own.sweep.groups.filter((pl.col("scope") == GROUP) & mine)
    shares = steps.select("point", "group", "rejected_tokens").drop_nulls("rejected_tokens").collect()
    if shares["group"].n_unique() < 2 or not own.study.correction.gates:
        return None
    found = [(point, of) for (point,), of in shares.group_by("point", maintain_order=True)]

    def at(share: float) -> Callable[[Any], str]:
        return lambda item: number(item[1]["rejected_tokens"].quantile(share, "linear"), "fraction")

    return Table.of("Tokens rejected, step by step", sorted(found, key=lambda item: points.index(item[0])), (
        ("at", lambda item: words(at_place(own.study, item[0]), "name")),
        (Head("steps"), lambda item: number(len(item[1]), "tokens")),
        (Head("least"), at(0.0)), (Head("median"), at(0.5)), (Head("most"), at(1.0)),
        ("most at step", lambda item: words(label(item[1]["group"][item[1]["rejected_tokens"].arg_max() or 0]))),
        (Head("steps emptied"), lambda item: number(int((item[1]["rejected_tokens"] == 1).sum()), "tokens")),
    ))  # fmt: skip
