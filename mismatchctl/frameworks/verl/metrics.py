"""verl's logged names as tables: name, quantity, over what, reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mismatchctl.batch import Floats
from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.verl.sample import REDUCTIONS, Values, clamp, ratio
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted
from mismatchctl.measure.metrics.quantity import ALL_GATES, RAW_WEIGHTS, TOKENS, Quantity
from mismatchctl.ratios import LOG_RATIO_BOUND
from mismatchctl.surrogates import exp

Subject = OffPolicy | Weighted | Vetoed | Estimated | Rejected
Over = Literal["tokens", "rows", "filled"]


@dataclass(frozen=True)
class Measured:
    """What is reduced.

    Attributes:
        words: what it is.
        of: its values, of a subject.
        like: what the registry of metrics calls it; None where it has nothing like it.
        basis: what it looks at: the two policies, or weights at a stage.
    """

    words: str
    of: Callable[[Any], Values]
    like: Quantity | None = None
    basis: str = "train/rollout"


@dataclass(frozen=True)
class Logged:
    """One name that verl logs.

    Attributes:
        name: without the prefixes of its version and its rule.
        quantity: what is reduced.
        over: all valid tokens, all rows (a row without valid tokens counts, with 0/0 as 0), or the filled rows only.
        reduction: one of `REDUCTIONS`.
    """

    name: str
    quantity: Measured
    over: Over
    reduction: str = "mean"


_LOG_PPL_DIFF = Measured(
    "Log perplexity of the row under train minus under rollout", lambda s: s.log_ppl_diff, Quantity.LOG_PPL_DIFF
)
OFF_POLICY: tuple[Logged, ...] = (
    Logged("training_ppl", Measured(
        "Perplexity of the row under train", lambda s: exp(s.policy_log_ppl), Quantity.TRAIN_PPL), "rows"),
    Logged("training_log_ppl", Measured(
        "Minus the mean log-prob of the row under train", lambda s: s.policy_log_ppl, Quantity.TRAIN_LOG_PPL), "rows"),
    Logged("kl", Measured(
        "Log-prob of rollout minus train, per token: its mean estimates KL(rollout, train)",
        lambda s: -s.sample.log_ratio, Quantity.K1), "tokens"),
    Logged("k3_kl", Measured(
        "exp(x) - x - 1 of the log ratio x, per token, not clamped; the formula cancels in float32",
        lambda s: exp(s.sample.log_ratio) - s.sample.log_ratio - 1, Quantity.K3), "tokens"),
    Logged("rollout_ppl", Measured(
        "Perplexity of the row under rollout", lambda s: exp(s.reference_log_ppl), Quantity.ROLLOUT_PPL), "rows"),
    Logged("rollout_log_ppl", Measured(
        "Minus the mean log-prob of the row under rollout", lambda s: s.reference_log_ppl, Quantity.ROLLOUT_LOG_PPL),
        "rows"),
    Logged("log_ppl_diff", _LOG_PPL_DIFF, "rows"),
    Logged("log_ppl_abs_diff", Measured(
        "Distance of the row's two log perplexities", lambda s: np.abs(s.log_ppl_diff), Quantity.LOG_PPL_ABS_DIFF),
        "rows"),
    Logged("log_ppl_diff_max", _LOG_PPL_DIFF, "rows", "max"),
    Logged("log_ppl_diff_min", _LOG_PPL_DIFF, "rows", "min"),
    Logged("ppl_ratio", Measured(
        "Perplexity of the row under train over the one under rollout", lambda s: exp(s.log_ppl_diff),
        Quantity.PPL_RATIO), "rows"),
)  # fmt: skip

CHI2: tuple[Logged, ...] = (
    Logged("chi2_token", Measured(
        "Square of the ratio, per token, clamped to exp(+-20) before it is squared",
        lambda s: ratio(s.sample.log_ratio) ** 2, Quantity.SQUARED_RATIO), "tokens", "mean - 1"),
    Logged("chi2_seq", Measured(
        "Square of the ratio of the whole row, its logarithm clamped to +-20 before it is doubled",
        lambda s: exp(2 * clamp(s.sample.level("sequence"))), Quantity.SQUARED_PRODUCT), "rows", "mean - 1"),
)  # fmt: skip
"""Since #3984."""

