"""Closing a group: when all its tokens are in, weights are normalized and per-cluster facts become columns."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.sums.clusters import ClusterTable
from mismatchctl.sums.reduce import Plan

_LINEAR = ("loss", "gradient_product")  # in the weights; present where the dump has current log-probs
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
            columns = self._index[f"{index}/{excess}"], self._index[number]
            total, count = (np.bincount(within, weights=group.sums[:, column]) for column in columns)
            factor = 1 + total / np.maximum(count, 1)
            spread = factor if rule.normalize_over == "micro_batch" else np.full(len(every), factor[0])
            factors[:, index] = np.where(spread > _SMALLEST_FACTOR, spread, 1.0)
        return every, factors

    def _normalize(self, sums: Float64s, maxima: Float64s, correction: int, factor: Float64s) -> None:
        """Divide the weights w of each row by its factor F, in place; sums are of w - 1 and (w - 1)^2."""
        shift = 1 - factor  # w/F - 1 = (w - 1 + shift) / F
        first, second = (self._index[f"{correction}/{name}"] for name in ("weight_excess", "squared_weight_excess"))
        tokens, kept = sums[:, self._index["tokens"]], sums[:, self._index[f"{correction}/kept"]]
        squares = sums[:, second] + 2 * shift * sums[:, first] + tokens * shift**2
        sums[:, second] = squares / factor**2
        for position, count in ((first, tokens), (self._index[f"{correction}/kept_excess"], kept)):
            sums[:, position] = (sums[:, position] + count * shift) / factor
        sums[:, self._index[f"{correction}/sequence_weight"]] /= factor
        weighted = self.plan.corrections[correction].weights_loss
        linear = [name for name in _LINEAR if weighted and f"{correction}/{name}" in self._index]
        for name in linear:
            sums[:, self._index[f"{correction}/{name}"]] /= factor
        for name in ("squared_sequence_weight", "squared_kept_weight", *(["squared_gradient"] if linear else [])):
            sums[:, self._index[f"{correction}/{name}"]] /= factor**2
        for name in ("weight", "-weight"):
            maxima[:, self._maxima[f"{correction}/{name}"]] /= factor


def closed_columns(plan: Plan) -> tuple[str, ...]:
    """Names of the additive columns of a closed table, in order."""
    numbers = range(len(plan.corrections))
    factors = (f"{index}/factor" for index in numbers)
    emptied = (f"{index}/empty_cluster" for index in numbers)
    return (*plan.columns[0], *factors, "clusters", *emptied)
