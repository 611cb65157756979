"""What some points of a sweep would do where the dump does not reach: a later batch, longer responses, later steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mismatchctl.correction import Correction
from mismatchctl.predict import Prediction, SequenceSample, at_length, at_step, batch_rejection
from mismatchctl.sweep.study import Study

if TYPE_CHECKING:
    import polars as pl

MOST_POINTS = 8
"""Points of a study that are predicted, spread evenly over it."""
REJECTIONS = ("rejected_sequences", "rejected_tokens")


@dataclass(frozen=True)
class ForecastRequest:
    """What is to be predicted.

    Attributes:
        batch: sequences of a batch yet to come.
        lengths: response lengths in tokens.
        ahead: steps after the last one.
    """

    batch: int | None = None
    lengths: tuple[int, ...] = ()
    ahead: float | None = None

    @property
    def needs_sequences(self) -> bool:
        """Whether sequences must be kept for it during the pass."""
        return self.batch is not None or bool(self.lengths)


NOTHING_ASKED = ForecastRequest()


@dataclass(frozen=True)
class Forecast:
    """The predictions for one point of a study on one run."""

    run: str
    correction: str
    point: int
    predictions: tuple[Prediction, ...]


def points_of(study: Study) -> list[int]:
    """The points of a study that are predicted."""
    count = len(study.points)
    shown = min(count, MOST_POINTS)
    return sorted({round(place * (count - 1) / max(shown - 1, 1)) for place in range(shown)})


def corrections_of(chosen: Sequence[Study]) -> list[Correction]:
    """The corrections at all points that are predicted, in order."""
    return [study.correction_at(point) for study in chosen for point in points_of(study)]


def forecasts(
    outlook: ForecastRequest, chosen: Sequence[Study], runs: Sequence[str], sample: SequenceSample, groups: pl.LazyFrame
) -> tuple[Forecast, ...]:
    """Predictions for every run and predicted point.

    Args:
        outlook: what is asked.
        chosen: the studies.
        runs: names of the runs.
        sample: collected with `corrections_of`; empty where no sequences are needed.
        groups: the sweep's rows by group.
    """
    found = []
    for run in runs:
        own, number = sample.of_run(run), 0
        for study in chosen:
            for point in points_of(study):
                predictions: list[Prediction] = []
                if outlook.batch is not None:
                    for unit in ("sequences", "tokens"):
                        predictions.append(batch_rejection(own, number, outlook.batch, unit))
                for length in outlook.lengths:
                    predictions += at_length(own, study.correction_at(point), length)
                if outlook.ahead is not None:
                    predictions += _later(groups, run, study.name, point, outlook.ahead)
                found.append(Forecast(run, study.name, point, tuple(predictions)))
                number += 1
    return tuple(found)


def _later(groups: pl.LazyFrame, run: str, name: str, point: int, ahead: float) -> list[Prediction]:
    import polars as pl

    own = (pl.col("run") == run) & (pl.col("correction") == name) & (pl.col("point") == point)
    rows = groups.filter(own & (pl.col("scope") == "group")).select("group", *REJECTIONS).collect()
    steps = [_number(label) for label in rows["group"]]
    return [at_step(key, steps, rows[key].to_list(), ahead, is_fraction=True) for key in REJECTIONS]


def _number(label: object) -> object:
    """A step's label as a number where it is one: a table holds labels as text."""
    try:
        return float(str(label))
    except ValueError:
        return label
