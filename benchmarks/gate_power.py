"""Measure whether the gate detects the changes that it claims to detect: two tables of docs/methods/gate.md.

Usage: python benchmarks/gate_power.py FOLDER [--splits 120] [--said 12] [--models MODEL ...] [--plans]
                                       [--write docs/methods/gate.md]
FOLDER is what second_numeric.py wrote. What `detectable` names is asked of
dumps in which nothing rose, and its median is planted in tokens in three ways, none of which it is computed by:

- larger: the K3 of every token, of other prompts;
- scored: the same of the tokens as a second engine scored them;
- mixed: a share of the responses as a third engine scored them, which keeps its cache in fp8, the others as the first.

What `--plan` answers is asked of 32 prompts, and the rise that it was asked for planted in dumps of the size it names.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gate_calibration import Design, Run, options_of, percent, sample_of, show, some
from measure import table

from mismatchctl.api.gate.judgement import BASELINE_MARGIN, DEFAULT_LEVEL
from mismatchctl.api.gate.power import detectable_factor, required_sample_size
from mismatchctl.api.gate.rules import DEFAULT_TOLERANCE
from mismatchctl.stats.comparison import Allowance
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric

ROOM = Allowance(relative=DEFAULT_TOLERANCE)
K3 = find_metric("k3")
DESIGNS = ((16, 16), (64, 64), (40, 8), (128, 16))
SAME = (16,)
RISES = (0.5, 1.0)
LEVEL = DEFAULT_LEVEL / BASELINE_MARGIN
PILOT = 32


@dataclass
class Engines:
    """The same tokens as three engines scored them; a coin a prompt says which of the first two is called first."""

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

    def larger(self, run: Run, factor: float) -> K3Layers:
        """One engine's, the K3 of every token so many times as large, and of most tokens so many times the first's.

        The total K3 of two engines differs by chance: a few tokens hold most of it.
        """
        most = np.quantile(k3_of(self.first.log_ratio), 0.8)
        first, own = (np.minimum(k3_of(each.log_ratio), most).sum() for each in (self.first, run))
        factor *= float(first / own)
        wanted, low, high = factor * k3_of(run.log_ratio), np.abs(run.log_ratio), 10 * np.abs(run.log_ratio) + 1
        low, sign = low / 10, np.sign(run.log_ratio)
        for _ in range(60):
            middle = (low + high) / 2
            above = k3_of(sign * middle) > wanted
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        return run.by_prompt(run.layers(sign * low))

    def mixed(self, factor: float) -> K3Layers | None:
        """With so many responses of the worse engine that K3 is so many times the first's; None if all are too few."""
        share = (factor - 1) / (k3_of(self.worse.log_ratio).sum() / k3_of(self.first.log_ratio).sum() - 1)
        if not 0 < share <= 1:
            return None
        chosen = np.random.default_rng(11).random(int(self.first.responses.max()) + 1) < share
        x = np.where(chosen[self.first.responses], self.worse.log_ratio, self.first.log_ratio)
        return self.first.by_prompt(self.first.layers(x))


def k3_of(x: np.ndarray) -> np.ndarray:
    return np.maximum(np.expm1(x) - x, 0.0)


def rows_of(sample: ClusterSample, rows: np.ndarray) -> ClusterSample:
    return ClusterSample(sample.keys[rows], sample.names, sample.sums[rows])


def found(design: Design, run: Run, new: K3Layers, old: K3Layers, splits: int) -> str:
    pairs = design.splits(run, splits, 7)
    return percent(
        float(
            np.mean([design.judge(some(new, i), some(old, j), DEFAULT_TOLERANCE)[0] <= DEFAULT_LEVEL for i, j in pairs])
        )
    )


def two_digits(value: float) -> str:
    return f"{value:.2f}" if np.isfinite(value) else "-"


def powers(models: dict[str, Engines], splits: int, said: int) -> str:
    rows = []
    for name, engines in models.items():
        first, second = sample_of(engines.first), sample_of(engines.second)
        old = engines.first.by_prompt(engines.first.layers())
        designs = [Design(*sizes) for sizes in DESIGNS] + [Design(size, size, paired=True) for size in SAME]
        for design in designs:
            names = []
            for i, j in design.splits(engines.first, said, 8):
                new = rows_of(second if design.paired else first, i)
                factor = detectable_factor(new, rows_of(first, j), K3, ROOM, LEVEL)
                names.append(np.inf if factor is None else factor)
            middle = float(np.median(names))
            words = f"the same {design.new}" if design.paired else f"{design.new} v {design.old}"
            cells = [name, words, f"{middle:.2f}", " to ".join(two_digits(np.quantile(names, at)) for at in (0.1, 0.9))]
            known = np.isfinite(middle)
            planted = [
                engines.larger(engines.first, middle) if known and not design.paired else None,
                engines.larger(engines.second, middle) if known else None,
                engines.mixed(middle) if known else None,
            ]
            cells += ["-" if new is None else found(design, engines.first, new, old, splits) for new in planted]
            rows.append(cells)
            print(cells, file=sys.stderr, flush=True)
    heads = (
        "model",
        "prompts",
        "stated factor of K3 (median)",
        "range of 80% of the dumps",
        "larger: failed",
        "scored",
        "mixed",
    )
    return table(heads, rows)


def plans(models: dict[str, Engines], splits: int, said: int) -> str:
    rows = []
    for name, engines in models.items():
        first, second = sample_of(engines.first), sample_of(engines.second)
        old = engines.first.by_prompt(engines.first.layers())
        for paired in (False, True):
            for rise in RISES:
                answers = []
                for i, j in Design(PILOT, PILOT, paired=paired).splits(engines.first, said, 9):
                    new, base = (rows_of(second, i), rows_of(first, j)) if paired else (rows_of(first, i), None)
                    need = required_sample_size("run", K3, new, base, rise, ROOM, LEVEL)
                    answers.append(np.inf if need.clusters is None else need.clusters)
                middle = float(np.median(answers))
                cells = [name, f"{100 * rise:g} %", "scored again" if paired else "other prompts"]
                spread = " to ".join(f"{np.quantile(answers, at, method='nearest'):g}" for at in (0.1, 0.9))
                most = engines.first.count // (1 if paired else 2)
                size = int(np.ceil(middle)) if middle <= most else None
                cells += ["-" if size is None else str(size), spread]
                if size is None:
                    cells.append("-")
                else:
                    design = Design(size, size, paired=paired)
                    cells.append(found(design, engines.first, engines.larger(engines.second, 1 + rise), old, splits))
                rows.append(cells)
                print(cells, file=sys.stderr, flush=True)
    heads = ("model", "rise", "prompts", "computed number (median)", "range of 80% of the dumps", "failed when planted")
    return table(heads, rows)


def main() -> None:
    options = options_of(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--splits", type=int, default=120)
    options.add_argument("--said", type=int, default=12)
    options.add_argument("--models", nargs="*")
    options.add_argument("--plans", action="store_true", help="only what --plan answers")
    given = options.parse_args()
    names = given.models or sorted(path.parent.name for path in given.folder.glob("*/tokens.parquet"))
    models = {name: Engines.read(given.folder / name) for name in names}
    for mark, lines in (("POWER", powers), ("PLAN", plans))[given.plans :]:
        show(mark, lines(models, given.splits, given.said), given.write)


if __name__ == "__main__":
    main()
