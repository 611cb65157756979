"""Error bounds of metrics, which docs/reference/metrics.md states and the accuracy test checks."""

RELATIVE_TOLERANCES: dict[str, float] = {
    **dict.fromkeys(("k1", "k2", "k3", "abs_diff_mean", "abs_diff_max", "prob_diff_mean", "prob_diff_max"), 1e-10),
    **dict.fromkeys(("rollout_ppl", "rollout_log_ppl", "train_ppl", "train_log_ppl", "ppl_ratio"), 1e-10),
    **dict.fromkeys(("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_min", "log_ppl_diff_max"), 1e-10),
    **dict.fromkeys(("ratio_mean", "ess_token", "ess_sequence"), 1e-10),
    **dict.fromkeys(("chi2_token", "chi2_sequence", "prob_diff_std", "prob_corr", "autocorr_lag1", "inflation"), 1e-6),
    **dict.fromkeys(("abs_diff_p50", "abs_diff_p90", "abs_diff_p99", "abs_diff_p999"), 0.01),
}
"""Maximum relative error in float64 for log ratios from 1e-12 to 1e2."""
ABSOLUTE_TOLERANCE = 1e-12
"""Absolute tolerance of metrics that are differences of sums near 1."""
EXACT_METRICS = ("tokens", "sequences", "empty_sequences", "prompts", "bitwise_all", "bitwise_share")
