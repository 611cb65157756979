"""Make Results with given cluster tables."""

from collections.abc import Sequence

import numpy as np

from mismatchctl.results.model import Clusters, Result, Value
from tests.factories.results import make_result

COLUMNS = ["tokens", "sequences", "squared_length", "k3", "policy_log_ppl"]


def table(
    k3: Sequence[float], tokens: Sequence[float] | None = None, hashes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> Clusters:  # fmt: skip
    """Return one row per cluster: sums of K3 and tokens, one sequence each."""
    counts = [100.0] * len(k3) if tokens is None else list(tokens)
    names = range(len(k3)) if hashes is None else hashes
    return Clusters(
        by="prompt",
        columns=COLUMNS,
        hashes=[f"{name:016x}" for name in names],
        groups=[0] * len(k3) if groups is None else list(groups),
        sums=[[n, 1.0, n * n, value, 1.0] for n, value in zip(counts, k3, strict=True)],
    )


def result(clusters: Clusters, *, name: str = "run", steps: Sequence[int] = (0,)) -> Result:
    made = make_result(runs=(name,), steps=tuple(steps), corrections=(), by=())
    made.runs[name].clusters, made.provenance.left_out = clusters, []
    k3, tokens = (sum(sums[COLUMNS.index(key)] for sums in clusters.sums) for key in ("k3", "tokens"))
    whole, of_steps = made.runs[name].overall.metrics, made.runs[name].groups.metrics["tokens"]
    of_steps.value = [tokens, *[0.0] * (len(of_steps.value) - 1)]
    whole["tokens"] = Value(value=tokens)
    whole["k3"] = Value(value=k3 / tokens if tokens else None, se=whole["k3"].se)
    whole["train_log_ppl"] = Value(value=1.0)  # each cluster has one sequence
    return made


def noisy(count: int, level: float, seed: int, *, first: int = 0, groups: int = 1) -> Clusters:
    """Return clusters with a log-normal K3 of mean `level` and hashes from `first` on."""
    k3 = level * 100 * np.random.default_rng(seed).lognormal(-0.125, 0.5, count)
    return table(k3.tolist(), hashes=range(first, first + count), groups=[i % groups for i in range(count)])
