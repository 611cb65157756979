"""Mergeable sums: what the pass over the tokens leaves behind, and the pass itself."""

from mismatchctl.sums.cell import CellSums, PairSums, RunSums
from mismatchctl.sums.clusters import GROUP_CAP, OVERALL_CAP, ClusterTable
from mismatchctl.sums.kernel import BUCKETS, WORTH_COMPILING, Device, Kernel, kernel_for
from mismatchctl.sums.reduce import DRIFT, MISMATCH, Plan, Sums, reduce_batch

__all__ = [
    "BUCKETS",
    "DRIFT",
    "GROUP_CAP",
    "MISMATCH",
    "OVERALL_CAP",
    "WORTH_COMPILING",
    "CellSums",
    "ClusterTable",
    "Device",
    "Kernel",
    "PairSums",
    "Plan",
    "RunSums",
    "Sums",
    "kernel_for",
    "reduce_batch",
]
