"""What each name in a verl run means: read off the tables that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.verl import metrics
from mismatchctl.frameworks.verl.debug import DEBUG
from mismatchctl.frameworks.verl.dialect import RS_OPTIONS
from mismatchctl.frameworks.verl.losses import LOSS
from mismatchctl.frameworks.verl.metrics import Logged, Subject
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted
from mismatchctl.frameworks.verl.versions import Version
from mismatchctl.measure.metrics.quantity import ALL_GATES, BOUNDED_WEIGHTS, RAW_WEIGHTS, SEQUENCES, TOKENS, Quantity

_OVER = {"tokens": TOKENS, "rows": "all sequences, those without a valid token too", "filled": SEQUENCES}
_REDUCTIONS = {
    "mean - 1": "mean",
    "std": "standard deviation (n - 1)",
    "spread": "standard deviation (n)",
    "ess": "1 / mean of the squares of the values over their mean",
}
_LIKE = {
    (OffPolicy, "reference_minus_policy"): Quantity.K1,
    (OffPolicy, "k3"): Quantity.K3,
    (OffPolicy, "squared_ratio"): Quantity.SQUARED_RATIO,
    (OffPolicy, "squared_row_ratio"): Quantity.SQUARED_PRODUCT,
    (OffPolicy, "policy_log_ppl"): Quantity.TRAIN_LOG_PPL,
    (OffPolicy, "policy_ppl"): Quantity.TRAIN_PPL,
    (OffPolicy, "reference_log_ppl"): Quantity.ROLLOUT_LOG_PPL,
    (OffPolicy, "reference_ppl"): Quantity.ROLLOUT_PPL,
    (OffPolicy, "log_ppl_diff"): Quantity.LOG_PPL_DIFF,
    (OffPolicy, "log_ppl_abs_diff"): Quantity.LOG_PPL_ABS_DIFF,
    (OffPolicy, "ppl_ratio"): Quantity.PPL_RATIO,
    (Weighted, "weight"): Quantity.WEIGHT,
    (Weighted, "clamped"): Quantity.WEIGHT,
    (Weighted, "high"): Quantity.ABOVE,
    (Weighted, "rejected"): Quantity.REJECTED,
    (Weighted, "row_rejected"): Quantity.REJECTED,
    (Rejected, "rejected"): Quantity.REJECTED,
    (Rejected, "row_rejected"): Quantity.REJECTED,
    (Vetoed, "catastrophic"): Quantity.CATASTROPHIC,
    (Vetoed, "row_vetoed"): Quantity.CATASTROPHIC,
}
"""What the registry of metrics calls a quantity."""


def meanings(version: Version) -> list[Meaning]:
    """Every name that a version can log, once per configuration that gives it another meaning."""
    corrected = [
        Meaning(
            prefix + row.name,
            when,
            _words(subject, row),
            _OVER[row.over],
            _REDUCTIONS.get(row.reduction, row.reduction),
            None if _tests(row, prefix) else _LIKE.get((subject, row.quantity)),
            _basis(subject, row.quantity, version),
        )
        for table, subject, prefix, when in _tables(version)
        for row in table
    ]
    losses = (replace(item, over=TOKENS) if version.zeroes_rejected else item for item in LOSS)
    return [*corrected, *DEBUG, *losses]


def _tests(row: Logged, prefix: str) -> bool:
    """Whether it describes the ratios that rejection tests: those are no weights."""
    return prefix.endswith("rollout_rs_") and not row.name.endswith("masked_fraction")


def _basis(subject: type[Subject], quantity: str, version: Version) -> str:
    if subject is Rejected:
        return ALL_GATES
    if subject is not Weighted:
        return "train/rollout"
    if quantity in ("rejected", "row_rejected"):
        return "rejection without the veto"
    if quantity == "clamped":
        return "weights clamped into their thresholds"
    if quantity == "high" and version.dialect == "flat":
        return "ratios, which mask mode rejects by the same thresholds"
    return BOUNDED_WEIGHTS if quantity == "weight" and version.dialect == "estimator" else RAW_WEIGHTS


def _words(subject: type[Subject], row: Logged) -> str:
    words = " ".join((getattr(subject, row.quantity).__doc__ or "").split()).rstrip(".")
    return f"{words}, less 1" if row.reduction == "mean - 1" else words


def _tables(version: Version) -> Iterator[tuple[Iterable[Logged], type[Subject], str, str]]:
    """Each table with its subject, its prefix, and when it is logged."""
    weights, rejection = f"{version.prefix}rollout_is_", f"{version.prefix}rollout_rs_"
    if version.dialect == "flat":
        yield metrics.OFF_POLICY, OffPolicy, f"{version.prefix}mismatch_", ""
        for level, table in metrics.WEIGHTS_2025_10.items():
            yield table, Weighted, weights, f"rollout_is_level: {level}"
        yield metrics.REJECTED, Weighted, weights, "rollout_is_mode: mask"
    else:
        yield (*metrics.OFF_POLICY, *metrics.CHI2), OffPolicy, version.prefix, ""
        for level in ("token", "sequence"):
            yield metrics.WEIGHTS[level], Weighted, weights, f"rollout_is: {level}"
    if version.normalizes:
        names = metrics.NORMALIZATION_2025_11 if version.normalizes_empty else metrics.NORMALIZATION
        for level, name in names.items():
            yield (name,), Weighted, weights, f"rollout_is: {level}, rollout_is_batch_normalize"
    if version.dialect == "ratio":
        for level, table in metrics.WEIGHTS.items():
            yield (*table, *metrics.REJECTED), Weighted, rejection, f"rollout_rs: {level}"
    if version.dialect == "estimator":
        yield metrics.ICEPOP, Weighted, weights, "rollout_is_threshold: lower_upper"
        for option, (statistic, level) in RS_OPTIONS.items():
            yield metrics.estimates(statistic, level), Estimated, f"{rejection}{option}_", f"rollout_rs: {option}"
        yield metrics.REJECTED, Rejected, rejection, "rollout_rs"
    else:
        yield metrics.VETO, Vetoed, version.prefix, ""