VETO: tuple[Logged, ...] = (
    Logged("rollout_is_veto_fraction", Measured(
        "Whether the row has such a token", lambda s: s.row_vetoed, Quantity.CATASTROPHIC), "rows"),
    Logged("rollout_is_catastrophic_token_fraction", Measured(
        "Whether the token's unclamped ratio lies below the veto threshold; never when the veto is off",
        lambda s: s.catastrophic, Quantity.CATASTROPHIC), "tokens"),
)  # fmt: skip
"""Until 2026; 0 when the veto is off."""


def _of_weights(words: str, of: Callable[[Weighted], Values]) -> Measured:
    return Measured(words, of, None, RAW_WEIGHTS)


def _extremes(over: Over, largest: Measured, smallest: Measured) -> tuple[Logged, ...]:
    return Logged("max", largest, over, "max"), Logged("min", smallest, over, "min")


def _fractions(over: Over, prefix: str, sides: tuple[Measured, Measured]) -> tuple[Logged, ...]:
    return Logged(f"{prefix}_high", sides[0], over), Logged(f"{prefix}_low", sides[1], over)


WEIGHT = Measured(
    "Weight of the token: since 2026 after its bound, until then before",
    lambda s: s.weight,
    Quantity.WEIGHT,
    RAW_WEIGHTS,
)
_CLAMPED = Measured(
    "Weight of the token, clamped into the thresholds: since 2026 at the upper one only",
    lambda s: np.clip(s.weight, 0 if s.measures_applied else s.lower, s.upper),
    Quantity.WEIGHT, "weights clamped into their thresholds",
)  # fmt: skip
_ROW_WEIGHT = _of_weights("Mean weight of the row's tokens, 0 without any", lambda s: s.row_weight)
_WEIGHTS: tuple[Logged, ...] = (
    Logged("mean", WEIGHT, "tokens"),
    Logged("std", _CLAMPED, "tokens", "spread"),
    Logged("eff_sample_size", _CLAMPED, "tokens", "ess"),
    Logged("seq_mean", _ROW_WEIGHT, "rows"),
    Logged("seq_std", _ROW_WEIGHT, "rows", "std"),
    Logged("seq_max", _ROW_WEIGHT, "rows", "max"),
    Logged("seq_min", _ROW_WEIGHT, "rows", "min"),
    Logged("seq_max_deviation", _of_weights(
        "Distance of the row's mean weight from 1", lambda s: np.abs(s.row_weight - 1)), "rows", "max"),
    *_fractions("rows", "seq_fraction", (
        _of_weights("Whether the row's mean weight, before the bound, is above the upper threshold",
                    lambda s: s.sample.row_mean(s.raw) > s.upper),
        _of_weights("Whether the row's mean weight, before the bound, is below the lower threshold",
                    lambda s: s.sample.row_mean(s.raw) < s.lower),
    )),
)  # fmt: skip
HIGH = Measured(
    "Whether the ratio is above the upper threshold; rows compare logarithms, the threshold's in float32",
    lambda s: s.high,
    Quantity.ABOVE,
    RAW_WEIGHTS,
)
_SIDES = (
    HIGH,
    _of_weights(
        "Whether the ratio is below the lower threshold; rows compare logarithms, the threshold's in float32",
        lambda s: s.low,
    ),
)
_SIDES_OF_TOKENS = (
    _of_weights("Whether the ratio of the token's row is above the upper threshold",
                lambda s: s.sample.over_tokens(s.high, s.level)),
    _of_weights("Whether the ratio of the token's row is below the lower threshold",
                lambda s: s.sample.over_tokens(s.low, s.level)),
)  # fmt: skip
_LARGEST = _of_weights("Ratio at the rule's level, per row, clamped above: so verl takes the largest",
                       lambda s: exp(np.minimum(s.log_ratio, LOG_RATIO_BOUND)))  # fmt: skip
_SMALLEST = _of_weights("Ratio at the rule's level, per row, not clamped: so verl takes the smallest",
                        lambda s: exp(s.log_ratio))  # fmt: skip
