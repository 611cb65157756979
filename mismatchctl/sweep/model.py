"""What a sweep finds: a table with a row per run, correction, point and group, and what was read from it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mismatchctl import __version__
from mismatchctl.correction import Correction, Gate
from mismatchctl.correction.presets import Preset
from mismatchctl.files import remove, scratch_folder
from mismatchctl.frameworks import presets
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.metrics.evaluate import why_undefined
from mismatchctl.result import InputFile, LeftOut
from mismatchctl.sweep.outlook import Forecast
from mismatchctl.sweep.study import Study, ThresholdAxis
from mismatchctl.views import SweepViews

if TYPE_CHECKING:
    import polars as pl

WITH_ERRORS = ("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean")
"""Keys whose standard error over clusters stands beside them in overall rows, in a column `<key>_se`."""
OVERALL = "overall"
"""The `scope` of rows over a whole run; those of a training step have `group`, those of `--by` the column's name."""
GROUP = "group"
_SAME_RULE = {"k1": {"mean": "geometric", "sum": "sequence", "token": "token"}}
"""Gates on k1 = minus the log ratio that are gates on the ratio: by statistic and level, the ratio's level."""


@dataclass(frozen=True)
class Mark:
    """Presets of frameworks that stand at one value of an axis."""

    correction: str
    path: str
    value: float
    presets: tuple[str, ...]


@dataclass(frozen=True)
class SolvedThreshold:
    """A threshold that meets a wish, on one run.

    Attributes:
        run: which run.
        wish: what was asked for, as the registry's key: rejected_tokens, rejected_sequences, ess_token.
        wanted: the value it should have.
        rule: what is bounded: "token weights truncated above", "geometric ratio above", ...
        correction: the correction at that threshold, None where none meets the wish.
        threshold: the bound, exactly a value of the data.
        interval: 90 % interval of the threshold over clusters; an end is None where it lies beyond the data;
            None where a single cluster tells no error.
        reached: what the key is at the threshold.
        status: "ok", or why no threshold meets the wish.
    """

    run: str
    wish: str
    wanted: float
    rule: str
    correction: dict[str, Any] | None = None
    threshold: float | None = None
    interval: tuple[float | None, float | None] | None = None
    reached: float | None = None
    status: str = "ok"


class TemporaryFolder:
    """A temporary folder that goes when nothing refers to it any more."""

    def __init__(self) -> None:
        self.path = scratch_folder()
        weakref.finalize(self, remove, self.path)


@dataclass
class Sweep(SweepViews):
    """The result of `sweep`.

    Attributes:
        studies: corrections with their axes, in order; `points` of a study are rows in that order.
        metrics: the registry's metrics by key, in the order of the columns.
        overall: rows of scope "overall", in memory: run, correction, point, one column per axis (by its path), scope,
            group (null), tokens, sequences, the metrics by key, `<key>_se` of WITH_ERRORS, and `pareto`.
        groups: rows of training steps and of `--by` values, lazily (they may lie on disk); no errors, no `pareto`.
            An undefined value is null, one that overflows is infinite; `reason` says why.
        targets: thresholds solved for.
        saved_marks: presets that fall on the axes, as a file has them; None: those of this version.
        forecasts: what some points would do where the dump does not reach, if that was asked.
        by: columns broken down by.
        folder: what holds `groups` where they lie on disk; goes with the sweep.
    """

    studies: tuple[Study, ...]
    metrics: dict[str, Metric]
    overall: pl.DataFrame
    groups: pl.LazyFrame
    inputs: list[InputFile]
    left_out: list[LeftOut] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    targets: tuple[SolvedThreshold, ...] = ()
    saved_marks: tuple[Mark, ...] | None = None
    forecasts: tuple[Forecast, ...] = ()
    by: tuple[str, ...] = ()
    folder: TemporaryFolder | None = None
    version: str = __version__

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """Presets that fall on the axes. Frameworks are loaded when this is first asked for."""
        return marks(self.studies, presets()) if self.saved_marks is None else self.saved_marks

    @property
    def runs(self) -> list[str]:
        """Names of the runs, in order."""
        return list(self.overall["run"].unique(maintain_order=True))

    @property
    def axis_paths(self) -> list[str]:
        """The paths that some study varies, each a column."""
        return list(dict.fromkeys(axis.path for study in self.studies for axis in study.axes))

    def place(self, correction: str, point: int) -> dict[str, Any]:
        """The value of each axis of a study at one of its points, by path."""
        study = self.study(correction)
        return dict(zip([axis.path for axis in study.axes], study.points[point], strict=True))

    def study(self, name: str) -> Study:
        """The study of a correction."""
        return next(study for study in self.studies if study.name == name)

    def reason(self, row: Mapping[str, Any], key: str) -> str:
        """Why a value of a row is undefined: the status that `analyze` gives; "ok" where it is not."""
        value, metric = row[key], self.metrics[key]
        if value is not None and math.isfinite(value):
            return "ok"
        weight = self.study(row["correction"]).correction_at(row["point"]).weight
        if key == "normalization_factor" and (weight is None or weight.normalize == "none"):
            return metric.undefined
        return why_undefined(metric, math.nan if value is None else value, empty=row["tokens"] == 0)

    def rows(self, run: str, correction: str) -> pl.DataFrame:
        """The overall rows of one study on one run, in the order of its points."""
        import polars as pl

        return self.overall.filter((pl.col("run") == run) & (pl.col("correction") == correction)).sort(
            "point", maintain_order=True
        )


