"""One correction of a sweep on one run: its curves and maps, its best points, how it differs from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.correction import correction_from_mapping
from mismatchctl.numbers import number
from mismatchctl.render.document import BRIEF, WHOLE, Cell, Facts, Figures, Head, Note, Section, Table
from mismatchctl.render.figures import Figure
from mismatchctl.render.figures import curves as draw
from mismatchctl.render.figures.fronts import Front, front_figure
from mismatchctl.render.figures.maps import Map, map_figure
from mismatchctl.render.figures.scales import percent
from mismatchctl.render.tables import MOST_ROWS, SHORT, Registry, words
from mismatchctl.render.text import clean, label, stems
from mismatchctl.result import Value
from mismatchctl.sweep.front import values_at
from mismatchctl.sweep.model import GROUP, Mark, Sweep
from mismatchctl.sweep.study import Study
from mismatchctl.sweep.words import (
    FIGURES,
    MOST_PRESETS,
    WISHES,
    Row,
    at_place,
    telling,
    thinned,
    threshold,
)

AFFORDABLE = 0.05
"""A point to begin with rejects at most so many tokens, if one does."""
SHOWN, SHOWN_OF_FRONT, SPREAD = 12, 40, 5
"""Best points in a table, those with the front asked for; those of them whose steps are told apart."""
_BOTH_SIDES = ("clip", "zero", "keep")
_CURVES = ("rejected_tokens", "ess_token")


def study_section(
    sweep: Sweep, run: str, study: Study, anchor: str, name: str, rows: Sequence[Row], start: int, registry: Registry,
    *, whole: bool = True, front: bool = False,
) -> Section:  # fmt: skip
    """All of it; `rows` are the overall rows in the order of points, `start` is the point that curves lead through.

    Names of its figures begin with `name`.
    """
    best = sorted((row for row in rows if row["pareto"]), key=lambda row: (row["rejected_tokens"], -row["ess_token"]))
    chosen = thinned(best or rows, SHOWN_OF_FRONT if front else SHOWN)
    found = "No point has every figure"
    if best:
        found = f"{len(chosen)} of {len(best)} points that no other beats in rejection, ESS and bias"
    keys = telling(rows)
    section = Section(clean(study.name), anchor, lead=_lead(study, start))
    section.add(_axes(study, rows), _along(study, rows))
    if whole:
        section.add(*(Note(text, "quiet", reach=WHOLE) for text in _marked(sweep, run, study)))
        section.add(_curves(sweep, run, study, rows, start, name))
        figures = [*_maps(study, rows, start, name), _front(study, rows, name)]
        section.add(Figures([figure for figure in figures if figure is not None]))
    points = _points(sweep, study, keys, chosen, f"{found}.", registry)
    points.title, points.reach = found, BRIEF
    section.add(points, _presets_told(sweep, study))
    if whole:
        section.add(_spread(sweep, run, study, [row["point"] for row in thinned(chosen, SPREAD)]))
        counted = f"{len(study.points):,} point{'s' * (len(study.points) != 1)}."
        every = _points(sweep, study, keys, rows[:MOST_ROWS], counted, registry)
        every.title, every.folded = f"All points of {clean(study.name)}", True
        section.add(every)
    return section


def _axes(study: Study, rows: Sequence[Row]) -> Note:
    """What varies, from where to where, in how many points."""
    axes = [
        f"{axis.path} {threshold(axis.values[0])} to {threshold(axis.values[-1])}"
        if axis.is_numeric and len(axis.values) > 1
        else f"{axis.path} {', '.join(threshold(value) for value in axis.values)}"
        for axis in study.axes
    ]
    return Note(clean(f"{'; '.join(axes)} ({len(rows):,} point{'s' * (len(rows) != 1)})"), "quiet")


def _along(study: Study, rows: Sequence[Row]) -> Section | None:
    """Rejection and effective sample size along a single axis, as a terminal draws them."""
    if len(study.axes) != 1 or not study.axes[0].is_numeric or len(rows) < 3:
        return None
    curves = {SHORT[key]: [row[key] for row in rows] for key in _CURVES if len({row[key] for row in rows}) > 1}
    ends = {name: f"{number(v[0], 'fraction')} → {number(v[-1], 'fraction')}" for name, v in curves.items()}
    return Section("", "along", terminal=True).add(Facts(list(ends.items()), curves))


def _presets_told(sweep: Sweep, study: Study) -> Section:
    """Where the presets of frameworks stand on the axes, as a terminal says it."""
    rows = []
    for mark in sweep.marks:
        if mark.correction == study.name:
            rows.append((f"{mark.path} {threshold(mark.value)}", clean(_named(mark))))
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
    held = f"Along each axis, the others stand as at {at_place(study, start)}." if len(study.axes) > 1 else ""
    return clean((about[:1].upper() + about[1:] + sides + held).strip()) or "One threshold varies."


def _floats(rows: Sequence[Row], key: str) -> Float64s:
    return np.array([math.nan if row.get(key) is None else row[key] for row in rows], np.float64)


def _curves(sweep: Sweep, run: str, study: Study, rows: Sequence[Row], start: int, stem: str) -> Figures:
    """Along every axis of numbers: rejection, ESS, and the bias of weights or the K3 that is left."""
    number_of, found, axes = sweep.studies.index(study), [], []
    paths = stems([axis.path for axis in study.axes])
    for place, axis in enumerate(study.axes):
        if not axis.is_numeric or len(axis.values) < 2:
            continue
        order = sorted(range(len(axis.values)), key=lambda index: float(axis.values[index] or 0.0))
        through = list(np.unravel_index(start, study.shape))
        points = [
            int(np.ravel_multi_index([*through[:place], index, *through[place + 1 :]], study.shape)) for index in order
        ]
        values = np.array([axis.values[index] for index in order], np.float64)
        along = draw.Axis(clean(axis.path), values, axis.log)
        markers = _markers(sweep, run, study, axis.path)
        for kind, curves in _kinds(study, [rows[point] for point in points], along, markers).items():
            drawn = draw.curves_figure(curves, f"{stem}-{paths[place]}-{kind}")
            if drawn is not None:
                found.append(drawn.figure)
                at, name = drawn.place, f"{sweep.runs.index(run)}-{number_of}-{place}"
                axes.append((name, f"{' '.join(map(str, at.box))} {at.low} {at.high} {int(at.log)}"))
    return Figures(found, axes)


def _kinds(
    study: Study, rows: Sequence[Row], along: draw.Axis, markers: tuple[draw.Marker, ...]
) -> dict[str, draw.Curves]:
    """What is drawn along an axis, by what it shows."""

    def line(name: str, key: str, origin: float = 0.0, *, errors: bool = True) -> draw.Line:
        return draw.Line(name, _floats(rows, key) - origin, _floats(rows, f"{key}_se") if errors else None)

    rejected = (line("tokens", "rejected_tokens"), line("sequences", "rejected_sequences"))
    effective = (line("tokens", "ess_token"), line("sequences", "ess_sequence"))
    curves = {}
    if study.correction.gates:
        thrown = "What is thrown away."
        curves["rejected"] = draw.Curves("Rejected", "share rejected", along, rejected, thrown, True, markers=markers)
    curves["ess"] = draw.Curves(
        "Effective sample size after", "share left, in effect", along, effective,
        "What weights and rejection leave of the data.", True, markers=markers,
    )  # fmt: skip
    if study.correction.weight is not None:
        bias = (line("mean weight − 1", "weight_mean", 1.0), line("bias of the bound", "weight_bias", errors=False))
        words_of_bias = "How far weights are from 1 on average, and how far the bound alone moves them."
        curves["bias"] = draw.Curves("Bias", "bias", along, bias, words_of_bias, reference=True, markers=markers)
    else:
        kept = (line("K3 kept", "k3_kept", errors=False),)
        words_of_k3 = "The mismatch that remains in the data that trains."
        curves["k3_kept"] = draw.Curves(
            "K3 of what is kept", "K3 (nats/token)", along, kept, words_of_k3, markers=markers
        )
    return curves


def _marked(sweep: Sweep, run: str, study: Study) -> list[str]:
    """What the lines and letters in the curves stand for, a sentence per axis."""
    said = []
    for axis in study.axes:
        markers = _markers(sweep, run, study, axis.path)
        letters = [f"{letter} {marker.text}" for letter, marker in draw.lettered(markers)]
        said += [f"Presets on {clean(axis.path)} (dashed): {'; '.join(letters)}."] if letters else []
        said += [f"Upright line: {marker.text}, its 90 % interval shaded." for marker in markers if marker.solved]
    return said


def _markers(sweep: Sweep, run: str, study: Study, path: str) -> tuple[draw.Marker, ...]:
    return (*_presets(sweep, study, path), *_solved(sweep, run, study, path))


def _presets(sweep: Sweep, study: Study, path: str) -> list[draw.Marker]:
    found = []
    for mark in sweep.marks:
        if (mark.correction, mark.path) == (study.name, path):
            found.append(draw.Marker(mark.value, clean(f"{_named(mark)} ({threshold(mark.value)})")))
    return found


def _solved(sweep: Sweep, run: str, study: Study, path: str) -> list[draw.Marker]:
    """The targets that are solved by just the rule that varies here."""
    if (study.correction.weight is not None) + len(study.correction.gates) != 1:
        return []
    found = []
    for target in sweep.targets:
        if target.run == run and target.correction is not None and target.status == "ok":
            solved = correction_from_mapping(target.correction, "target")
            wish = f"{percent(target.wanted)} {WISHES[target.wish]} at {threshold(target.threshold)}"
            for value in values_at(solved, study.correction, path):
                found.append(draw.Marker(value, wish, target.interval, solved=True))
    return found


def _maps(study: Study, rows: Sequence[Row], start: int, stem: str) -> list[Figure | None]:
    """Rejection and ESS over the first two axes, further ones held."""
    if len(study.axes) < 2:
        return []
    up, across = study.axes[:2]
    held = np.ravel_multi_index(np.unravel_index(start, study.shape)[2:], study.shape[2:]) if study.shape[2:] else 0
    sides = [(clean(axis.path), tuple(clean(threshold(value)) for value in axis.values)) for axis in (across, up)]
    found = []
    for key, title, gated in (
        ("rejected_tokens", "Rejected tokens", True),
        ("ess_token", "Effective sample size of tokens after", False),
    ):
        if study.correction.gates or not gated:
            values = _floats(rows, key).reshape(*study.shape[:2], -1)[:, :, held]
            shown = Map(title, sides[0], sides[1], values, "In percent.")
            found.append(map_figure(shown, f"{stem}-map-{key}"))
    return found


def _front(study: Study, rows: Sequence[Row], stem: str) -> Figure | None:
    """Rejected against ESS, or the bias against ESS where nothing is rejected."""
    rejected, ess = _floats(rows, "rejected_tokens"), _floats(rows, "ess_token")
    bias = np.abs(_floats(rows, "weight_bias")) if study.correction.weight is not None else _floats(rows, "k3_kept")
    name = "|bias of the bound|" if study.correction.weight is not None else "K3 of what is kept"
    rejects = bool(np.nanmax(rejected, initial=0.0) > 0)
    low, high = np.nanmin(bias, initial=math.inf), np.nanmax(bias, initial=-math.inf)
    front = Front(
        "Points that no other beats",
        ("tokens rejected", rejected) if rejects else (name, bias),
        ("effective sample size of tokens", ess),
        (bias - low) / (high - low) if high > low else np.zeros(len(bias)),
        np.array([bool(row["pareto"]) for row in rows]),
        tuple(", ".join(threshold(value) for value in values) for values in study.points),
        f"Filled: no other point is as good in rejection, ESS and bias at once. A stronger colour has more of the "
        f"{name.strip('|')}. Some are named by their thresholds.",
        rejects,
    )
    return front_figure(front, f"{stem}-front")


def _points(
    sweep: Sweep,
    study: Study,
    keys: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    caption: str,
    registry: Registry,
) -> Table:
    """One row per point: its thresholds, then `keys` in their units."""
    heads = [Head(clean(axis.path), drop=0, short=clean(axis.path).replace(".", ".\n", 1)) for axis in study.axes]
    for key, _ in keys:
        heads.append(registry.head(key, "c", drop=FIGURES[key][1]))
    table = Table(caption, heads, sortable=True)
    for row in rows:
        values = study.points[row["point"]]
        orders = [f"{value:.6g}" if isinstance(value, float) else "" for value in values]
        kinds = ["name", *["number"] * (len(values) - 1)]
        cells = [
            Cell(clean(threshold(value)), order=order, kind=kind)
            for value, order, kind in zip(values, orders, kinds, strict=True)
        ]
        table.rows.append([*cells, *(table.value(_value(sweep, row, key), unit) for key, unit in keys)])
    if len(study.points) > len(rows) == MOST_ROWS:
        table.left_out = f"The first {MOST_ROWS} of {len(study.points):,} points; -o writes all of them."
    return table


def _value(sweep: Sweep, row: Row, key: str) -> Value:
    reason = sweep.reason(row, key)
    return Value(value=row[key] if reason == "ok" else None, se=row.get(f"{key}_se"), status=reason)


def _spread(sweep: Sweep, run: str, study: Study, points: Sequence[int]) -> Table | None:
    """How much a few points reject from step to step; None with a single step or where nothing rejects."""
    import polars as pl

    own = (pl.col("run") == run) & (pl.col("correction") == study.name) & pl.col("point").is_in(list(points))
    steps = sweep.groups.filter((pl.col("scope") == GROUP) & own).select("point", "group", "rejected_tokens").collect()
    if steps["group"].n_unique() < 2 or not study.correction.gates:
        return None
    heads = [Head("at", numeric=False), *(Head(text) for text in ("steps", "least", "median", "most"))]
    table = Table("Tokens rejected, step by step", [*heads, Head("most at step", numeric=False), Head("steps emptied")])
    for point in points:
        found = steps.filter(pl.col("point") == point).drop_nulls("rejected_tokens")
        shares = found["rejected_tokens"]
        if len(shares):
            values = [np.quantile(shares.to_numpy(), level) for level in (0.0, 0.5, 1.0)]
            where = clean(label(found["group"][int(shares.arg_max() or 0)]))
            table.rows.append(
                [
                    words(at_place(study, point), "name"),
                    Cell(number(len(shares), "tokens")),
                    *(Cell(number(float(value), "fraction")) for value in values),
                    words(where),
                    Cell(number(int((shares == 1).sum()), "tokens")),
                ]
            )
    return table
