"""Measure how often the gate fails ten nightly runs with a history, without a change and with a planted change.

    python benchmarks/gate_nights.py FOLDER [--stretches 100] [--write docs/methods/gate.md]

FOLDER contains the runs dense_noise_both_bf16 and moe_noise_both_bf16 in the layout of gate_calibration.py. The
baseline and each night are 16 prompts, either the same prompts with another half of the responses, or other prompts.
A night that does not fail is accepted into the history. If the runs differ, the K3 of a night is multiplied by a
log-normal factor. Writes the table NIGHTS.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gate_calibration import Run, format_percent, make_page_parser, plant_changes, publish_table, select_rows
from measure import table

from mismatchctl.api.gate.judgement import BASELINE_MARGIN, DEFAULT_LEVEL
from mismatchctl.api.gate.trend import MIN_NIGHTS, detect_change
from mismatchctl.core.bins import LAYER_K3, LAYER_TOKENS
from mismatchctl.stats.comparison import Allowance, compare_samples
from mismatchctl.stats.resampling import adjust_holm
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric

HORIZON, ONSET = 10, 5
CASES = {  # spread of K3 between runs, factor of the log ratio from night to night, change from the onset on
    "no rise": (0.0, 1.0, "no rise"),
    "no rise, runs differ by 5%": (0.05, 1.0, "no rise"),
    "log ratio 1% more in each run": (0.0, 1.01, "no rise"),
    "from run 5 on: log ratio x 1.1": (0.0, 1.0, "log ratio x 1.1"),
}


def to_sample(layers: K3Layers, keys: np.ndarray) -> ClusterSample:
    sums = [layers.tokens.sum(1), layers.k3, *layers.tokens.T, *layers.capped.reshape(len(layers.k3), -1).T]
    return ClusterSample(keys.astype(np.uint64) + 1, ("tokens", "k3", *LAYER_TOKENS, *LAYER_K3), np.column_stack(sums))


def simulate_nights(
    run: Run, random: np.random.Generator, same: bool, case: tuple[float, float, str]
) -> Iterator[ClusterSample]:
    """Yield a baseline and ten nights. The change is planted in the tokens."""
    spread, drift, change = case
    worse, ids = plant_changes(run, random)[change], np.sort(random.permutation(run.count)[:16])
    layers_of = run.layers(), run.layers(worse)
    for night in range(HORIZON + 1):
        x = (worse if night >= ONSET else run.log_ratio) * drift**night
        layers = layers_of[night >= ONSET] if drift == 1.0 else run.layers(x)
        half = run.halves(random) if same else None
        rows = ids if same else np.sort(random.permutation(run.count)[:16])
        yield to_sample(select_rows(run.by_prompt(layers, half), rows).scale(math.exp(spread * random.normal())), rows)


def first_failure(nights: Iterator[ClusterSample]) -> int:
    """Return the first night on which the gate fails at allowance 0, or HORIZON + 1 if no night fails."""
    metric, allowance, level, accepted = find_metric("k3"), Allowance(), DEFAULT_LEVEL / HORIZON, [next(nights)]
    for number, tonight in enumerate(nights, 1):
        p = [BASELINE_MARGIN * compare_samples(tonight, accepted[-1], metric, allowance, level=level / 2).p]
        if len(accepted) >= MIN_NIGHTS:
            found = detect_change([*accepted, tonight], metric, allowance)
            p = [max(p[0], found.p_last), found.p]
        if min(adjust_holm(p)) <= level:
            return number
        accepted.append(tonight)
    return HORIZON + 1


def table_rows(runs: dict[str, Run], stretches: int) -> Iterator[tuple[str, ...]]:
    for name, case in CASES.items():
        cells = []
        for run in runs.values():
            for same in (True, False):
                random = np.random.default_rng(len(name))
                when = np.array([first_failure(simulate_nights(run, random, same, case)) for _ in range(stretches)])
                shares = [format_percent(float(np.mean(when <= night))) for night in (7, HORIZON)]
                cells.append(" / ".join(shares))
        print(name, cells, file=sys.stderr, flush=True)
        yield (name, *cells)


def main() -> None:
    options = make_page_parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--stretches", type=int, default=100)
    given = options.parse_args()
    runs = {name: Run.read(given.folder / f"{name.lower()}_noise_both_bf16") for name in ("dense", "MoE")}
    heads = ["planted", *(f"{name}, {which} prompts" for name in runs for which in ("the same", "other"))]
    publish_table("NIGHTS", table(heads, table_rows(runs, given.stretches)), given.write)


if __name__ == "__main__":
    main()
