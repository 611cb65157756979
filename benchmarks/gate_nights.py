"""How often ten nights against a history fail without a cause, and by when they find one: a table of docs/gate.md.

Usage: python benchmarks/gate_nights.py FOLDER [--stretches 100]
FOLDER is that of gate_calibration.py, whose `*_noise_both_bf16` are drawn from. A night is 16 prompts, either the same
ones with another half of their responses, or others; the first is the baseline, and what does not fail is accepted.
Runs that differ have the K3 of all their tokens times the exponential of a normal number of that spread.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gate_calibration import OUT, Run, percent, some, table

from mismatchctl.gate import LEVEL, Allowance
from mismatchctl.gate.comparison import compare
from mismatchctl.gate.nights import LEAST, change
from mismatchctl.measure.layers import CAPPED, TOKENS
from mismatchctl.resample import Layers, Sample, find_metric, holm

HORIZON = 10
CASES = {  # spread between runs, K3 from one night to the next, K3 from the fifth night on
    "nothing": (0.0, 1.0, 1.0),
    "nothing, runs differ by 5 %": (0.05, 1.0, 1.0),
    "nothing, runs differ by 10 %": (0.1, 1.0, 1.0),
    "2 % more every night": (0.0, 1.02, 1.0),
    "5 % more every night": (0.0, 1.05, 1.0),
    "25 % more from night 5 on": (0.0, 1.0, 1.25),
    "25 % more from night 5 on, runs differ by 5 %": (0.05, 1.0, 1.25),
    "50 % more from night 5 on": (0.0, 1.0, 1.5),
}


def as_sample(layers: Layers, keys: np.ndarray) -> Sample:
    sums = [layers.tokens.sum(1), layers.k3, *layers.tokens.T, *layers.capped.reshape(len(layers.k3), -1).T]
    return Sample(keys.astype(np.uint64) + 1, ("tokens", "k3", *TOKENS, *CAPPED), np.column_stack(sums))


def stretch(run: Run, random: np.random.Generator, same: bool, case: tuple[float, float, float]) -> Iterator[Sample]:
    """A baseline and ten nights."""
    spread, drift, step = case
    layers, ids = run.layers(), np.sort(random.permutation(run.count)[:16])
    for night in range(HORIZON + 1):
        factor = math.exp(spread * random.normal()) * drift**night * (step if night >= 5 else 1.0)
        half = run.halves(random) if same else None
        rows = ids if same else np.sort(random.permutation(run.count)[:16])
        yield as_sample(some(run.by_prompt(layers, half), rows).scaled(factor), rows)


def first_failure(nights: Iterator[Sample]) -> int:
    """The night on which a gate at tolerance 0 fails; one too many where none does."""
    metric, none, level, accepted = find_metric("k3"), Allowance(), LEVEL / HORIZON, [next(nights)]
    for number, tonight in enumerate(nights, 1):
        p = [compare(tonight, accepted[-1], metric, none, level=level / 2).p]
        if len(accepted) >= LEAST:
            found = change([*accepted, tonight], metric, none)
            p = [max(p[0], found.p_last), found.p]
        if min(holm(p)) <= level:
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
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--stretches", type=int, default=100)
    given = options.parse_args()
    runs = {name: Run.read(given.folder / f"{name.lower()}_noise_both_bf16") for name in ("dense", "MoE")}
    heads = ["what is so", *(f"{name}, {which} prompts" for name in runs for which in ("the same", "other"))]
    lines = "\n".join(table(heads, rows(runs, given.stretches)))
    before, _, rest = OUT.read_text(encoding="utf-8").partition("<!-- NIGHTS -->\n")
    _, _, after = rest.partition("<!-- /NIGHTS -->")
    OUT.write_text(f"{before}<!-- NIGHTS -->\n\n{lines}\n\n<!-- /NIGHTS -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
