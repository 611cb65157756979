"""Measure whether the gate detects the changes that it claims to detect.

    python benchmarks/gate_power.py FOLDER [--splits 120] [--estimates 12] [--models MODEL ...] [--plans]
                                    [--write docs/methods/gate.md]

FOLDER contains the dumps of second_numeric.py. Writes two tables:

- POWER: `detectable` is computed on healthy dumps, and its median factor is planted in three ways: `larger` multiplies
  the K3 of every token of other prompts, `scored` does the same with the same tokens scored by a second engine, and
  `mixed` takes a share of the responses from a third engine with an fp8 cache.
- PLAN: the number of prompts of `--plan` is computed on 32 prompts, and the requested rise is planted in dumps of that
  size. `--plans` writes this table only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gate_calibration import (
    Design,
    Run,
    format_percent,
    make_page_parser,
    publish_table,
    select_rows,
    to_cluster_sample,
)
from measure import table

from mismatchctl.api.gate.gate import BASELINE_MARGIN, DEFAULT_LEVEL
from mismatchctl.api.gate.power import detectable_factor, required_sample_size
from mismatchctl.api.gate.rules import DEFAULT_TOLERANCE
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric

ALLOWANCE = Allowance(relative=DEFAULT_TOLERANCE)
K3 = find_metric("k3")
DESIGNS = ((16, 16), (64, 64), (40, 8), (128, 16))
PAIRED_SIZES = (16,)
RISES = (0.5, 1.0)
LEVEL = DEFAULT_LEVEL / BASELINE_MARGIN
PILOT = 32


@dataclass
class Engines:
    """The same tokens, scored by three engines. The order of the first two engines is random for each prompt."""

    first: Run
    second: Run
    worse: Run

    @classmethod
    def read(cls, folder: Path) -> Engines:
        first, second, worse = (Run.read(folder, f"{name}_log_probs") for name in ("rollout", "second", "worse"))
        heads = np.random.default_rng(12).random(first.count)[first.prompts] < 0.5
        sides = [(np.where(heads, getattr(first, name), getattr(second, name)),
                  np.where(heads, getattr(second, name), getattr(first, name)))
                 for name in ("rollout", "log_ratio")]  # fmt: skip
        one, two = (replace(first, rollout=sides[0][at], log_ratio=sides[1][at]) for at in (0, 1))
        return cls(one, two, worse)

    def scale_k3(self, run: Run, factor: float) -> K3Layers:
        """Return the layers of one engine with the K3 of every token multiplied, by prompt.

        `factor` is relative to the first engine's K3 of the lower 80% of tokens, because the total K3 of two engines
        differs by chance: a few tokens have most of it.
        """
        most = np.quantile(compute_k3(self.first.log_ratio), 0.8)
        first, own = (np.minimum(compute_k3(each.log_ratio), most).sum() for each in (self.first, run))
        factor *= float(first / own)
        wanted, low, high = factor * compute_k3(run.log_ratio), np.abs(run.log_ratio), 10 * np.abs(run.log_ratio) + 1
        low, sign = low / 10, np.sign(run.log_ratio)
        for _ in range(60):
            middle = (low + high) / 2
            above = compute_k3(sign * middle) > wanted
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return run.by_prompt(run.layers(sign * low))

    def mix_responses(self, factor: float) -> K3Layers | None:
        """Replace responses by those of the worse engine so that K3 is `factor` times as large. None if impossible."""
        share = (factor - 1) / (compute_k3(self.worse.log_ratio).sum() / compute_k3(self.first.log_ratio).sum() - 1)
        if not 0 < share <= 1:
            return None
        chosen = np.random.default_rng(11).random(int(self.first.responses.max()) + 1) < share
        x = np.where(chosen[self.first.responses], self.worse.log_ratio, self.first.log_ratio)
        return self.first.by_prompt(self.first.layers(x))


def compute_k3(x: np.ndarray) -> np.ndarray:
    return np.maximum(np.expm1(x) - x, 0.0)


def select_clusters(sample: ClusterSample, rows: np.ndarray) -> ClusterSample:
    return ClusterSample(sample.keys[rows], sample.names, sample.sums[rows])


def failure_rate(design: Design, run: Run, new: K3Layers, old: K3Layers, splits: int) -> str:
    pairs = design.splits(run, splits, 7)
    return format_percent(
        float(
            np.mean(
                [
                    design.judge(select_rows(new, i), select_rows(old, j), DEFAULT_TOLERANCE)[0] <= DEFAULT_LEVEL
                    for i, j in pairs
                ]
            )
        )
    )


def format_factor(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "-"


def power_table(models: dict[str, Engines], splits: int, estimates: int) -> str:
    rows = []
    for name, engines in models.items():
        first, second = to_cluster_sample(engines.first), to_cluster_sample(engines.second)
        old = engines.first.by_prompt(engines.first.layers())
        designs = [Design(*sizes) for sizes in DESIGNS] + [Design(size, size, paired=True) for size in PAIRED_SIZES]
        for design in designs:
            names = []
            for i, j in design.splits(engines.first, estimates, 8):
                new = select_clusters(second if design.paired else first, i)
                factor = detectable_factor(new, select_clusters(first, j), K3, ALLOWANCE, LEVEL)
                names.append(np.inf if factor is None else factor)
            middle = float(np.median(names))
            title = f"the same {design.new}" if design.paired else f"{design.new} v {design.old}"
            cells = [
                name,
                title,
                f"{middle:.2f}",
                " to ".join(format_factor(np.quantile(names, at)) for at in (0.1, 0.9)),
            ]
            known = np.isfinite(middle)
            planted = [
                engines.scale_k3(engines.first, middle) if known and not design.paired else None,
                engines.scale_k3(engines.second, middle) if known else None,
                engines.mix_responses(middle) if known else None,
            ]
            cells += ["-" if new is None else failure_rate(design, engines.first, new, old, splits) for new in planted]
            rows.append(cells)
            print(cells, file=sys.stderr, flush=True)
    heads = (
        "model",
        "prompts",
        "detectable factor of K3 (median)",
        "range of 80% of the dumps",
        "larger: failed",
        "scored: failed",
        "mixed: failed",
    )
    return table(heads, rows)


def plan_table(models: dict[str, Engines], splits: int, estimates: int) -> str:
    rows = []
    for name, engines in models.items():
        first, second = to_cluster_sample(engines.first), to_cluster_sample(engines.second)
        old = engines.first.by_prompt(engines.first.layers())
        for paired in (False, True):
            for rise in RISES:
                answers = []
                for i, j in Design(PILOT, PILOT, paired=paired).splits(engines.first, estimates, 9):
                    new, base = (
                        (select_clusters(second, i), select_clusters(first, j))
                        if paired
                        else (select_clusters(first, i), None)
                    )
                    need = required_sample_size("run", K3, new, base, rise, ALLOWANCE, LEVEL)
                    answers.append(np.inf if need.clusters is None else need.clusters)
                middle = float(np.median(answers))
                cells = [name, f"{100 * rise:g}%", "scored again" if paired else "other prompts"]
                spread = " to ".join(f"{np.quantile(answers, at, method='nearest'):g}" for at in (0.1, 0.9))
                most = engines.first.count // (1 if paired else 2)
                size = int(np.ceil(middle)) if middle <= most else None
                cells += ["-" if size is None else str(size), spread]
                if size is None:
                    cells.append("-")
                else:
                    design = Design(size, size, paired=paired)
                    cells.append(
                        failure_rate(design, engines.first, engines.scale_k3(engines.second, 1 + rise), old, splits)
                    )
                rows.append(cells)
                print(cells, file=sys.stderr, flush=True)
    heads = ("model", "rise", "prompts", "computed number (median)", "range of 80% of the dumps", "failed when planted")
    return table(heads, rows)


def main() -> None:
    options = make_page_parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--splits", type=int, default=120)
    options.add_argument("--estimates", type=int, default=12)
    options.add_argument("--models", nargs="*")
    options.add_argument("--plans", action="store_true", help="write the table PLAN only")
    given = options.parse_args()
    names = given.models or sorted(path.parent.name for path in given.folder.glob("*/tokens.parquet"))
    models = {name: Engines.read(given.folder / name) for name in names}
    for name, lines in (("POWER", power_table), ("PLAN", plan_table))[given.plans :]:
        publish_table(name, lines(models, given.splits, given.estimates), given.write)


if __name__ == "__main__":
    main()
