"""The registry's formulas read along a grid: every point at once, each value as `analyze` gives it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.measure.grid.parts import Arrays
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.metrics.evaluate import STEP


def asked_by(metric: Metric) -> list[str]:
    """The columns that a metric is made of."""
    assert metric.formula is not None
    reader = Asked(defaultdict(lambda: np.ones(1)))
    metric.formula(reader)
    return [*reader.asked]


class Asked(Mapping[str, Any]):
    """Columns that note which of them were asked for."""

    def __init__(self, totals: Arrays) -> None:
        self.totals = totals
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.asked[name] = None
        return self.totals[name]

    def __iter__(self) -> Any:
        return iter(self.totals)

    def __len__(self) -> int:
        return len(self.totals)


class _PerturbedColumns(Asked):
    """Columns of which one moves along the imaginary axis."""

    def __init__(self, totals: Arrays, moved: str = "") -> None:
        super().__init__(totals)
        self.moved = moved

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return found + 1j * STEP if name == self.moved else found


def values(metrics: Iterable[Metric], totals: Arrays, maxima: Arrays, grid: tuple[int, ...]) -> dict[str, Float64s]:
    """Each metric in every cell at every point of a grid, flattened [cells, points]; NaN where it is undefined."""
    found, cells = {}, len(totals["tokens"])
    with np.errstate(all="ignore"):
        for metric in metrics:
            value: Any = np.nan
            if metric.formula is not None:
                value = metric.formula(totals)
            elif metric.extreme is not None:
                value = metric.extreme(maxima)
            found[metric.key] = np.broadcast_to(np.asarray(value, np.float64), (cells, *grid)).reshape(cells, -1)
    return found


def errors(
    metrics: Iterable[Metric], totals: Arrays, rows: Mapping[str, NDArray[Any]], grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Standard errors by the delta method, from the scatter of the clusters' `rows` [R, ...] about totals [1, ...]."""
    clusters = int(np.count_nonzero(rows["tokens"]))
    if clusters < 2:
        return {metric.key: np.full(int(np.prod(grid)), np.nan) for metric in metrics}
    found = {}
    with np.errstate(all="ignore"):
        for metric in metrics:
            assert metric.formula is not None
            reader = _PerturbedColumns(totals)
            metric.formula(reader)
            moved: Any = 0.0
            for name in reader.asked:
                slope = np.imag(metric.formula(_PerturbedColumns(totals, name))) / STEP
                moved = moved + rows[name] * slope
            error = np.sqrt((moved**2).sum(axis=0) * clusters / (clusters - 1))
            found[metric.key] = np.broadcast_to(error, grid).ravel()
    return found
