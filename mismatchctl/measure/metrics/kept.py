"""Which metrics are kept where, and how sure they are: all of them overall, fewer by group."""

from __future__ import annotations

from mismatchctl.measure.facets import SPREAD
from mismatchctl.measure.metrics.evaluate import Kept, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS
from mismatchctl.measure.pairs import PAIRS

REPEATED = frozenset(
    pair.key(key)
    for pair in PAIRS[1:]
    for key in (
        *(f"khat_{level}_{what}" for level in ("token", "sequence") for what in ("limit", "tail")),
        *(f"{side}_{ppl}" for side in ("train", "rollout") for ppl in ("log_ppl", "ppl")),
        *("ppl_ratio", "log_ppl_diff_min", "log_ppl_diff_max", "khat_token", "khat_sequence"),
    )
)
"""Metrics of other pairs kept overall only: step by step they repeat others, or need more tokens than a step has."""
_SPREAD = frozenset(metric.key for metric in FACET_METRICS[SPREAD])
NOT_BY_STEP = (
    REPEATED
    | frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("autocorr_lag1", "inflation", "k3_worst_share"))
    | _SPREAD - {"beyond_2", "parity_tokens"}
)
"""Those, and more that steps go without, of which there may be a thousand."""
OTHERS = frozenset(metric.key for pair in PAIRS[1:] for metric in pair_metrics(pair)) | _SPREAD
"""Metrics of other pairs than the mismatch, and of the spread of ratios."""
GROUP_ERRORS = frozenset(("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean"))
"""Metrics of corrections whose standard errors are kept per group too."""
OTHER_ERRORS = frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("k3", "ratio_mean"))
"""The same of OTHERS."""
BY_STEP = Kept(NOT_BY_STEP, OTHERS - OTHER_ERRORS, GROUP_ERRORS)
BY_VALUE = Kept(REPEATED, OTHERS - OTHER_ERRORS, GROUP_ERRORS)
"""Of groups by a column."""
