"""Closing a group: when all its tokens are in, weights are normalized and per-cluster facts become columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.correction import Correction
from mismatchctl.measure.reduce import Plan
from mismatchctl.measure.table import ClusterTable

_EXCESS = {"weight_excess": "tokens", "kept_excess": "kept"}  # sums of w - 1, and over how many tokens
_LINEAR = ("sequence_weight", "loss", "gradient_product")  # in the weights; losses only where the dump has them
_OF_LOSS = ("loss", "gradient_product", "squared_gradient")
_SQUARED = ("squared_sequence_weight", "squared_kept_weight", "squared_gradient")
_SMALLEST_FACTOR = 1e-8  # below it verl and slime leave weights as they are


class Closing:
    """Turns raw tables of one group into closed ones: the factor is the group's, whatever part is closed.

    Attributes:
        scopes: micro-batches of the group [N], ascending; a single 0 where they do not matter.
        factors: normalization factor of each correction in each [N, corrections]; 1 where nothing is normalized.
    """

    def __init__(self, group: ClusterTable, plan: Plan) -> None:
        self.plan = plan
        names, maxima = plan.columns
        self._index = {name: position for position, name in enumerate(names)}
        self._maxima = {name: position for position, name in enumerate(maxima)}
        self.scopes, self.factors = self._normalization(group)

    def close(self, table: ClusterTable) -> ClusterTable:
        """The table of a part of the group, normalized, one row per cluster, with the closed columns appended."""
        sums, maxima = table.sums.copy(), table.maxima.copy()
        factors = self.factors[np.searchsorted(self.scopes, table.scopes)]
        weighted = []
        for index, _ in enumerate(self.plan.corrections):
            factor = factors[:, index]
            self._normalize(sums, maxima, index, factor)
            weighted.append(factor * sums[:, self._index["tokens"]])
        merged = ClusterTable.of(
            table.clusters, np.zeros_like(table.scopes), np.column_stack([sums, *weighted]), maxima
        )
        told_apart = not table.is_folded  # else clusters are not counted at all, rather than wrongly
        clusters = (merged.sums[:, self._index["tokens"]] > 0).astype(np.float64) * told_apart
        emptied = [
            clusters * (merged.sums[:, self._index[f"{index}/kept"]] == 0)
            for index, _ in enumerate(self.plan.corrections)
        ]
        return ClusterTable(
            merged.clusters, merged.scopes, np.column_stack([merged.sums, clusters, *emptied]), merged.maxima
        )

    def _normalization(self, group: ClusterTable) -> tuple[np.ndarray, Float64s]:
        """The factor of each correction within each scope: [scopes, corrections]; 1 where nothing is normalized."""
        every, inverse = np.unique(group.scopes, return_inverse=True)
        factors = np.ones((len(every), len(self.plan.corrections)))
        for index, correction in enumerate(self.plan.corrections):
            rule = correction.weight
            if rule is None or rule.normalize == "none":
                continue
            excess, number = ("weight_excess", "tokens") if rule.normalize == "token" else ("mean_excess", "sequences")
            within = inverse if rule.normalize_over == "micro_batch" else np.zeros_like(inverse)
            total, count = (
                np.bincount(within, weights=group.sums[:, self._index[name]]).astype(np.float64)
                for name in (f"{index}/{excess}", number)
            )
            factor = normalization_factor(total, count)
            factors[:, index] = factor if rule.normalize_over == "micro_batch" else factor[0]
        return every, factors

    def _normalize(self, sums: Float64s, maxima: Float64s, correction: int, factor: Float64s) -> None:
        """Divide the weights of each row by its factor, in place."""
        own = f"{correction}/"
        places = {name.removeprefix(own): place for name, place in self._index.items() if name.startswith(own)}
        columns = {name: sums[:, place] for name, place in places.items()}
        columns["tokens"] = sums[:, self._index["tokens"]]
        for name, values in normalized(columns, factor, self.plan.corrections[correction]).items():
            sums[:, places[name]] = values
        for name in ("weight", "-weight"):
            maxima[:, self._maxima[own + name]] /= factor


def normalization_factor(total_excess: Float64s, count: Float64s) -> Float64s:
    """The mean weight from a total of w - 1; 1 where it is so small that weights are left as they are."""
    factor = 1 + total_excess / np.maximum(count, 1)
    return np.where(factor > _SMALLEST_FACTOR, factor, 1.0)


def normalized(columns: Mapping[str, Float64s], factor: Float64s, correction: Correction) -> dict[str, Float64s]:
    """The columns of one correction that change when its weights w are divided by a factor F.

    Args:
        columns: sums of w - 1 and (w - 1)^2, of w and w^2, with `tokens` and `kept`; others stay as they are.
        factor: F, shaped so that it can be broadcast against each column.
        correction: whose loss may not take the weights.
    """
    shift, found = 1 - factor, {}  # w/F - 1 = (w - 1 + shift) / F
    for name, count in _EXCESS.items():
        found[name] = (columns[name] + columns[count] * shift) / factor
    if "squared_weight_excess" in columns:
        squares = columns["squared_weight_excess"] + 2 * shift * columns["weight_excess"] + columns["tokens"] * shift**2
        found["squared_weight_excess"] = squares / factor**2
    scaled = columns if correction.weights_loss else {name: columns[name] for name in columns if name not in _OF_LOSS}
    found |= {name: scaled[name] / factor for name in _LINEAR if name in scaled}
    return found | {name: scaled[name] / factor**2 for name in _SQUARED if name in scaled}


def closed_columns(plan: Plan) -> tuple[str, ...]:
    """Names of the additive columns of a closed table, in order."""
    numbers = range(len(plan.corrections))
    factors = (f"{index}/factor" for index in numbers)
    emptied = (f"{index}/empty_cluster" for index in numbers)
    return (*plan.columns[0], *factors, "clusters", *emptied)
