"""Measure how often 95% intervals contain the true value.

    python benchmarks/intervals.py HELD_OUT FOLDER ... [--draws 200] [--write docs/methods/gate.md]

HELD_OUT contains the runs of the held-out models of gate_calibration.py, and each FOLDER contains other runs. A run is
a Parquet file or a folder of Parquet files with the columns rollout_log_probs and train_log_probs, and with prompt_id
if prompts have several responses. The prompts of a run are the population. Each draw samples prompts with replacement,
and the true value is the value of the whole run. Writes the tables MISSED (held-out runs) and INTERVALS (all runs).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gate_calibration import Run, format_percent, make_page_parser, publish_table, to_cluster_sample
from measure import table

from mismatchctl.core.bins import magnitude_edges
from mismatchctl.measure.metrics.metric import Quantile, compute_intervals, compute_quantiles
from mismatchctl.stats.samples import ClusterSample, find_metric

SIZES = (16, 64)
SHARES = (0.5, 0.9, 0.99, 0.999)
METRICS = ("k3", "abs_diff_mean", "ratio_mean", "ess_token", "chi2_token", "ess_sequence", "chi2_sequence")
MAX_SILENT_MISSES = 0.08
"""Largest acceptable share of misses without a warning: 5% and 3 points."""
_STEP = 1e-4


def draw_intervals(whole: ClusterSample, key: str, size: int, draws: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the intervals [draws, 2], their stated coverage or NaN [draws], and the true value."""
    metric = find_metric(key)
    columns = metric.columns(whole)
    sums = whole.sums[:, columns]
    rows = sums[np.random.default_rng(size).integers(len(sums), size=(draws, size))]
    totals, step = rows.sum(axis=1), _STEP / size
    value = metric.evaluate(totals, whole, columns)
    up, down = (
        metric.evaluate(totals[:, None] + sign * step * (size * rows - totals[:, None]), whole, columns)
        for sign in (1, -1)
    )
    influence = (up - down) / (2 * step * size)
    squares = (influence**2).sum(axis=1)
    effective = squares**2 / (influence**4).sum(axis=1)
    se = np.sqrt(squares * size / (size - 1))
    truth = float(metric.evaluate(sums.sum(axis=0), whole, columns))
    return *compute_intervals(metric.metric.scale, value, se, effective, np.full(draws, float(size))), truth


def quantile_coverage(run: Run, size: int, draws: int) -> Iterator[tuple[float, tuple[float, float, float, float]]]:
    """Yield by share how often the interval of a quantile contains the true quantile, and how often it warns."""
    sizes = np.maximum(np.abs(run.log_ratio), 2.0**-40)
    filled, place = np.unique(np.searchsorted(magnitude_edges(), sizes, side="right") - 1, return_inverse=True)
    counts = np.zeros((run.count, len(filled)), np.int64)
    np.add.at(counts, (run.prompts, place), 1)

    def read(rows: np.ndarray) -> list[Quantile]:
        histogram = SimpleNamespace(by_bucket=lambda: (filled, counts[rows].astype(np.float64)))
        return compute_quantiles(SimpleNamespace(histogram=histogram), SHARES, float(sizes.max()))

    truth, random = read(np.arange(run.count)), np.random.default_rng(size)
    found = [read(random.integers(run.count, size=size)) for _ in range(draws)]
    for share, true, *each in zip(SHARES, truth, *found, strict=True):
        contained = np.array([one.interval[0] <= true.value <= one.interval[1] for one in each])
        heavy = np.isfinite([one.covers for one in each])
        yield share, (contained.mean(), heavy.mean(), np.mean(~contained & ~heavy), np.sum(contained & heavy))


def read_runs(folders: list[Path]) -> Iterator[Run]:
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_dir() or path.suffix == ".parquet":
                run = Run.read(path)
                if np.isfinite(run.log_ratio).all() and (run.log_ratio != 0).any() and run.count >= min(SIZES):
                    yield run


def mean_coverage(whole: ClusterSample, key: str, size: int, draws: int) -> tuple[float, float, float, float]:
    """Return the shares of covered intervals, warnings and misses without one, and the count of covered with one."""
    with np.errstate(all="ignore"):
        ends, covers, truth = draw_intervals(replace(whole), key, size, draws)
    contained, heavy = (ends[:, 0] <= truth) & (truth <= ends[:, 1]), np.isfinite(covers)
    silent = float(np.mean(~contained & ~heavy))
    return float(contained.mean()), float(heavy.mean()), silent, float(np.sum(contained & heavy))


def missed_rows(folder: Path, draws: int) -> Iterator[tuple[str, ...]]:
    """Yield the mean share of misses without a warning, and the share of the worst run, by metric and size."""
    samples = [to_cluster_sample(run) for run in read_runs([folder])]
    for key in METRICS:
        shares = [[mean_coverage(whole, key, size, draws)[2] for whole in samples] for size in SIZES]
        yield (key, *(f"{format_percent(float(np.mean(each)))} ({format_percent(max(each))})" for each in shares))


def table_rows(folders: list[Path], draws: int) -> Iterator[tuple[str, ...]]:
    found: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {}
    for number, run in enumerate(read_runs(folders)):
        whole = to_cluster_sample(run)
        for size in SIZES if number % 4 == 0 else ():  # slow
            for share, cells in quantile_coverage(run, size, draws // 4):
                found.setdefault((f"percentile {100 * share:g}", size), []).append(cells)
        for key in METRICS:
            for size in SIZES:
                found.setdefault((key, size), []).append(mean_coverage(whole, key, size, draws))
    for (key, size), each in found.items():
        contained, heavy, silent, covered_heavy = np.array(each).T
        covered = covered_heavy.sum() / max(heavy.sum() * (draws // 4 if key.startswith("percentile") else draws), 1)
        bad = f"{np.count_nonzero(silent > MAX_SILENT_MISSES)} of {len(each)}"
        cells = (
            format_percent(contained.mean()),
            format_percent(heavy.mean()),
            format_percent(covered) if heavy.any() else "-",
            format_percent(silent.mean()),
            bad,
        )
        print(key, size, cells, file=sys.stderr, flush=True)
        yield (key, str(size), *cells)


def main() -> None:
    options = make_page_parser(__doc__)
    options.add_argument("folders", type=Path, nargs="+")
    options.add_argument("--draws", type=int, default=200)
    given = options.parse_args()
    heads = (
        "metric", "prompts", "covered", "with `heavy_tail`", "covered if `heavy_tail`", "missed without `heavy_tail`",
        "runs with more than 8% missed",
    )  # fmt: skip
    missed = ("metric", *(f"missed without `heavy_tail`, {size} prompts" for size in SIZES))
    publish_table("MISSED", table(missed, missed_rows(given.folders[0], given.draws)), given.write)
    publish_table("INTERVALS", table(heads, table_rows(given.folders, given.draws)), given.write)


if __name__ == "__main__":
    main()
