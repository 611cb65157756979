"""What each name in a verl run means: read off the tables that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.verl import metrics
from mismatchctl.frameworks.verl.dialect import RS_OPTIONS
from mismatchctl.frameworks.verl.losses import LOSS
from mismatchctl.frameworks.verl.metrics import DEBUG, Logged, Measured
from mismatchctl.frameworks.verl.versions import VerlVersion
from mismatchctl.measure.metrics.quantity import BOUNDED_WEIGHTS, SEQUENCES, TOKENS

_OVER = {"tokens": TOKENS, "rows": "all sequences, those without a valid token too", "filled": SEQUENCES}
_REDUCTIONS = {
    "mean - 1": "mean",
    "std": "standard deviation (n - 1)",
    "spread": "standard deviation (n)",
    "ess": "1 / mean of the squares of the values over their mean",
}


def meanings(version: VerlVersion) -> list[Meaning]:
    """Every name that a version can log, once per configuration that gives it another meaning."""
    corrected = [
        Meaning(
            prefix + row.name,
            when,
            f"{row.quantity.words}, less 1" if row.reduction == "mean - 1" else row.quantity.words,
            _OVER[row.over],
            _REDUCTIONS.get(row.reduction, row.reduction),
            None if _tests(row, prefix) else row.quantity.like,
            _basis(row.quantity, version),
        )
        for table, prefix, when in _tables(version)
        for row in table
    ]
    losses = (replace(item, over=TOKENS) if version.zeroes_rejected else item for item in LOSS)
    return [*corrected, *DEBUG, *losses]


def _tests(row: Logged, prefix: str) -> bool:
    """Whether it describes the ratios that rejection tests: those are no weights."""
    return prefix.endswith("rollout_rs_") and not row.name.endswith("masked_fraction")


def _basis(quantity: Measured, version: VerlVersion) -> str:
    if quantity is metrics.HIGH and version.dialect == "flat":
        return "ratios, which mask mode rejects by the same thresholds"
    return BOUNDED_WEIGHTS if quantity is metrics.WEIGHT and version.dialect == "estimator" else quantity.basis


def _tables(version: VerlVersion) -> Iterator[tuple[Iterable[Logged], str, str]]:
    """Each table with its prefix, and when it is logged."""
    weights, rejection = f"{version.prefix}rollout_is_", f"{version.prefix}rollout_rs_"
    if version.dialect == "flat":
        yield metrics.OFF_POLICY, f"{version.prefix}mismatch_", ""
        for level, table in metrics.WEIGHTS_2025_10.items():
            yield table, weights, f"rollout_is_level: {level}"
        yield metrics.REJECTED, weights, "rollout_is_mode: mask"
    else:
        yield (*metrics.OFF_POLICY, *metrics.CHI2), version.prefix, ""
        for level in ("token", "sequence"):
            yield metrics.WEIGHTS[level], weights, f"rollout_is: {level}"
    if version.normalizes:
        names = metrics.NORMALIZATION_2025_11 if version.normalizes_empty else metrics.NORMALIZATION
        for level, name in names.items():
            yield (name,), weights, f"rollout_is: {level}, rollout_is_batch_normalize"
    if version.dialect == "ratio":
        for level, table in metrics.WEIGHTS.items():
            yield (*table, *metrics.REJECTED), rejection, f"rollout_rs: {level}"
    if version.dialect == "estimator":
        yield metrics.ICEPOP, weights, "rollout_is_threshold: lower_upper"
        for option, (statistic, level) in RS_OPTIONS.items():
            yield metrics.estimates(statistic, level), f"{rejection}{option}_", f"rollout_rs: {option}"
        yield metrics.REJECTED_BY_ANY, rejection, "rollout_rs"
    else:
        yield metrics.VETO, version.prefix, ""
