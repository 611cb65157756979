"""Mismatch metrics computed from their definitions, in slow loops with decimals of 60 digits.

The oracle uses neither numpy nor mismatchctl. Log-probs are exact in decimals, so the results are the truth for
float64. A group is a list of sequences: mappings with lists `rollout`, `train` and `mask`, optionally `current`, and
`step`, `prompt_id`, `micro_batch`, `reward` and `advantages`. Corrections are in corrections.py.
"""

import math
from collections.abc import Callable, Sequence, Set
from decimal import Decimal

from tests.oracles.estimates import (
    EPSILON,
    ONE,
    ZERO,
    Formula,
    Sequence_,
    Sums,
    Truth,
    clamped,
    cluster_rows,
    deviation,
    effective_share,
    log_probs,
    mean,
    over,
    positions,
    scatter,
    total,
    truth,
)

Logs = Callable[[Sequence_], list[Decimal]]
"""Log ratios of a sequence."""


def log_ratios(sequence: Sequence_, upper: str, lower: str) -> list[Decimal]:
    return [a - b for a, b in zip(log_probs(sequence, upper), log_probs(sequence, lower), strict=True)]


def k3(x: Decimal) -> Decimal:
    return x.exp() - 1 - x


def sequence_sums(sequence: Sequence_, upper: str, lower: str) -> Sums:
    """Add a sequence to the totals of a policy pair (`upper` over `lower`)."""
    above, below = log_probs(sequence, upper), log_probs(sequence, lower)
    x = [a - b for a, b in zip(above, below, strict=True)]
    n = len(x)
    p, q = [a.exp() for a in above], [b.exp() for b in below]
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    ratios = [clamped(v).exp() for v in x]
    sums = Sums()
    sums.add("n", n)
    sums.add("x", *x)
    sums.add("xx", *(v * v for v in x))
    sums.add("|x|", *(abs(v) for v in x))
    sums.add("k3", *(k3(v) for v in x))
    sums.add_ratios("w", *ratios)
    for name, values in (("p", p), ("q", q), ("gap", gaps)):
        sums.add(name, *values)
        sums.add(name * 2, *(v * v for v in values))
    sums["#gap"] += total(p) + total(q)  # a difference rounds relative to its terms
    sums.add("pq", *(a * b for a, b in zip(p, q, strict=True)))
    sums["#pq"] = sums["#pp"] + sums["#qq"]  # code that uses (p - q)^2 rounds relative to these
    sums.add("equal", sum(v == 0 for v in x))
    sums.add("nn", n * n)
    sums.add("S", total(x))
    sums.add("SS", total(x) ** 2)
    sums.add("Sn", total(x) * n)
    places = positions(sequence)
    pairs = [(x[i], x[i + 1]) for i in range(n - 1) if places[i + 1] == places[i] + 1]
    sums.add("pairs", len(pairs))
    sums.add("first", *(a for a, _ in pairs))
    sums.add("second", *(b for _, b in pairs))
    sums.add("product", *(a * b for a, b in pairs))
    per_sequence = ("sequences", "upper_lp", "upper_ppl", "lower_lp", "lower_ppl", "ppl_ratio", "D", "|D|")
    for name in per_sequence:
        sums.add(name)
    sums.add_ratios("W", *([clamped(total(x)).exp()] if n else []))
    if n:
        surprise_up, surprise_low, drift = -total(above) / n, -total(below) / n, -total(x) / n
        values = (ONE, surprise_up, surprise_up.exp(), surprise_low, surprise_low.exp(), drift.exp(), drift, abs(drift))
        for name, value in zip(per_sequence, values, strict=True):
            sums.add(name, value)
    return sums


def correlation(t: dict[str, Decimal]) -> Decimal:
    n = t["n"]
    covariance = n * t["pq"] - t["p"] * t["q"]
    return over(covariance / n, (scatter(t["pp"], t["p"], n) * scatter(t["qq"], t["q"], n)).sqrt())


def centre(t: dict[str, Decimal]) -> Decimal:
    return over(t["x"], t["n"])


def variation(t: dict[str, Decimal]) -> Decimal:
    return scatter(t["xx"], t["x"], t["n"])


def autocorrelation(t: dict[str, Decimal]) -> Decimal:
    m = centre(t)
    products = t["product"] - m * (t["first"] + t["second"]) + t["pairs"] * m * m
    return over(over(products, t["pairs"]), variation(t) / t["n"])


