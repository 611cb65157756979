"""Measure how often the interval of the onset contains the true onset, in simulated runs.

    python benchmarks/onset.py [RUNS]

Writes the table "onset" of docs/methods/accuracy.md. With 100 runs per row, it takes a minute on one core.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from measure import replace_section  # noqa: E402

from tests.factories.growing_runs import SHAPES, simulate_run  # noqa: E402

PAGE = ROOT / "docs/methods/accuracy.md"
BEGIN, END = "<!-- onset: begin -->", "<!-- onset: end -->"
LENGTHS = ((50, 200), (200, 2000))


def table(count: int) -> Iterator[str]:
    """Yield the lines of the table."""
    heads = (
                "change", "steps per run", "runs", "growth found", "onset in the interval",
        "width of the interval in steps (median, 90th percentile)", "jump or ramp right", "bad steps found",
    )  # fmt: skip
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for shape, title in SHAPES.items():
        for lengths in LENGTHS:
            draw = np.random.default_rng(2026)
            every = [simulate_run(draw, shape, int(draw.integers(0, 4)) * (run % 2), lengths) for run in range(count)]
            found = [run for run in every if run.growth.verdict == "grew"]
            width = np.percentile([run.width for run in found], (50, 90))
            right = [(run.growth.shape == "jump") == (shape == "jump") for run in found]
            bad = [run.growth.bad_steps == run.bad_steps for run in found]
            shares = (np.mean(values) for values in ([run.covered for run in found], right, bad))
            covered, shapes, steps = (f"{100 * share:.1f}%" for share in shares)
            yield (
                f"| {title} | {lengths[0]}-{lengths[1]} | {count} | {len(found)} | {covered} | "
                f"{width[0]:.0f}, {width[1]:.0f} | {shapes} | {steps} |"
            )


def main() -> None:
    lines = table(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    replace_section("\n" + "\n".join(lines) + "\n", PAGE, BEGIN, END)


if __name__ == "__main__":
    main()
