"""What a sweep finds: a table with a row per run, correction, point and group, and what was read from it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mismatchctl import __version__
from mismatchctl.files import remove, scratch_folder
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.metrics.evaluate import why_undefined
from mismatchctl.result import InputFile, LeftOut
from mismatchctl.sweep.outlook import Forecast
from mismatchctl.sweep.study import Study
from mismatchctl.views import SweepViews

if TYPE_CHECKING:
    import polars as pl

WITH_ERRORS = ("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean")
"""Keys whose standard error over clusters stands beside them in overall rows, in a column `<key>_se`."""
OVERALL = "overall"
"""The `scope` of rows over a whole run; those of a training step have `group`, those of `--by` the column's name."""
GROUP = "group"


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
        marks: presets that fall on the axes.
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
    marks: tuple[Mark, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    by: tuple[str, ...] = ()
    folder: TemporaryFolder | None = None
    version: str = __version__

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
        weight = self.study(row["correction"]).corrections[row["point"]].weight
        if key == "normalization_factor" and (weight is None or weight.normalize == "none"):
            return metric.undefined
        return why_undefined(metric, math.nan if value is None else value, empty=row["tokens"] == 0)

    def rows(self, run: str, correction: str) -> pl.DataFrame:
        """The overall rows of one study on one run, in the order of its points."""
        import polars as pl

        return self.overall.filter((pl.col("run") == run) & (pl.col("correction") == correction)).sort(
            "point", maintain_order=True
        )