def inflation(t: dict[str, Decimal]) -> Decimal:
    m = centre(t)
    return over(t["SS"] - 2 * m * t["Sn"] + m * m * t["nn"], variation(t))


FORMULAS: dict[str, Formula] = {
    "k1": lambda t: over(-t["x"], t["n"]),
    "k2": lambda t: over(t["xx"], 2 * t["n"]),
    "k3": mean("k3", "n"),
    "abs_diff_mean": mean("|x|", "n"),
    "train_log_ppl": mean("upper_lp", "sequences"),
    "train_ppl": mean("upper_ppl", "sequences"),
    "rollout_log_ppl": mean("lower_lp", "sequences"),
    "rollout_ppl": mean("lower_ppl", "sequences"),
    "ppl_ratio": mean("ppl_ratio", "sequences"),
    "log_ppl_diff": mean("D", "sequences"),
    "log_ppl_abs_diff": mean("|D|", "sequences"),
    "prob_diff_mean": mean("gap", "n"),
    "prob_diff_std": deviation("gap", "gapgap", "n"),
    "prob_corr": correlation,
    "ratio_mean": mean("w", "n"),
    "chi2_token": lambda t: over(t["ww"], t["n"]) - 1,
    "chi2_sequence": lambda t: over(t["WW"], t["sequences"]) - 1,
    "ess_token": effective_share("w", "ww", "n"),
    "ess_sequence": effective_share("W", "WW", "sequences"),
    "autocorr_lag1": autocorrelation,
    "inflation": inflation,
    "bitwise_share": mean("equal", "n"),
}
COUNTS = ("tokens", "sequences", "empty_sequences", "prompts")
QUANTILES = {"abs_diff_p50": 0.5, "abs_diff_p90": 0.9, "abs_diff_p99": 0.99, "abs_diff_p999": 0.999}


def mismatch(sequences: Sequence[Sequence_], upper: str = "train", lower: str = "rollout") -> dict[str, Truth]:
    sums = [sequence_sums(sequence, upper, lower) for sequence in sequences]
    rows = cluster_rows(sequences, sums)
    found = {key: truth(formula, rows) for key, formula in FORMULAS.items()}
    x = [log_ratios(sequence, upper, lower) for sequence in sequences]
    tokens = [v for own in x for v in own]
    filled = [own for own in x if own]
    gaps = [
        abs(a.exp() - b.exp())
        for sequence in sequences
        for a, b in zip(log_probs(sequence, upper), log_probs(sequence, lower), strict=True)
    ]
    drifts = [-total(own) / len(own) for own in filled]
    found |= {
        "tokens": Truth(Decimal(len(tokens))),
        "sequences": Truth(Decimal(len(filled))),
        "empty_sequences": Truth(Decimal(len(x) - len(filled))),
        "prompts": Truth(Decimal(len(rows)) if rows else None),
        "abs_diff_max": extreme(max, [abs(v) for v in tokens]),
        "log_ppl_diff_min": extreme(min, drifts),
        "log_ppl_diff_max": extreme(max, drifts),
        "prob_diff_max": Truth(max(gaps, default=None), slack=lambda: EPSILON),
        "bitwise_all": Truth(Decimal(all(v == 0 for v in tokens)) if tokens else None),
        "ratio_mean_z": z_score(found["ratio_mean"]),
        "k3_worst_share": worst_share(tokens),
    }
    found |= {key: quantile(share, [abs(v) for v in tokens]) for key, share in QUANTILES.items()}
    for level, logs in (("token", tokens), ("sequence", [total(own) for own in filled])):
        found |= {f"khat_{level}{end}": value for end, value in khat(logs).items()}
    return found


def rewards(sequences: Sequence[Sequence_]) -> dict[str, Truth]:
    sums = []
    for sequence in sequences:
        own, reward, length = Sums(), sequence.get("reward"), len(log_ratios(sequence, "train", "rollout"))
        known = reward is not None and length > 0
        own.add("n", length)
        own.add("rewarded", int(known))
        own.add("reward", *([Decimal(reward)] if known else []))
        sums.append(own)
    return {"reward_mean": truth(mean("reward", "rewarded"), cluster_rows(sequences, sums))}


