"""verl's logged names as tables: name, quantity, over what, reduction. `subjects` says what each quantity is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mismatchctl.frameworks.verl.sample import REDUCTIONS
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted

Subject = OffPolicy | Weighted | Vetoed | Estimated | Rejected
Over = Literal["tokens", "rows", "filled"]


@dataclass(frozen=True)
class Logged:
    """One name that verl logs.

    Attributes:
        name: without the prefixes of its version and its rule.
        quantity: the property of the subject that is reduced.
        over: all valid tokens, all rows (a row without valid tokens counts, with 0/0 as 0), or the filled rows only.
        reduction: one of `REDUCTIONS`.
    """

    name: str
    quantity: str
    over: Over
    reduction: str = "mean"


OFF_POLICY: tuple[Logged, ...] = (
    Logged("training_ppl", "policy_ppl", "rows"),
    Logged("training_log_ppl", "policy_log_ppl", "rows"),
    Logged("kl", "reference_minus_policy", "tokens"),
    Logged("k3_kl", "k3", "tokens"),
    Logged("rollout_ppl", "reference_ppl", "rows"),
    Logged("rollout_log_ppl", "reference_log_ppl", "rows"),
    Logged("log_ppl_diff", "log_ppl_diff", "rows"),
    Logged("log_ppl_abs_diff", "log_ppl_abs_diff", "rows"),
    Logged("log_ppl_diff_max", "log_ppl_diff", "rows", "max"),
    Logged("log_ppl_diff_min", "log_ppl_diff", "rows", "min"),
    Logged("ppl_ratio", "ppl_ratio", "rows"),
)

CHI2: tuple[Logged, ...] = (
    Logged("chi2_token", "squared_ratio", "tokens", "mean - 1"),
    Logged("chi2_seq", "squared_row_ratio", "rows", "mean - 1"),
)
"""Since #3984."""

VETO: tuple[Logged, ...] = (
    Logged("rollout_is_veto_fraction", "row_vetoed", "rows"),
    Logged("rollout_is_catastrophic_token_fraction", "catastrophic", "tokens"),
)
"""Until 2026; 0 when the veto is off."""

_WEIGHTS: tuple[Logged, ...] = (
    Logged("mean", "weight", "tokens"),
    Logged("std", "clamped", "tokens", "spread"),
    Logged("eff_sample_size", "clamped", "tokens", "ess"),
    Logged("seq_mean", "row_weight", "rows"),
    Logged("seq_std", "row_weight", "rows", "std"),
    Logged("seq_max", "row_weight", "rows", "max"),
    Logged("seq_min", "row_weight", "rows", "min"),
    Logged("seq_max_deviation", "deviation", "rows", "max"),
    Logged("seq_fraction_high", "row_high", "rows"),
    Logged("seq_fraction_low", "row_low", "rows"),
)


def _extremes(over: Over, largest: str, smallest: str) -> tuple[Logged, ...]:
    return Logged("max", largest, over, "max"), Logged("min", smallest, over, "min")


def _fractions(over: Over, prefix: str, flags: str = "") -> tuple[Logged, ...]:
    return Logged(f"{prefix}_high", f"{flags}high", over), Logged(f"{prefix}_low", f"{flags}low", over)


_ROWS = (*_WEIGHTS, *_extremes("rows", "level_ratio_capped", "level_ratio"))
_OF_ROWS = (*_ROWS, *_fractions("rows", "ratio_fraction"))
WEIGHTS: dict[str, tuple[Logged, ...]] = {
    "token": (*_WEIGHTS, *_extremes("tokens", "weight", "weight"), *_fractions("tokens", "ratio_fraction")),
    "sequence": _OF_ROWS,
    "geometric": _OF_ROWS,
}
"""By level."""
WEIGHTS_2025_10 = WEIGHTS | {"geometric": (*_ROWS, *_fractions("tokens", "ratio_fraction", "token_"))}
"""#3915 weights the geometric fractions by tokens; #3984 counts rows."""

ICEPOP: tuple[Logged, ...] = (Logged("oob_ratio", "outside_raw", "tokens"),)

NORMALIZATION: dict[str, Logged] = {
    "token": Logged("batch_norm_factor", "applied", "tokens"),
    "sequence": Logged("batch_norm_factor", "row_applied", "filled"),
}
"""By level: the mean that weights are divided by, before rejection."""

NORMALIZATION_2025_11 = NORMALIZATION | {"sequence": Logged("batch_norm_factor", "row_applied", "rows")}
"""#4070 lets rows without valid tokens pull the mean down; #3980 leaves them out."""

REJECTED: tuple[Logged, ...] = (
    Logged("masked_fraction", "rejected", "tokens"),
    Logged("seq_masked_fraction", "row_rejected", "rows"),
)
"""Until 2026, without the veto; since then over all options, other than each option's share, which leaves rows without
valid tokens out."""

_ESTIMATES: tuple[Logged, ...] = (
    Logged("mean", "statistic", "tokens"),
    Logged("std", "clamped", "tokens", "spread"),
    Logged("seq_mean", "row_statistic", "filled"),
    Logged("seq_std", "row_statistic", "filled", "std"),
    Logged("seq_max", "row_statistic", "filled", "max"),
    Logged("seq_min", "row_statistic", "filled", "min"),
    Logged("seq_max_deviation", "row_magnitude", "filled", "max"),
    Logged("seq_fraction_high", "row_high", "filled"),
    Logged("masked_fraction", "rejection", "tokens"),
    Logged("seq_masked_fraction", "row_rejection", "filled"),
)
_OF_TOKENS = (*_extremes("tokens", "statistic", "statistic"), *_fractions("tokens", "fraction"))
_OF_FILLED = (*_extremes("filled", "row_statistic", "row_statistic"), *_fractions("filled", "fraction", "row_"))
_K1 = (Logged("seq_fraction_low", "row_low", "filled"),)


def estimates(statistic: str, level: str) -> tuple[Logged, ...]:
    """The names of one option of rollout_rs since 2026."""
    return (*_ESTIMATES, *(_OF_TOKENS if level == "token" else _OF_FILLED), *(_K1 if statistic == "k1" else ()))


def compute(names: Iterable[Logged], subject: Subject, prefix: str) -> dict[str, float]:
    """The values of `names` for one subject, each under `prefix` + its name."""
    logged = {}
    for name in names:
        values = getattr(subject, name.quantity)
        if name.over == "filled":
            values = values[subject.sample.segments.nonempty]
        logged[prefix + name.name] = float(REDUCTIONS[name.reduction](values))
    return logged