_ROWS = (*_WEIGHTS, *_extremes("rows", _LARGEST, _SMALLEST))
_OF_ROWS = (*_ROWS, *_fractions("rows", "ratio_fraction", _SIDES))
WEIGHTS: dict[str, tuple[Logged, ...]] = {
    "token": (*_WEIGHTS, *_extremes("tokens", WEIGHT, WEIGHT), *_fractions("tokens", "ratio_fraction", _SIDES)),
    "sequence": _OF_ROWS,
    "geometric": _OF_ROWS,
}
"""By level."""
WEIGHTS_2025_10 = WEIGHTS | {"geometric": (*_ROWS, *_fractions("tokens", "ratio_fraction", _SIDES_OF_TOKENS))}
"""#3915 weights the geometric fractions by tokens; #3984 counts rows."""

ICEPOP: tuple[Logged, ...] = (
    Logged(
        "oob_ratio",
        _of_weights("Whether the token's ratio lies outside the thresholds", lambda s: s.outside_raw),
        "tokens",
    ),
)

_ROW_APPLIED = _of_weights(
    "Mean of the row's weights after their bound, 0 without tokens", lambda s: s.sample.row_mean(s.applied)
)
NORMALIZATION: dict[str, Logged] = {
    "token": Logged(
        "batch_norm_factor",
        _of_weights("Weight of the token after its bound", lambda s: s.applied),
        "tokens",
    ),
    "sequence": Logged("batch_norm_factor", _ROW_APPLIED, "filled"),
}
"""By level: the mean that weights are divided by, before rejection."""

NORMALIZATION_2025_11 = NORMALIZATION | {"sequence": Logged("batch_norm_factor", _ROW_APPLIED, "rows")}
"""#4070 lets rows without valid tokens pull the mean down; #3980 leaves them out."""


def _masked(token: Measured, row: Measured) -> tuple[Logged, ...]:
    return Logged("masked_fraction", token, "tokens"), Logged("seq_masked_fraction", row, "rows")


_BY_RATIO = "rejection without the veto"
REJECTED = _masked(
    Measured("Whether the clamped ratio of the token (or of its row) lies outside the thresholds, both inclusive",
             lambda s: s.rejected, Quantity.REJECTED, _BY_RATIO),
    Measured("Whether any token of the row is rejected; a row without tokens goes by its ratio of 1",
             lambda s: s.sample.any_in_row(s.rejected) if s.level == "token" else s.rejected_at_level,
             Quantity.REJECTED, _BY_RATIO),
)  # fmt: skip
"""Until 2026, without the veto."""
REJECTED_BY_ANY = _masked(
    Measured("1 where any option rejects the token, else 0, in the data's dtype",
             lambda s: s.flags.astype(s.sample.policy.dtype), Quantity.REJECTED, ALL_GATES),
    Measured("Whether any option rejects any token of the row",
             lambda s: s.sample.any_in_row(s.flags), Quantity.REJECTED, ALL_GATES),
)  # fmt: skip
"""Since 2026, over all options, other than each option's share, which leaves rows without valid tokens out."""


def _outside(what: str, of: Callable[[Estimated], Values]) -> tuple[Measured, Measured]:
    above = Measured(f"Whether {what} is above the upper bound", lambda s: of(s) > s.upper)
    return above, Measured(f"Whether {what} is below the lower bound; k2 and k3 have none", lambda s: of(s) < s.lower)