def split(sequences: Sequence[Sequence_], whole: Logs, a: Logs, b: Logs) -> dict[str, Truth]:
    """For w = a + b per token, return the shares of a and b in w^2, their correlation, and K3(w) - K3(a) - K3(b)."""
    sums = []
    for sequence in sequences:
        own = Sums()
        w, x, y = whole(sequence), a(sequence), b(sequence)
        own.add("n", len(w))
        for name, left, right in (("ww", w, w), ("xw", x, w), ("yw", y, w), ("xx", x, x), ("yy", y, y), ("xy", x, y)):
            own.add(name, *(p * q for p, q in zip(left, right, strict=True)))
        for name in ("xw", "yw", "xy"):
            own["#" + name] = own["ww"] + own["xx"] + own["yy"]  # code that uses squares rounds relative to the squares
        for name, values in (("w", w), ("x", x), ("y", y)):
            own.add(name, *values)
            own.add(f"k3 {name}", *(k3(v) for v in values))
        sums.append(own)
    rows = cluster_rows(sequences, sums)
    formulas: list[Formula] = [
        lambda t: over(t["xw"], t["ww"]),
        lambda t: over(t["yw"], t["ww"]),
        lambda t: over(
            t["n"] * t["xy"] - t["x"] * t["y"],
            t["n"] * (scatter(t["xx"], t["x"], t["n"]) * scatter(t["yy"], t["y"], t["n"])).sqrt(),
        ),
        lambda t: over(t["k3 w"] - t["k3 x"] - t["k3 y"], t["n"]),
    ]
    return dict(zip(("a", "b", "correlation", "together"), (truth(formula, rows) for formula in formulas), strict=True))


def splits(sequences: Sequence[Sequence_], has: Set[str]) -> dict[str, Truth]:
    """Split current / rollout and train / rollout into two ratios each, if the dump has the log-probs."""

    def logs(upper: str, lower: str) -> Logs:
        return lambda sequence: log_ratios(sequence, upper, lower)

    found = {}
    if "current" in has:
        known = [sequence for sequence in sequences if "current" in sequence]
        own = split(known, logs("current", "rollout"), logs("train", "rollout"), logs("current", "train"))
        names = ("total_share_mismatch", "total_share_drift", "total_correlation", "total_k3_together")
        found |= dict(zip(names, own.values(), strict=True))
    if "reference" in has:
        known = [sequence for sequence in sequences if "reference" in sequence]
        own = split(known, logs("train", "rollout"), logs("reference", "rollout"), logs("train", "reference"))
        found |= {"share_rollout": own["a"], "share_train": own["b"]}
        errors = split(known, logs("train", "train"), logs("rollout", "reference"), logs("train", "reference"))
        found |= {"sides_correlation": errors["correlation"]}
    return found


TAUS = ("1.05", "1.1", "1.2", "1.5", "2", "3", "5", "10")
NEAR = Decimal("0.999"), Decimal("1.002")


def spread(sequences: Sequence[Sequence_]) -> dict[str, Truth]:
    """Return shares of tokens by the distance of the ratio from 1, the shift of logits, and trust-region bounds."""
    every = [log_ratios(sequence, "train", "rollout") for sequence in sequences]
    sums = []
    for sequence, x in zip(sequences, every, strict=True):
        own, ratios = Sums(), [v.exp() for v in x]
        own.add("n", len(x))
        own.add("s", bool(x))
        own.add("near", sum(NEAR[0] <= w <= NEAR[1] for w in ratios))
        own.add("mean near", bool(x) and NEAR[0] <= (total(x) / len(x)).exp() <= NEAR[1])
        for tau in TAUS:
            own.add(tau, sum(max(w, 1 / w) > Decimal(tau) for w in ratios))
        own.add("x", *x)
        own.add("1 - p", *(1 - v.exp() for v in log_probs(sequence, "rollout")))
        own["#1 - p"] = Decimal(
            len(x)
        )  # code that subtracts probabilities from the number of tokens rounds relative to these
        sums.append(own)
    rows = cluster_rows(sequences, sums)
    formulas: dict[str, Formula] = {f"beyond_{tau.replace('.', '_')}": mean(tau, "n") for tau in TAUS}
    formulas |= {"parity_tokens": mean("near", "n"), "parity_sequences": mean("mean near", "s")}
    formulas["logit_shift"] = mean("x", "1 - p")
    found = {key: truth(formula, rows) for key, formula in formulas.items()}
    sizes = [k3(v) for x in every for v in x]
    largest, lengths = max(sizes, default=None), [Decimal(len(x)) for x in every if x]
    if largest is None:
        return found | {key: Truth(None) for key in ("k3_max", "bound_classical", "bound_marginal", "bound_mixed")}
    number, whole = len(lengths), total(sizes) / len(lengths)
    return found | {
        "k3_max": Truth(largest),
        "bound_classical": Truth(largest * total(n * (n - 1) for n in lengths) / number),
        "bound_marginal": Truth(largest * total(n * n.sqrt() for n in lengths) / number * 4 / 3),
        "bound_mixed": Truth(total(lengths) / number * (largest * whole).sqrt() * 2),
    }


