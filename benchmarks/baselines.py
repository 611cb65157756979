"""Measure `analyze` and `sweep` relative to torch code on padded tensors that computes the same outputs.

    python benchmarks/baselines.py --write benchmarks/results.md

One correction truncates token weights and rejects sequences by their geometric mean ratio. Fifty corrections are a
grid of both thresholds. Each case runs in a fresh process on one thread, the cases are interleaved, and imports are not
counted. The script first checks that all cases give the same numbers. Writes the section "Compared with padded torch".
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from measure import COLUMNS, make_dump, make_parser, measure_rounds, publish, report_cost, table

Outputs = list[dict[str, float]]
"""Outputs of the mismatch, followed by one row per correction."""

TRUNCATIONS, BANDS = np.geomspace(1.05, 4, 10).tolist(), np.geomspace(1.0003, 1.01, 5).tolist()
ONE, FIFTY = [(2.0, 1.001)], [(truncate, band) for truncate in TRUNCATIONS for band in BANDS]
BATCH = 512
"""Number of sequences per padded tensor, as in a mini-batch."""
BUCKETED_CELLS = 1 << 20
"""Number of cells per tensor, including padding, if sequences are sorted by length."""
MISMATCH = ("k1", "k3", "chi2_token", "ess_token", "abs_diff_mean", "abs_diff_max", "log_ppl_diff", "log_ppl_abs_diff")
CORRECTION = ("rejected_tokens", "rejected_sequences", "weight_mean", "weight_bounded_high", "ess_token", "k3_kept")
TOLERANCE = 1e-4
"""Largest relative difference that counts as equal. The tensors are float32."""

PADDED, BUCKETED, OURS = "padded torch", "torch, bucketed by length", "mismatchctl"
CASES = {
    1: {PADDED: "padded", BUCKETED: "bucketed", OURS: "analyze"},
    50: {PADDED: "padded", BUCKETED: "bucketed", OURS: "sweep"},
}


def read_lists(folder: Path) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """Yield both columns of each file as lists of sequences."""
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, columns=list(COLUMNS))
        rollout, train = (table[name].combine_chunks() for name in COLUMNS)
        bounds = rollout.offsets.to_numpy()[1:-1]
        yield tuple(np.split(values.values.to_numpy(), bounds) for values in (rollout, train))


def padded_batches(folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the rollout, the trainer and the mask [B, T] in the order of the file."""
    for rollout, train in read_lists(folder):
        for start in range(0, len(rollout), BATCH):
            yield pad(rollout[start : start + BATCH], train[start : start + BATCH])


