"""Every metric with a formula, in 50 digits with mpmath and loops. No code of mismatchctl is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mpmath as mp
import numpy as np

Pairs = list[list[tuple[mp.mpf, mp.mpf]]]
DIGITS = 50


def exact(rollout: Sequence[np.ndarray], train: Sequence[np.ndarray]) -> Pairs:
    """Return (rollout, train) log-probs with the exact values of the floats."""
    return [
        [(mp.mpf(float(a)), mp.mpf(float(b))) for a, b in zip(one, other, strict=True)]
        for one, other in zip(rollout, train, strict=True)
    ]


def mean(values: Sequence[mp.mpf]) -> mp.mpf:
    return mp.fsum(values) / len(values)


def metrics(pairs: Pairs) -> dict[str, mp.mpf]:
    """Return every metric by its key. Ratios are clamped to exp(+-20), as their definition requires."""
    flat = [pair for own in pairs for pair in own]
    x = [b - a for a, b in flat]
    sums = [mp.fsum(b - a for a, b in own) for own in pairs]
    ratio: Callable[[mp.mpf], mp.mpf] = lambda value: mp.exp(max(min(value, mp.mpf(20)), mp.mpf(-20)))  # noqa: E731
    w, whole = [ratio(value) for value in x], [ratio(value) for value in sums]
    p, q = [mp.exp(b) for _, b in flat], [mp.exp(a) for a, _ in flat]
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    rollout_lp, train_lp = ([-mean([pair[side] for pair in own]) for own in pairs] for side in (0, 1))
    drift = [-total / len(own) for total, own in zip(sums, pairs, strict=True)]
    size = len(x)
    found = {
        "tokens": mp.mpf(size),
        "sequences": mp.mpf(len(pairs)),
        "k1": -mean(x),
        "k2": mean([value**2 for value in x]) / 2,
        "k3": mean([mp.expm1(value) - value for value in x]),
        "abs_diff_mean": mean([abs(value) for value in x]),
        "abs_diff_max": max(abs(value) for value in x),
        "prob_diff_mean": mean(gaps),
        "prob_diff_max": max(gaps),
        "prob_diff_std": mp.sqrt(mp.fsum((gap - mean(gaps)) ** 2 for gap in gaps) / size),
        "rollout_log_ppl": mean(rollout_lp),
        "train_log_ppl": mean(train_lp),
        "rollout_ppl": mean([mp.exp(value) for value in rollout_lp]),
        "train_ppl": mean([mp.exp(value) for value in train_lp]),
        "ppl_ratio": mean([mp.exp(value) for value in drift]),
        "log_ppl_diff": mean(drift),
        "log_ppl_abs_diff": mean([abs(value) for value in drift]),
        "log_ppl_diff_min": min(drift),
        "log_ppl_diff_max": max(drift),
        "ratio_mean": mean(w),
        "chi2_token": mean([value**2 for value in w]) - 1,
        "chi2_sequence": mean([value**2 for value in whole]) - 1,
        "ess_token": mp.fsum(w) ** 2 / (size * mp.fsum(value**2 for value in w)),
        "ess_sequence": mp.fsum(whole) ** 2 / (len(whole) * mp.fsum(value**2 for value in whole)),
        "prob_corr": correlation(p, q),
    }
    centre = mean(x)
    variance = mean([(value - centre) ** 2 for value in x])
    pairs_of = [(own[i][1] - own[i][0], own[i + 1][1] - own[i + 1][0]) for own in pairs for i in range(len(own) - 1)]
    found["autocorr_lag1"] = mean([(a - centre) * (b - centre) for a, b in pairs_of]) / variance
    found["inflation"] = mp.fsum((total - centre * len(own)) ** 2 for total, own in zip(sums, pairs, strict=True)) / (
        variance * size
    )
    ordered = sorted(abs(value) for value in x)
    for key, share in {"p50": "0.5", "p90": "0.9", "p99": "0.99", "p999": "0.999"}.items():
        found[f"abs_diff_{key}"] = ordered[max(int(mp.ceil(mp.mpf(share) * size)), 1) - 1]
    return found


def correlation(p: Sequence[mp.mpf], q: Sequence[mp.mpf]) -> mp.mpf:
    a, b = mean(p), mean(q)
    covariance = mp.fsum((x - a) * (y - b) for x, y in zip(p, q, strict=True))
    return covariance / mp.sqrt(mp.fsum((x - a) ** 2 for x in p) * mp.fsum((y - b) ** 2 for y in q))
