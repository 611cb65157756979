"""Cluster tables as a Result holds them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.dumps import Dump
from mismatchctl.finite import capped_all, rounded_all
from mismatchctl.measure import ClusterTable, MeasurePlan
from mismatchctl.measure.columns import CLUSTERS, MISMATCH
from mismatchctl.measure.hashes import Value as Label
from mismatchctl.measure.hashes import step_hash
from mismatchctl.measure.layers import LAYERS
from mismatchctl.measure.table import Of, TableAxis
from mismatchctl.result import Clusters

CLUSTER_DIGITS, LAYER_DIGITS = 9, 5
"""Significant digits of the sums in the cluster table; of the layers of K3, of which only differences are tested."""


class Tables:
    """The tables of a run: the columns of the mismatch, or with `every_cluster` all of them.

    A folded table keeps no layers: they would be a third of a long run's Result, and so many clusters tell by K3 alone.
    """

    def __init__(self, plan: MeasurePlan, dump: Dump, run: str, axis: TableAxis) -> None:
        files = [file for file in dump.files if file.run == run] or dump.files  # a column may name the runs
        has = {name for file in files for name in (*file.columns, *file.partition)}
        self._cap = plan.most_clusters
        self._by = next((name for name in ("prompt", "sequence") if f"{name}_id" in has), "content")
        self._every = plan.every_cluster
        self._columns = {
            _column_title(of, name, plan): place
            for place, (of, name) in enumerate(axis.names)
            if plan.every_cluster or (of == MISMATCH and name != CLUSTERS.name)
        }

    def of_steps(self, table: ClusterTable, labels: Sequence[Label]) -> Clusters:
        """The table of a run; rows know their step unless they are folded."""
        if table.is_folded:
            return self._clusters(table, [])
        index = {int(step_hash(label)): number for number, label in enumerate(labels)}
        return self._clusters(table, [index[scope] for scope in table.scopes.tolist()])

    def of_values(self, tables: Sequence[ClusterTable]) -> Clusters | None:
        """The tables of the values of a `--by` column in one; None where it would be too large."""
        if any(table.is_folded for table in tables) or sum(map(len, tables)) > self._cap:
            return None
        numbered = [table.of_scope(np.uint64(number)) for number, table in enumerate(tables)]
        merged = reduce(add, numbered)
        return self._clusters(merged, merged.scopes.tolist())

    def _clusters(self, table: ClusterTable, groups: list[int]) -> Clusters:
        bounded = table.is_folded and not self._every
        names = [name for name in self._columns if not (bounded and name in LAYERS)]
        return Clusters(
            by=self._by,  # type: ignore[arg-type]
            columns=names,
            hashes=[f"{cluster:016x}" for cluster in table.clusters.tolist()],
            groups=groups,
            folded=table.is_folded,
            sums=rounded_sums(table.sums[:, [self._columns[name] for name in names]], names),
        )


def rounded_sums(sums: Float64s, names: Sequence[str]) -> list[list[float]]:
    """Rows of a cluster table with as many digits as a Result keeps of each column."""
    held = capped_all(sums)
    coarse = np.array([name in LAYERS for name in names], np.bool_)
    rounded = np.empty_like(held)
    for chosen, digits in ((coarse, LAYER_DIGITS), (~coarse, CLUSTER_DIGITS)):
        rounded[:, chosen] = rounded_all(held[:, chosen], digits)
    rows: list[list[float]] = rounded.tolist()
    return rows


def _column_title(of: Of, name: str, plan: MeasurePlan) -> str:
    """What a Result calls a column."""
    if isinstance(of, int):
        return f"{plan.corrections[of].name}/{name}"
    return name if of == MISMATCH else f"{of}_{name}"
