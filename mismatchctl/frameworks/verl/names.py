"""What each name in a verl run means: read off the tables that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.verl import metrics
from mismatchctl.frameworks.verl.config import RS_OPTIONS
from mismatchctl.frameworks.verl.metrics import Logged, Subject
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted
from mismatchctl.frameworks.verl.versions import Version

_OVER = {"tokens": "valid tokens", "rows": "all rows", "filled": "rows with valid tokens"}
_REDUCTIONS = {
    "std": "standard deviation (n - 1)",
    "spread": "square root of the mean of squares minus the squared mean",
    "ess": "1 / mean of the squares of the values over their mean",
}
_WEIGHT_TABLES = {"token": metrics.TOKEN_WEIGHTS, "sequence": metrics.ROW_WEIGHTS, "geometric": metrics.ROW_WEIGHTS}


def meanings(version: Version) -> list[Meaning]:
    """Every name that a version can log, once per configuration that gives it another meaning."""
    return [
        Meaning(
            prefix + row.name,
            when,
            _words(subject, row.quantity),
            _OVER[row.over],
            _REDUCTIONS.get(row.reduction, row.reduction),
        )
        for table, subject, prefix, when in _tables(version)
        for row in table
    ]


def _words(subject: type[Subject], quantity: str) -> str:
    return " ".join((getattr(subject, quantity).__doc__ or "").split()).rstrip(".")


def _tables(version: Version) -> Iterator[tuple[Iterable[Logged], type[Subject], str, str]]:
    """Each table with its subject, its prefix, and when it is logged."""
    weights, rejection = f"{version.prefix}rollout_is_", f"{version.prefix}rollout_rs_"
    if version.dialect == "flat":
        yield metrics.OFF_POLICY, OffPolicy, f"{version.prefix}mismatch_", ""
        tables = _WEIGHT_TABLES | {"geometric": metrics.GEOMETRIC_WEIGHTS_2025_10}
        for level, table in tables.items():
            yield table, Weighted, weights, f"rollout_is_level: {level}"
        yield metrics.REJECTED, Weighted, weights, "rollout_is_mode: mask"
    else:
        yield (*metrics.OFF_POLICY, *metrics.CHI2), OffPolicy, version.prefix, ""
        for level in ("token", "sequence"):
            yield _WEIGHT_TABLES[level], Weighted, weights, f"rollout_is: {level}"
    if version.normalizes:
        names = metrics.NORMALIZATION_2025_11 if version.normalizes_empty else metrics.NORMALIZATION
        for level, name in names.items():
            yield (name,), Weighted, weights, f"rollout_is: {level}, rollout_is_batch_normalize"
    if version.dialect == "ratio":
        for level, table in _WEIGHT_TABLES.items():
            yield (*table, *metrics.REJECTED), Weighted, rejection, f"rollout_rs: {level}"
    if version.dialect == "estimator":
        yield metrics.ICEPOP, Weighted, weights, "rollout_is_threshold: lower_upper"
        for option, (statistic, level) in RS_OPTIONS.items():
            yield metrics.estimates(statistic, level), Estimated, f"{rejection}{option}_", f"rollout_rs: {option}"
        yield metrics.REJECTED_BY_ANY, Rejected, rejection, "rollout_rs"
    else:
        yield metrics.VETO, Vetoed, version.prefix, ""