def extreme(which: type[max] | type[min], values: list[Decimal]) -> Truth:  # type: ignore[valid-type]
    return Truth(which(values) if values else None)


def z_score(ratio: Truth) -> Truth:
    """Return (ratio_mean - 1) divided by its standard error, with their rounding errors."""
    if ratio.value is None or ratio.estimate is None or not ratio.se:
        return Truth(None)
    value, estimate, se = (ratio.value - 1) / ratio.se, ratio.estimate, ratio.se

    def slack() -> Decimal:
        left = se - estimate.se_slack()
        return (estimate.value_slack() + abs(value) * estimate.se_slack()) / left if left > 0 else Decimal("Infinity")

    return Truth(value, slack=slack)


def quantile(share: float, values: list[Decimal]) -> Truth:
    if not values:
        return Truth(None)
    rank = math.ceil(Decimal(str(share)) * len(values))
    return Truth(sorted(values)[max(rank, 1) - 1], accuracy=0.01)


def worst_share(x: list[Decimal]) -> Truth:
    """Return the share of K3 in the worst 0.1% of tokens. The last token counts by its fraction.

    The accuracy is that of bins of x with a relative width of 1/64. K3 differs within a bin by (65/64)^2
    near zero, and by exp(x/64) far from it.
    """
    values = [k3(v) for v in x]
    if not total(values):
        return Truth(None)
    quota, held = Decimal(len(values)) / 1000, ZERO
    for value in sorted(values, reverse=True):
        held += value * min(quota, ONE)
        quota = max(quota - 1, ZERO)
    return Truth(held / total(values), accuracy=float((max(*x, ZERO) / 64).exp()) * (65 / 64) ** 2 - 1)


def khat(logs: list[Decimal]) -> dict[str, Truth]:
    """Fit Pareto k-hat to the tail of exp(logs), above the largest ratio outside of the tail."""
    size = len(logs)
    tail = min(math.ceil(min(0.2 * size, 3 * math.sqrt(size))), 4096)
    limit = Truth(min(1 - 1 / Decimal(size).log10(), Decimal("0.7")) if size > 1 else None)
    ordered = sorted(logs, reverse=True)
    above = [] if size <= tail else [v - ordered[tail] for v in reversed(ordered[:tail]) if v > ordered[tail]]
    excess = [v.exp() - 1 for v in above]
    fitted = Truth(pareto_shape([float(v / excess[-1]) for v in excess]) if len(excess) >= 5 else None, accuracy=1e-6)
    return {"": fitted, "_limit": limit, "_tail": Truth(Decimal(tail))}


def pareto_shape(excess: list[float]) -> Decimal:
    """Return the shape by Zhang and Stephens (2009) with the prior of Vehtari et al. (2024). `excess` is sorted."""
    n = len(excess)
    grid = 30 + int(math.sqrt(n))
    quarter = excess[int(n / 4 + 0.5) - 1]
    candidates = [1 / excess[-1] + (1 - math.sqrt(grid / (j - 0.5))) / (3 * quarter) for j in range(1, grid + 1)]
    shapes = [math.fsum(math.log1p(-b * v) for v in excess) / n for b in candidates]
    likelihoods = [n * (math.log(-b / k) - k - 1) for b, k in zip(candidates, shapes, strict=True)]
    weights = [1 / math.fsum(math.exp(min(other - own, 700)) for other in likelihoods) for own in likelihoods]
    kept = [(b, w) for b, w in zip(candidates, weights, strict=True) if w >= 10 * 2.0**-52]
    best = math.fsum(b * w for b, w in kept) / math.fsum(w for _, w in kept)
    shape = math.fsum(math.log1p(-best * v) for v in excess) / n
    return Decimal((n * shape + 5) / (n + 10))