def marks(studies: Sequence[Study], presets: Mapping[str, Preset]) -> tuple[Mark, ...]:
    """Which presets have the rule that an axis varies, and where on it they stand."""
    found = []
    for study in studies:
        for axis in study.axes:
            names: dict[float, list[str]] = {}
            for preset in presets.values():
                for value in values_at(preset.correction, study.correction, axis.path) if axis.is_numeric else ():
                    names.setdefault(float(f"{value:.6g}"), []).append(preset.name)
            inside = {value: who for value, who in sorted(names.items()) if _holds(axis, value)}
            found += [Mark(study.name, axis.path, value, tuple(who)) for value, who in inside.items()]
    return tuple(found)


def _holds(axis: ThresholdAxis, value: float) -> bool:
    numbers = [float(item) for item in axis.values if isinstance(item, float)]
    return min(numbers) <= value <= max(numbers)


def values_at(preset: Correction, base: Correction, path: str) -> list[float]:
    """The values of a preset at a path, where it has a rule of the same kind."""
    rule, *rest = path.split(".")
    if rule == "weight":
        if preset.weight is None or base.weight is None:
            return []
        alike = all(getattr(preset.weight, name) == getattr(base.weight, name) for name in ("level", "source"))
        return _at(getattr(preset.weight, rest[0], None), rest[1:], signed=False) if alike else []
    if rule != "gates" or rest[1:2] != ["keep"]:
        return []
    own = _as_ratio(base.gates[int(rest[0])])
    gates = [gate for gate in map(_as_ratio, preset.gates) if _kind(gate) == _kind(own)]
    return [value for gate in gates for value in _at(gate.keep, rest[2:], signed=gate.statistic != "ratio")]


def _at(found: Any, rest: Sequence[str], *, signed: bool) -> list[float]:
    """A bound as one number: an entry of an interval, or the upper one of an interval that is the same both ways."""
    if isinstance(found, tuple):
        low, high = found
        if rest:
            found = found[int(rest[0])]
        elif low is None or high is None:
            return []
        else:
            mirrored = -low if signed else 1 / low if low else math.inf
            found = high if math.isclose(mirrored, high, rel_tol=1e-4) else None
    return [float(found)] if isinstance(found, (int, float)) else []


def _kind(gate: Gate) -> tuple[str, ...]:
    return gate.statistic, gate.level, gate.over, gate.source


def _as_ratio(gate: Gate) -> Gate:
    """A gate on k1 as the gate on the ratio that it is."""
    level = _SAME_RULE.get(gate.statistic, {}).get(gate.level)
    if level is None:
        return gate
    low, high = (None if bound is None else math.exp(-bound) for bound in reversed(gate.keep))
    return gate.model_copy(update={"statistic": "ratio", "level": level, "keep": (low, high)})