_STATISTIC, _ROW_STATISTIC = (
    Measured("The statistic at the option's level: a row's value stands for each of its tokens", lambda s: s.statistic),
    Measured("The row's statistic: of a token option, the mean over its tokens", lambda s: s.row_statistic),
)
_TOKEN_SIDES = _outside("the token's statistic", lambda s: s.statistic)
_ROW_SIDES = _outside("the row's statistic", lambda s: s.row_statistic)
_ESTIMATES: tuple[Logged, ...] = (
    Logged("mean", _STATISTIC, "tokens"),
    Logged("std", Measured(
        "The statistic of the token, clamped into the bounds",
        lambda s: np.clip(s.statistic, s.gate.keep[0] or 0.0, s.upper)), "tokens", "spread"),
    Logged("seq_mean", _ROW_STATISTIC, "filled"),
    Logged("seq_std", _ROW_STATISTIC, "filled", "std"),
    Logged("seq_max", _ROW_STATISTIC, "filled", "max"),
    Logged("seq_min", _ROW_STATISTIC, "filled", "min"),
    Logged("seq_max_deviation", Measured(
        "Absolute value of the row's statistic", lambda s: np.abs(s.row_statistic)), "filled", "max"),
    Logged("seq_fraction_high", _ROW_SIDES[0], "filled"),
    Logged("masked_fraction", Measured(
        "1 where the token is rejected, else 0, in the data's dtype, in which verl averages it",
        lambda s: s.rejected.astype(s.statistic.dtype)), "tokens"),
    Logged("seq_masked_fraction", Measured(
        "1 where any token of the row is rejected, else 0, in the data's dtype",
        lambda s: s.sample.any_in_row(s.rejected).astype(s.statistic.dtype)), "filled"),
)  # fmt: skip
_OF_TOKENS = (*_extremes("tokens", _STATISTIC, _STATISTIC), *_fractions("tokens", "fraction", _TOKEN_SIDES))
_OF_FILLED = (*_extremes("filled", _ROW_STATISTIC, _ROW_STATISTIC), *_fractions("filled", "fraction", _ROW_SIDES))
_K1 = (Logged("seq_fraction_low", _ROW_SIDES[1], "filled"),)


def estimates(statistic: str, level: str) -> tuple[Logged, ...]:
    """The names of one option of rollout_rs since 2026."""
    return (*_ESTIMATES, *(_OF_TOKENS if level == "token" else _OF_FILLED), *(_K1 if statistic == "k1" else ()))


def compute(names: Iterable[Logged], subject: Subject, prefix: str) -> dict[str, float]:
    """The values of `names` for one subject, each under `prefix` + its name."""
    logged = {}
    for name in names:
        values = name.quantity.of(subject)
        if name.over == "filled":
            values = values[subject.sample.segments.nonempty]
        logged[prefix + name.name] = float(REDUCTIONS[name.reduction](values))
    return logged


_PREFIX, _WHEN, _DIFF = "training/rollout_", "not in bypass mode", "distance of the token's two probabilities"
DEBUG: tuple[Meaning, ...] = (
    Meaning(f"{_PREFIX}probs_diff_valid", _WHEN, "1 where any token is valid, else 0", TOKENS, "max"),
    Meaning(f"{_PREFIX}probs_diff_max", _WHEN, _DIFF, TOKENS, "max", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}probs_diff_mean", _WHEN, _DIFF, TOKENS, "mean", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}probs_diff_std", _WHEN, _DIFF, TOKENS, "standard deviation (n - 1)", Quantity.PROB_DIFF),
    Meaning(f"{_PREFIX}actor_probs_pearson_corr", _WHEN, "probabilities of the token under train and rollout", TOKENS,
            "Pearson correlation", Quantity.PROBS),
)  # fmt: skip
"""What calculate_debug_metrics logs, before any rejection."""


def debug_metrics(train: Floats, rollout: Floats) -> dict[str, float]:
    """Differences of probabilities and their Pearson correlation, over the valid tokens [T].

    Undefined values are nan, as verl logs them: the deviation of one token, the correlation of constants.
    """
    if not len(train):
        return {item.name: float("nan") for item in DEBUG} | {f"{_PREFIX}probs_diff_valid": 0}
    ours, theirs = exp(train), exp(rollout)
    differences = np.abs(ours - theirs).astype(np.float64)
    return {
        f"{_PREFIX}probs_diff_valid": 1,
        f"{_PREFIX}probs_diff_max": float(differences.max()),
        f"{_PREFIX}probs_diff_mean": float(differences.mean()),
        f"{_PREFIX}probs_diff_std": float(differences.std(ddof=1)) if len(differences) > 1 else float("nan"),
        f"{_PREFIX}actor_probs_pearson_corr": _pearson(ours.astype(np.float64), theirs.astype(np.float64)),
    }


def _pearson(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")
