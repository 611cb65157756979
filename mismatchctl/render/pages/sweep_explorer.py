"""What the explorer of a sweep's page shows, as data in the page: every text for every point, made once, here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from mismatchctl.correction import Correction
from mismatchctl.correction.presets import Preset
from mismatchctl.frameworks import SHELVES, Framework
from mismatchctl.frameworks.written import native_yaml, preset_yaml
from mismatchctl.numbers import estimate_or_reason, number
from mismatchctl.render.tables import Registry
from mismatchctl.render.text import clean
from mismatchctl.sweep.model import Sweep
from mismatchctl.sweep.study import Study
from mismatchctl.sweep.words import thinned, threshold

MOST_POINTS = 4_000
"""Points of a study, over all runs, up to which it can be explored."""
MOST_CONFIGS = 400
"""Points of a study that are written as configurations; of more, those that no other beats come first."""
OWN = "mismatchctl"
KEYS = (
    "rejected_tokens",
    "rejected_sequences",
    "ess_token",
    "ess_sequence",
    "weight_mean",
    "weight_bias",
    "weight_bounded_high",
    "weight_bounded_low",
    "normalization_factor",
    "k3_kept",
    "empty_prompts",
)

Row = Mapping[str, Any]


def shown_keys(study: Study) -> list[str]:
    """What is told of a point: the main figures, then what each gate rejects to either side."""
    weighted = study.correction.weight is not None
    keys = [key for key in KEYS if weighted or ("weight" not in key and key != "normalization_factor")]
    sides = [f"{unit}_{side}" for unit in ("tokens", "sequences") for side in ("low", "high")]
    return [*keys, *(f"gate{gate}_{side}" for gate in range(len(study.correction.gates)) for side in sides)]


def explorer_data(
    sweep: Sweep,
    rows: Mapping[tuple[str, str], Sequence[Row]],
    starts: Mapping[tuple[str, str], int],
    emptied: Mapping[tuple[str, str, int], str],
    registry: Registry,
) -> dict[str, Any]:
    """All that the page's script needs; studies with too many points are not among it.

    Args:
        sweep: what was found.
        rows: the overall rows by run and correction, in the order of points.
        starts: the point to begin with, by run and correction.
        emptied: how many steps are left empty, in words, by run, correction and point.
        registry: notes which metrics are shown.
    """
    runs = sweep.runs
    studies = [study for study in sweep.studies if len(study.points) * len(runs) <= MOST_POINTS]
    return {
        "runs": [
            {
                "name": clean(run),
                "studies": [
                    {
                        "start": starts[run, study.name],
                        "values": _values(sweep, study, rows[run, study.name], emptied),
                    }
                    for study in studies
                ],
            }
            for run in runs
        ],
        "studies": [
            {
                "name": clean(study.name),
                "place": sweep.studies.index(study),
                "axes": [
                    {
                        "path": clean(axis.path),
                        "texts": [clean(threshold(value)) for value in axis.values],
                        "values": list(axis.values) if axis.is_numeric else None,
                    }
                    for axis in study.axes
                ],
                "titles": [
                    *((registry.metric(key, "c").title, f"c-{key}") for key in shown_keys(study)),
                    ("steps left empty", ""),
                ],
                "configs": _configs(study, [rows[run, study.name] for run in runs]),
            }
            for study in studies
        ],
    }


def _values(
    sweep: Sweep, study: Study, rows: Sequence[Row], emptied: Mapping[tuple[str, str, int], str]
) -> list[list[str]]:
    """A list per title, a text per point."""
    found = [[_text(sweep, row, key) for row in rows] for key in shown_keys(study)]
    return [*found, [emptied.get((row["run"], study.name, row["point"]), number(0, "tokens")) for row in rows]]


def _text(sweep: Sweep, row: Row, key: str) -> str:
    reason = sweep.reason(row, key)
    value = row[key] if reason == "ok" else None
    return estimate_or_reason(value, row.get(f"{key}_se"), sweep.metrics[key].unit, reason)


def _configs(study: Study, runs: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Configurations of points in each syntax that can say something of the correction, as numbers of lines.

    Most lines are the same at many points.
    """
    lines: dict[str, int] = {}
    frameworks = [framework for framework in _frameworks() if framework.native(study.corrections[0])[0]]
    points = {
        point: [
            [lines.setdefault(line, len(lines)) for line in text.splitlines()]
            for text in _texts(study.corrections[point], frameworks)
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
    return tuple(shelf.load("") for shelf in SHELVES)