def bucketed_batches(folder: Path) -> Iterator[tuple[Any, Any, Any]]:
    """Yield batches of sequences with similar lengths."""
    for rollout, train in read_lists(folder):
        order = sorted(range(len(rollout)), key=lambda row: len(rollout[row]))
        while order:
            count = max(1, BUCKETED_CELLS // len(rollout[order[-1]]))
            chosen, order = order[-count:], order[:-count]
            yield pad([rollout[row] for row in chosen], [train[row] for row in chosen])


def pad(rollout: list[np.ndarray], train: list[np.ndarray]) -> tuple[Any, Any, Any]:
    """Return right-padded tensors and their mask."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    lengths = torch.tensor([len(row) for row in rollout])
    sides = [pad_sequence([torch.tensor(row) for row in side], batch_first=True) for side in (rollout, train)]
    return sides[0], sides[1], torch.arange(sides[0].shape[1])[None, :] < lengths[:, None]


class Totals:
    """Sums and maxima for one row of outputs."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}

    def add(self, **values: Any) -> None:
        """Add scalar tensors, or keep the largest if the name ends in `max`."""
        for name, value in values.items():
            number = float(value)
            earlier = self.sums.get(name)
            if name.endswith("max"):
                self.sums[name] = number if earlier is None else max(earlier, number)
            else:
                self.sums[name] = number if earlier is None else earlier + number


def compute_with_torch(batches: Iterator[tuple[Any, Any, Any]], corrections: list[tuple[float, float]]) -> Outputs:
    """Compute the outputs from masked sums over padded tensors."""
    import torch

    torch.set_num_threads(1)
    double = torch.float64
    mismatch, corrected = Totals(), [Totals() for _ in corrections]
    for rollout, train, mask in batches:
        x = (train - rollout) * mask
        lengths = mask.sum(dim=1)
        excess = torch.expm1(torch.clamp(x, -20, 20)) * mask
        k3 = torch.expm1(x.double()) - x
        mean = x.sum(dim=1, dtype=double) / lengths
        mismatch.add(
            tokens=mask.sum(), sequences=len(mask), x=x.sum(dtype=double), k3=k3.sum(dtype=double),
            excess=excess.sum(dtype=double), squared=(excess * excess).sum(dtype=double),
            size=x.abs().sum(dtype=double), size_max=x.abs().max(), mean=mean.sum(), mean_size=mean.abs().sum(),
        )  # fmt: skip
        for totals, (truncate, band) in zip(corrected, corrections, strict=True):
            weight = torch.clamp(excess, max=truncate - 1)
            keep = mean.abs() <= math.log(band)
            kept = mask & keep[:, None]
            applied = (1 + weight) * kept
            totals.add(
                kept=kept.sum(), kept_sequences=keep.sum(), weight=(weight * mask).sum(dtype=double),
                high=((excess + 1 > truncate) & mask).sum(), applied=applied.sum(dtype=double),
                squared=(applied * applied).sum(dtype=double), k3=(k3 * kept).sum(dtype=double),
            )  # fmt: skip
    return evaluate_sums(mismatch.sums, [totals.sums for totals in corrected])


def evaluate_sums(m: dict[str, float], corrected: list[dict[str, float]]) -> Outputs:
    """Return the outputs, computed from sums."""
    n = m["tokens"]
    first = {
        "k1": -m["x"] / n, "k3": m["k3"] / n, "chi2_token": (2 * m["excess"] + m["squared"]) / n,
        "ess_token": (1 + m["excess"] / n) ** 2 / (1 + (2 * m["excess"] + m["squared"]) / n),
        "abs_diff_mean": m["size"] / n, "abs_diff_max": m["size_max"],
        "log_ppl_diff": -m["mean"] / m["sequences"], "log_ppl_abs_diff": m["mean_size"] / m["sequences"],
    }  # fmt: skip
    rows = [
        {
            "rejected_tokens": 1 - c["kept"] / n, "rejected_sequences": 1 - c["kept_sequences"] / m["sequences"],
            "weight_mean": 1 + c["weight"] / n, "weight_bounded_high": c["high"] / n,
            "ess_token": c["applied"] ** 2 / (n * c["squared"]), "k3_kept": c["k3"] / c["kept"],
        }
        for c in corrected
    ]  # fmt: skip
    return [first, *rows]


def compute_with_mismatchctl(folder: Path, corrections: list[tuple[float, float]], swept: bool) -> Outputs:
    """Compute the outputs with `analyze`, or those of the corrections with `sweep` if `swept`."""
    from mismatchctl.api.analyze.analyze import analyze
    from mismatchctl.corrections.presets import parse_correction

    def rules(truncate: float, band: float) -> Any:
        gate = {"level": "geometric", "keep": [1 / band, band]}
        made = {"name": f"{truncate} {band}", "weight": {"truncate": truncate}, "gates": [gate]}
        return parse_correction(made)

    chosen = [rules(*pair) for pair in corrections]
    result = analyze([str(folder)], [] if swept else chosen, findings=False, threads=1)
    run = next(iter(result.runs.values()))
    first = {key: run.overall.metrics[key].value for key in MISMATCH}
    if not swept:
        values_of = [run.overall.corrections[correction.name] for correction in chosen]
        return [first, *({key: values[key].value for key in CORRECTION} for values in values_of)]
    from mismatchctl.api.sweep.study import Study, ThresholdAxis
    from mismatchctl.api.sweep.sweep import sweep

    axes = (
        ThresholdAxis("weight.truncate", tuple(TRUNCATIONS)),
        ThresholdAxis("gates.0.keep", tuple(BANDS)),
    )
    rows = sweep([str(folder)], [Study(chosen[0], axes)], threads=1).overall.to_dicts()
    return [first, *({key: row[key] for key in CORRECTION} for row in rows)]


def run_case(case: str, number: int, folder: Path) -> None:
    """Run one case in this process and print its cost."""
    import torch

    torch.set_num_threads(1)
    if case in ("analyze", "sweep"):
        warm_up()
    with report_cost():
        compute_outputs(case, number, folder)


def warm_up() -> None:
    """Import all modules and load the compiled loops, which the comparison does not count."""
    from analyze import load_loops

    load_loops()
    with tempfile.TemporaryDirectory() as place:
        make_dump(Path(place), 400_000, 400)
        compute_with_mismatchctl(Path(place), ONE, False)
        compute_with_mismatchctl(Path(place), FIFTY, True)


def check_agreement(found: dict[str, Outputs]) -> None:
    """Raise an error if the cases do not give the same numbers."""
    names, rows = list(found), list(found.values())
    for name, outputs in zip(names[1:], rows[1:], strict=True):
        assert len(outputs) == len(rows[0])
        for mine, other in zip(outputs, rows[0], strict=True):
            for key, value in mine.items():
                if not math.isclose(value, other[key], rel_tol=TOLERANCE, abs_tol=1e-9):
                    sys.exit(f"{key}: {name} {value}, {names[0]} {other[key]}")


def compute_outputs(case: str, number: int, folder: Path) -> Outputs:
    """Compute the outputs of a case in this process."""
    corrections = ONE if number == 1 else FIFTY
    if case in ("padded", "bucketed"):
        return compute_with_torch((padded_batches if case == "padded" else bucketed_batches)(folder), corrections)
    return compute_with_mismatchctl(folder, corrections, case == "sweep")


def comparison_table(folder: Path, tokens: int, number: int, repeat: int) -> str:
    """Return the Markdown table of the cases with this number of corrections."""
    given = ("--number", number, "--folder", folder)
    rounds = measure_rounds(
        __file__, {title: ("--case", case, *given) for title, case in CASES[number].items()}, repeat
    )
    heads = (
        "case", "seconds, median [least, most]", "relative to mismatchctl", "processor / clock", "peak memory, MB",
    )  # fmt: skip
    rows = []
    for title in CASES[number]:
        busy = statistics.median(found[title].processor / found[title].wall for found in rounds.costs)
        ratio, memory = rounds.median("wall", title, OURS), rounds.median("memory", title)
        rows.append((title, rounds.spread("wall", title), f"{ratio:.1f}", f"{busy:.2f}", f"{memory:,.0f}"))
    about = f"### {number} correction{'s' * (number > 1)}, {tokens / 1e6:g} M tokens, {repeat} rounds"
    return f"{about}\n\n{table(heads, rows)}"


def main() -> None:
    parser = make_parser(__doc__, 20e6, 5)
    parser.add_argument("--number", type=int, default=1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        run_case(given.case, given.number, given.folder)
        return
    tokens, sections = int(given.tokens), []
    with tempfile.TemporaryDirectory() as place:
        small, folder = Path(place) / "small", Path(place) / "dump"
        small.mkdir()
        folder.mkdir()
        make_dump(small, 2_000_000, 2500)
        for number, cases in CASES.items():
            check_agreement({title: compute_outputs(case, number, small) for title, case in cases.items()})
        make_dump(folder, tokens, 2500)
        for number in CASES:
            sections.append(comparison_table(folder, tokens, number, given.repeat))
            print(sections[-1], flush=True)
    publish("\n".join([HEAD.format(load=os.getloadavg()[0]), *sections]), given.write)


HEAD = f"""## Compared with padded torch

`benchmarks/baselines.py` on {os.cpu_count()} cores (load {{load:.1f}}), one thread each: fresh processes,
interleaved, medians and ratios within a round, imports not counted. The padded code computes {len(MISMATCH)}
numbers of the mismatch and {len(CORRECTION)} of each correction on tensors of {BATCH} sequences. Both sides
agree to {TOLERANCE:g}. `analyze` also computes everything else in its report except findings. Bucketed:
sequences are sorted by length first. Fifty corrections are a grid of {len(TRUNCATIONS)} truncations and
{len(BANDS)} rejections.
"""


if __name__ == "__main__":
    main()
