"""What the explorer of a sweep's page shows, as data in the page: every text for every point, made once, here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.correction.presets import Preset
from mismatchctl.frameworks import Framework, shelves
from mismatchctl.frameworks.native import native_yaml, preset_yaml
from mismatchctl.numbers import estimate_or_reason
from mismatchctl.render.pages.sweep_study import Studied
from mismatchctl.render.tables import Registry
from mismatchctl.render.text import clean
from mismatchctl.sweep.model import GROUP, Sweep
from mismatchctl.sweep.study import Study
from mismatchctl.sweep.words import Row, thinned, threshold

MOST_POINTS = 4_000
"""Points of a study, over all runs, up to which it can be explored."""
MOST_CONFIGS = 400
"""Points of a study that are written as configurations; of more, those that no other beats come first."""
OWN = "mismatchctl"
KEYS = (
    "rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean", "weight_bias",
    "weight_bounded_high", "weight_bounded_low", "normalization_factor", "k3_kept", "empty_prompts",
)  # fmt: skip


def shown_keys(study: Study) -> list[str]:
    """What is told of a point: the main figures, then what each gate rejects to either side."""
    weighted = study.correction.weight is not None
    keys = [key for key in KEYS if weighted or ("weight" not in key and key != "normalization_factor")]
    sides = [f"{unit}_{side}" for unit in ("tokens", "sequences") for side in ("low", "high")]
    return [*keys, *(f"gate{gate}_{side}" for gate in range(len(study.correction.gates)) for side in sides)]


def explorer_data(sweep: Sweep, every: Sequence[Sequence[Studied]], registry: Registry) -> dict[str, Any]:
    """All that the page's script needs, by run, then by correction; studies with too many points are not among it."""
    emptied, runs = _emptied(sweep), len(every)
    places = [place for place, own in enumerate(every[0]) if len(own.rows) * runs <= MOST_POINTS]
    shown = [[own[place] for place in places] for own in every]
    return {
        "runs": [
            {
                "name": clean(run),
                "studies": [{"start": one.start, "values": _values(one, emptied)} for one in own],
            }
            for run, own in zip(sweep.runs, shown, strict=True)
        ],
        "studies": [
            {
                "name": clean(one.study.name),
                "place": place,
                "axes": [
                    {
                        "path": clean(axis.path),
                        "texts": [clean(threshold(value)) for value in axis.values],
                        "values": list(axis.values) if axis.is_numeric else None,
                    }
                    for axis in one.study.axes
                ],
                "titles": [
                    *((registry.metric(key, "c").title, f"c-{key}") for key in shown_keys(one.study)),
                    ("steps left empty", ""),
                ],
                "configs": _configs(one.study, [own[place].rows for own in every]),
            }
            for place, one in zip(places, shown[0], strict=True)
        ],
    }


def _emptied(sweep: Sweep) -> dict[tuple[str, str, int], str]:
    """How many steps a point leaves without a kept token, by run, correction and point, where it leaves any."""
    import polars as pl

    empty = (pl.col("kept_tokens") == 0) & (pl.col("tokens") > 0)
    steps = sweep.groups.filter(pl.col("scope") == GROUP)
    counts = steps.group_by("run", "correction", "point", maintain_order=True).agg(
        empty.sum().alias("empty"), pl.len().alias("steps")
    )  # fmt: skip
    rows = counts.filter(pl.col("empty") > 0).collect().iter_rows()
    return {(run, name, point): f"{empty:,} of {steps:,}" for run, name, point, empty, steps in rows}


def _values(own: Studied, emptied: Mapping[tuple[str, str, int], str]) -> list[list[str]]:
    """A list per title, a text per point."""
    found = [[_text(own.sweep, row, key) for row in own.rows] for key in shown_keys(own.study)]
    return [*found, [emptied.get((own.run, own.study.name, row["point"]), "0") for row in own.rows]]


def _text(sweep: Sweep, row: Row, key: str) -> str:
    reason = sweep.reason(row, key)
    value = row[key] if reason == "ok" else None
    return estimate_or_reason(value, row.get(f"{key}_se"), sweep.metrics[key].unit, reason)


def _configs(study: Study, runs: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Configurations of points in each syntax that can say something of the correction, as numbers of lines.

    Most lines are the same at many points.
    """
    lines: dict[str, int] = {}
    frameworks = [framework for framework in _frameworks() if framework.native(study.correction_at(0))[0]]
    points = {
        point: [
            [lines.setdefault(line, len(lines)) for line in text.splitlines()]
            for text in _texts(study.correction_at(point), frameworks)
        ]
        for point in _written(runs)
    }
    return {"names": [OWN, *(framework.title for framework in frameworks)], "lines": list(lines), "points": points}


def _texts(correction: Correction, frameworks: Sequence[Framework]) -> Iterator[str]:
    """A correction in each syntax: one's own, then each framework's, which says what it cannot say."""
    named = correction.model_copy(update={"name": clean(correction.name), "about": ""})  # that is of another point
    yield preset_yaml(Preset(named))
    yield from (native_yaml(named, framework, nearest=True) for framework in frameworks)


def _written(runs: Sequence[Sequence[Row]]) -> list[int]:
    """The points that are written out."""
    rows = [row for run in runs for row in run]
    points = list(dict.fromkeys(row["point"] for row in rows))
    if len(points) <= MOST_CONFIGS:
        return points
    best = sorted({row["point"] for row in rows if row["pareto"]})
    return thinned(best, MOST_CONFIGS)


@cache
def _frameworks() -> tuple[Framework, ...]:
    return tuple(shelf.load("") for shelf in shelves())
