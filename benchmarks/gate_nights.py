"""Measure how often ten nights against a history fail without a cause, and how soon they find one.

Usage: python benchmarks/gate_nights.py FOLDER [--stretches 100]
FOLDER is that of gate_calibration.py, whose `*_noise_both_bf16` are drawn from. A night is 16 prompts, either the same
ones with another half of their responses, or others; the first is the baseline, and what does not fail is accepted.
Runs that differ have the K3 of all their tokens times the exponential of a normal number of that spread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gate_calibration import Run, options_of, percent, planted, show, some
from measure import table

from mismatchctl.api.gate.judgement import BASELINE_MARGIN, DEFAULT_LEVEL
from mismatchctl.api.gate.trend import MIN_NIGHTS, detect_change
from mismatchctl.core.bins import LAYER_K3, LAYER_TOKENS
from mismatchctl.stats.comparison import Allowance, compare_samples
from mismatchctl.stats.resampling import adjust_holm
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric

HORIZON, ONSET = 10, 5
CASES = {  # spread of K3 between runs, factor of the log ratio from night to night, what is planted from the onset on
    "no rise": (0.0, 1.0, "no rise"),
    "no rise, runs differ by 5%": (0.05, 1.0, "no rise"),
    "log ratio 1% more in each run": (0.0, 1.01, "no rise"),
    "from run 5 on: log ratio x 1.1": (0.0, 1.0, "log ratio x 1.1"),
}


def as_sample(layers: K3Layers, keys: np.ndarray) -> ClusterSample:
    sums = [layers.tokens.sum(1), layers.k3, *layers.tokens.T, *layers.capped.reshape(len(layers.k3), -1).T]
    return ClusterSample(keys.astype(np.uint64) + 1, ("tokens", "k3", *LAYER_TOKENS, *LAYER_K3), np.column_stack(sums))


def stretch(
    run: Run, random: np.random.Generator, same: bool, case: tuple[float, float, str]
) -> Iterator[ClusterSample]:
    """A baseline and ten nights; what is planted is planted in tokens."""
    spread, drift, what = case
    worse, ids = planted(run, random)[what], np.sort(random.permutation(run.count)[:16])
    plain = run.layers(), run.layers(worse)
    for night in range(HORIZON + 1):
        x = (worse if night >= ONSET else run.log_ratio) * drift**night
        layers = plain[night >= ONSET] if drift == 1.0 else run.layers(x)
        half = run.halves(random) if same else None
        rows = ids if same else np.sort(random.permutation(run.count)[:16])
        yield as_sample(some(run.by_prompt(layers, half), rows).scale(math.exp(spread * random.normal())), rows)


def first_failure(nights: Iterator[ClusterSample]) -> int:
    """The night on which a gate at tolerance 0 fails; one too many where none does."""
    metric, none, level, accepted = find_metric("k3"), Allowance(), DEFAULT_LEVEL / HORIZON, [next(nights)]
    for number, tonight in enumerate(nights, 1):
        p = [BASELINE_MARGIN * compare_samples(tonight, accepted[-1], metric, none, level=level / 2).p]
        if len(accepted) >= MIN_NIGHTS:
            found = detect_change([*accepted, tonight], metric, none)
            p = [max(p[0], found.p_last), found.p]
        if min(adjust_holm(p)) <= level:
            return number
        accepted.append(tonight)
    return HORIZON + 1


def rows(runs: dict[str, Run], stretches: int) -> Iterator[tuple[str, ...]]:
    for name, case in CASES.items():
        cells = []
        for run in runs.values():
            for same in (True, False):
                random = np.random.default_rng(len(name))
                when = np.array([first_failure(stretch(run, random, same, case)) for _ in range(stretches)])
                shares = [percent(float(np.mean(when <= night))) for night in (7, HORIZON)]
                cells.append(" / ".join(shares))
        print(name, cells, file=sys.stderr, flush=True)
        yield (name, *cells)


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--stretches", type=int, default=100)
    given = options.parse_args()
    runs = {name: Run.read(given.folder / f"{name.lower()}_noise_both_bf16") for name in ("dense", "MoE")}
    heads = ["planted", *(f"{name}, {which} prompts" for name in runs for which in ("the same", "other"))]
    show("NIGHTS", table(heads, rows(runs, given.stretches)), given.write)


if __name__ == "__main__":
    main()
