"""How losses of tokens become one number, as configurations name it; empty sequences count in no denominator."""

from __future__ import annotations

from collections.abc import Callable

from mismatchctl.measure.metrics.metric import Number, Totals

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""How a loss per token becomes one number, as configurations name it."""
SUFFIXES = dict(zip(AGGREGATIONS, ("", "_seq_sum", "_seq_mean"), strict=True))
"""What the key of a metric ends in under each."""
WORDS = {
    "token-mean": "mean over tokens",
    "seq-mean-token-sum": "sum over tokens of a sequence, mean over sequences with a token",
    "seq-mean-token-mean": "mean over tokens of a sequence, mean over sequences with a token",
}
"""The same in words."""


def aggregated(name: str, tokens: str, sequences: str, aggregation: str) -> Callable[[Totals], Number]:
    """A sum over tokens aggregated: of column `name`, of which `name_mean` holds the means of sequences."""
    if aggregation == "token-mean":
        return lambda t: t[name] / t[tokens]
    column = name if aggregation == "seq-mean-token-sum" else f"{name}_mean"
    return lambda t: t[column] / t[sequences]
