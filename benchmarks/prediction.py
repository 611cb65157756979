"""How far predictions hold on real dumps: `python benchmarks/prediction.py FOLDER... [--write docs/prediction.md]`.

Each folder is a run. Nothing here is fitted to them: samples are split, one part predicts the other.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mismatchctl.correction import Gate
from mismatchctl.predict import Sample, batch_rejection, sample_of
from mismatchctl.predict.length import QUANTILES, rejected_at
from mismatchctl.predict.sample import GRID

SPLITS = 10
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
STATISTICS = {
    "geometric": lambda sample: sample.sums[:, -1, 0] / sample.tokens,
    "sequence": lambda sample: sample.sums[:, -1, 0],
    "min": lambda sample: sample.lowest[:, -1],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    samples = dict(read(given.folders))
    sections = {"coverage": coverage(samples), "steps": by_step(samples), "lengths": lengths(samples)}
    for name, text in sections.items():
        print(f"{name}\n{text}")
    if given.write is not None:
        document = given.write.read_text(encoding="utf-8")
        for name, text in sections.items():
            marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
            pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
            document = re.sub(pattern, lambda _, m=marks, t=text: f"{m[0]}\n{t}\n{m[1]}", document, flags=re.S)
        given.write.write_text(document, encoding="utf-8")


def read(folders: Iterable[str]) -> Iterator[tuple[str, Sample]]:
    for folder in folders:
        sample = sample_of([folder], [])
        yield Path(folder).name, sample.of_run(str(sample.run[0]))


def part(sample: Sample, which: NDArray[np.bool_]) -> Sample:
    names = ("run", "step", "cluster", "tokens", "kept", "sums", "lowest", "highest")
    return replace(sample, **{name: getattr(sample, name)[which] for name in names})


def rejecting(sample: Sample, shares: Iterable[float]) -> tuple[Sample, list[str]]:
    """The sample as lower bounds would leave it that reject about these shares of sequences, by each statistic."""
    kept, names = [], []
    for name, statistic in STATISTICS.items():
        values = statistic(sample)
        if np.ptp(values) == 0:
            continue
        for share in shares:
            kept.append(np.where(values >= np.quantile(values, share), sample.tokens, 0))
            names.append(name)
    table = np.array(kept, float).reshape(len(kept), len(sample)).T
    return replace(sample, kept=table), names


def is_covered(shown: Sample, hidden: Sample, correction: int, unit: str) -> tuple[bool, float, bool]:
    """Whether the interval holds what the hidden part shows, its width, and whether steps were said to differ."""
    predicted = batch_rejection(shown, correction, len(hidden), unit)  # type: ignore[arg-type]
    kept = hidden.kept[:, correction]
    observed = float((kept == 0).mean()) if unit == "sequences" else 1 - kept.sum() / hidden.tokens.sum()
    assert predicted.interval is not None
    low, high = predicted.interval
    return low - 1e-9 <= observed <= high + 1e-9, high - low, predicted.status.startswith("not stationary")


def by_prompt(sample: Sample, share: float, number: int) -> tuple[Sample, Sample]:
    clusters = np.unique(sample.cluster)
    chosen = np.random.default_rng(number).permutation(len(clusters)) < share * len(clusters)
    shown = chosen[np.searchsorted(clusters, sample.cluster)]
    return part(sample, shown), part(sample, ~shown)


def coverage(samples: dict[str, Sample]) -> str:
    rows = [
        "| rejected | of | shown | cases | covered by the 90 % interval | mean width |",
        "|---|---|---|---|---|---|",
    ]
    cases = [
        (SHARES, "sequences", 0.5),
        (SHARES, "tokens", 0.5),
        (SHARES, "sequences", 0.25),
        ((0.02,), "sequences", 0.5),
    ]
    for shares, unit, shown in cases:
        hits, widths = [], []
        for sample in samples.values():
            tried, names = rejecting(sample, shares)
            for split in range(SPLITS):
                halves = by_prompt(tried, shown, split)
                for correction in range(len(names)):
                    hit, width, _ = is_covered(*halves, correction, unit)
                    hits.append(hit)
                    widths.append(width)
        said = "2 %" if len(shares) == 1 else "5 to 95 %"
        figures = f"{len(hits):,} | {np.mean(hits):.1%} | {np.mean(widths):.1%}"
        rows.append(f"| {said} | {unit} | {shown:.0%} of prompts | {figures} |")
    return "\n".join(rows)


def by_step(samples: dict[str, Sample]) -> str:
    rows = ["| run | steps | covered | said to be not stationary |", "|---|---|---|---|"]
    for name, sample in samples.items():
        tried, names = rejecting(sample, SHARES)
        steps = np.unique(sample.step)
        hits, flags = [], []
        for split in range(SPLITS if names else 0):
            chosen = np.random.default_rng(split).permutation(len(steps)) < len(steps) / 2
            shown = chosen[np.searchsorted(steps, sample.step)]
            for correction in range(len(names)):
                hit, _, differ = is_covered(part(tried, shown), part(tried, ~shown), correction, "sequences")
                hits.append(hit)
                flags.append(differ)
        if hits:
            rows.append(f"| {name} | {len(steps)} | {np.mean(hits):.0%} | {np.mean(flags):.0%} |")
    return "\n".join(rows)


def lengths(samples: dict[str, Sample]) -> str:
    """Mean absolute error of rejection in points beyond binomial noise, from first tokens to 2, 3 and 4 times them."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, sample in samples.items():
        for gate, start, octave in length_cases(sample):
            shown, long = sample.first(start), sample.first(octave)
            reached = STATISTICS[gate.level](long)
            for share in QUANTILES:
                bound = float(np.quantile(reached, share, method="inverted_cdf"))
                tried = gate.model_copy(update={"keep": (math.exp(bound), None)})
                observed = float((reached < bound).mean())
                weights = np.ones((1, len(shown)))
                predicted = float(rejected_at(shown, [tried], int(GRID[octave]), weights)[0])
                noise = math.sqrt(2 / math.pi * observed * (1 - observed) / len(long))
                errors[name][gate.level].append(abs(predicted - observed))
                errors[name]["noise"].append(noise)
    rows = ["| run | geometric | sequence | min | binomial noise |", "|---|---|---|---|---|"]
    columns = (*STATISTICS, "noise")
    for name, found in errors.items():
        rows.append(f"| {name} | " + " | ".join(f"{100 * np.mean(found[key]):.1f}" for key in columns) + " |")
    means = {key: np.mean([error for found in errors.values() for error in found[key]]) for key in columns}
    rows.append("| all | " + " | ".join(f"{100 * means[key]:.1f}" for key in columns) + " |")
    beyond = " | ".join(f"{100 * (means[key] - means['noise']):.1f}" for key in STATISTICS)
    rows.append(f"| all, beyond the noise | {beyond} | |")
    return "\n".join(rows)


def length_cases(sample: Sample) -> Iterator[tuple[Gate, int, int]]:
    for level, statistic in STATISTICS.items():
        if np.ptp(statistic(sample)) == 0:
            continue
        for start in range(1, len(GRID) - 2):
            for octave in (start + 1, start + 2):
                if (sample.tokens >= GRID[octave]).sum() >= 24:
                    yield Gate.model_validate({"level": level, "keep": [1e-9, None]}), start, octave


if __name__ == "__main__":
    main()
