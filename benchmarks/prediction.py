"""Measure the error of predictions.

    python benchmarks/prediction.py FOLDER... --unseen FOLDER... --write docs/methods/prediction.md

Each FOLDER is a run. Its samples are split, and one part predicts the other. The constants of predictions at another
length were chosen on the first folders, and the folders of `--unseen` are held out. Planted biases and changes over
steps are simulated. Writes all tables of docs/methods/prediction.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from measure import replace_section
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).parent.parent)]

from mismatchctl.api.predict import (  # noqa: E402
    CHECK_QUANTILES,
    LENGTH_GRID,
    Prediction,
    SequenceSample,
    predict_at_length,
    predict_at_step,
    predict_batch_rejection,
    rejection_at_length,
)
from mismatchctl.corrections.model import Correction, Gate  # noqa: E402
from tests.factories.sequence_samples import read_sample  # noqa: E402

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
    parser.add_argument("--unseen", nargs="*", default=[])
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    samples = dict(read_samples(given.folders))
    unseen = dict(read_samples(given.unseen))
    sections = {
        "coverage": coverage_table(samples),
        "steps": step_table(samples),
        "length coverage": length_coverage_table({"chosen on": samples, "unseen": unseen}),
        "planted": planted_table(),
        "lengths": length_error_table(samples),
        "later": later_table(),
    }
    for name, text in sections.items():
        replace_section(text, given.write, f"<!-- {name} -->", f"<!-- end of {name} -->")


def read_samples(folders: Iterable[str]) -> Iterator[tuple[str, SequenceSample]]:
    for folder in folders:
        sample = read_sample([folder], [])
        yield Path(folder).name, sample.of_run(str(sample.run[0]))


def select_rows(sample: SequenceSample, which: NDArray[np.bool_]) -> SequenceSample:
    names = ("run", "step", "cluster", "tokens", "kept", "sums", "lowest", "highest")
    return replace(sample, **{name: getattr(sample, name)[which] for name in names})


def reject_shares(sample: SequenceSample, shares: Iterable[float]) -> tuple[SequenceSample, list[str]]:
    """Apply lower bounds that reject about the given shares of sequences, for each statistic."""
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


def is_covered(shown: SequenceSample, hidden: SequenceSample, correction: int, unit: str) -> tuple[bool, float, bool]:
    """Return whether the interval contains the hidden part's value, its width, and whether steps differ."""
    predicted = predict_batch_rejection(shown, correction, len(hidden), unit)  # type: ignore[arg-type]
    kept = hidden.kept[:, correction]
    observed = float((kept == 0).mean()) if unit == "sequences" else 1 - kept.sum() / hidden.tokens.sum()
    assert predicted.interval is not None
    low, high = predicted.interval
    return low - 1e-9 <= observed <= high + 1e-9, high - low, predicted.status.startswith("not stationary")


def split_by_prompt(sample: SequenceSample, share: float, number: int) -> tuple[SequenceSample, SequenceSample]:
    clusters = np.unique(sample.cluster)
    chosen = np.random.default_rng(number).permutation(len(clusters)) < share * len(clusters)
    shown = chosen[np.searchsorted(clusters, sample.cluster)]
    return select_rows(sample, shown), select_rows(sample, ~shown)


def coverage_table(samples: dict[str, SequenceSample]) -> str:
    rows = [
        "| rejected share | unit | used to predict | cases | covered by the 95% interval | mean width |",
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
            tried, names = reject_shares(sample, shares)
            for split in range(SPLITS):
                halves = split_by_prompt(tried, shown, split)
                for correction in range(len(names)):
                    hit, width, _ = is_covered(*halves, correction, unit)
                    hits.append(hit)
                    widths.append(width)
        title = "2%" if len(shares) == 1 else "5 to 95%"
        figures = f"{len(hits):,} | {np.mean(hits):.1%} | {np.mean(widths):.1%}"
        rows.append(f"| {title} | {unit} | {shown:.0%} of prompts | {figures} |")
    return "\n".join(rows)


def step_table(samples: dict[str, SequenceSample]) -> str:
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples.values():
        tried, names = reject_shares(sample, SHARES)
        steps = np.unique(sample.step)
        hits, flags = [], []
        for split in range(SPLITS if names else 0):
            chosen = np.random.default_rng(split).permutation(len(steps)) < len(steps) / 2
            shown = chosen[np.searchsorted(steps, sample.step)]
            for correction in range(len(names)):
                hit, _, differ = is_covered(
                    select_rows(tried, shown), select_rows(tried, ~shown), correction, "sequences"
                )
                hits.append(hit)
                flags.append(differ)
        if hits:
            found[len(steps)].append((float(np.mean(hits)), float(np.mean(flags))))
    rows = [
        "| steps of a run | runs | covered, median run | covered, worst run | called not stationary, median run |",
        "|---|---|---|---|---|",
    ]
    for count, runs in sorted(found.items()):
        covered, flagged = zip(*runs, strict=True)
        rows.append(
            f"| {count} | {len(runs)} | {np.median(covered):.0%} | {min(covered):.0%} | {np.median(flagged):.0%} |"
        )
    return "\n".join(rows)


def cut_responses(sample: SequenceSample, octave: int) -> SequenceSample:
    """Return the sample of a dump whose responses are cut to LENGTH_GRID[octave] tokens."""
    cut = slice(octave + 1)
    return replace(
        sample, tokens=np.minimum(sample.tokens, LENGTH_GRID[octave]), sums=sample.sums[:, cut],
        lowest=sample.lowest[:, cut], highest=sample.highest[:, cut],
    )  # fmt: skip


def length_coverage_table(sets: dict[str, dict[str, SequenceSample]]) -> str:
    """Return how well responses cut to their first tokens predict responses that are 2 and 4 times as long."""
    rows = ["| runs | gate | length | cases | refused | covered by the 95% interval | mean width |", "|" + "---|" * 7]
    for title, samples in sets.items():
        found: dict[tuple[str, int], list[tuple[bool, float] | None]] = defaultdict(list)
        for sample in samples.values():
            for gate, start, octave in length_cases(sample):
                if start >= 2:
                    found[gate.level, 1 << (octave - start)] += predict_lengths(sample, gate, start, octave)
        for (level, factor), tries in sorted(found.items()):
            results = [each for each in tries if each is not None]
            figures = f"{np.mean([hit for hit, _ in results]):.0%} | {np.mean([width for _, width in results]):.0%}"
            rows.append(
                f"| {title} | {level} | {factor} times | {len(tries)} | {len(tries) - len(results)} | {figures} |"
            )
    return "\n".join(rows)


def predict_lengths(sample: SequenceSample, gate: Gate, start: int, octave: int) -> list[tuple[bool, float] | None]:
    """Return whether the interval contains the value of long responses, and its width, or None if refused."""
    shown, statistic = cut_responses(sample, start), STATISTICS[gate.level](sample.truncate(octave))
    tries: list[tuple[bool, float] | None] = []
    for share in CHECK_QUANTILES:
        bound = float(np.quantile(statistic, share, method="inverted_cdf"))
        tried = Correction(gates=(gate.model_copy(update={"keep": (math.exp(bound), None)}),))
        tries.append(
            check_interval(
                predict_at_length(shown, tried, int(LENGTH_GRID[octave]))[0], float((statistic < bound).mean())
            )
        )
    return tries


def check_interval(predicted: Prediction, truth: float) -> tuple[bool, float] | None:
    if predicted.interval is None:
        return None
    low, high = predicted.interval
    return low - 1e-9 <= truth <= high + 1e-9, high - low


PLANTED = {
    "no bias": lambda random, count: np.zeros(count),
    "bias with a normal distribution": lambda random, count: random.normal(0, 0.002, count),
    "bias with a heavy-tailed distribution": lambda random, count: 0.001 * random.standard_t(3, count),
    "bias that is always negative": lambda random, count: -np.abs(random.normal(0, 0.002, count)),
    "bias of one response in five": lambda random, count: np.where(random.random(count) < 0.2, -0.004, 0.0),
}
"""Biases of sequences in nats per token. The noise per token is 0.02."""


def planted_table() -> str:
    """Predict from 512 responses of 256 tokens to 4,096 tokens of the same sequences, with planted biases."""
    rows = ["| planted bias | cases | covered by the 95% interval | mean width | mean error |", "|" + "---|" * 5]
    for title, biases in PLANTED.items():
        results, errors = [], []
        for seed in range(5):
            random = np.random.default_rng(seed)
            bias = biases(random, 512)
            shown = make_sample(random.normal(-0.0002, 0.02, (512, 256)) + bias[:, None])
            long_sums = shown.sums[:, -1, 0] + random.normal(-0.0002 * 3840, 0.02 * math.sqrt(3840), 512) + 3840 * bias
            for bound in (1.0005, 1.001, 1.002, 1.004):
                tried = Correction(gates=(Gate(level="geometric", keep=(1 / bound, bound)),))
                truth = float((np.abs(long_sums / 4096) > math.log(bound)).mean())
                predicted = predict_at_length(shown, tried, 4096)[0]
                results.append(check_interval(predicted, truth) or (False, 1.0))
                errors.append(abs((predicted.value or 0.0) - truth))
        hits, widths = zip(*results, strict=True)
        rows.append(
            f"| {title} | {len(results)} | {np.mean(hits):.0%} | {np.mean(widths):.0%} | {100 * np.mean(errors):.1f} |"
        )
    return "\n".join(rows)


SHAPES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "no change": np.zeros_like,
    "a straight line through all steps": lambda place: 1.5 * place,
    "a straight line that starts after three fifths of the steps": lambda place: 4 * np.maximum(place - 0.6, 0),
    "a jump in the middle": lambda place: 1.5 * (place >= 0.5),
    "a rise that ends before the last step": lambda place: 4.5 * np.clip(place - 0.3, 0, 0.33),
}
"""Logarithm of a metric by place in the dump, 0 to 1, and after it. Steps scatter around it with sd 0.2."""


def later_table() -> str:
    """Predict a metric a tenth and half of the steps after the last, with and without correlated steps."""
    rows = [
        "| simulated change | worst coverage a tenth later | worst coverage half later | called no trend |",
        "|---|---|---|---|",
    ]
    random = np.random.default_rng(11)
    for title, shape in SHAPES.items():
        covered, flat = [], []
        for count in (12, 30, 200):
            for correlation in (0.0, 0.5):
                hits, none = defaultdict(list), []
                for _ in range(200):
                    noise = random.normal(0, 0.2, count + count // 2)
                    for place in range(1, len(noise)):
                        noise[place] = correlation * noise[place - 1] + math.sqrt(1 - correlation**2) * noise[place]
                    values = 1e-4 * np.exp(shape(np.arange(len(noise)) / (count - 1)) + noise)
                    for ahead in (count // 10, count // 2):
                        found = predict_at_step("rejected_tokens", list(range(count)), values[:count].tolist(), ahead)
                        assert found.interval is not None
                        low, high = found.interval
                        hits[ahead].append(low <= values[count - 1 + ahead] <= high)
                    none.append(found.status == "no trend")
                covered.append([np.mean(hits[ahead]) for ahead in (count // 10, count // 2)])
                flat.append(np.mean(none))
        soon, late = np.min(covered, axis=0)
        ends = dict.fromkeys((f"{min(flat):.0%}", f"{max(flat):.0%}"))
        rows.append(f"| {title} | {soon:.0%} | {late:.0%} | {' to '.join(ends)} |")
    return "\n".join(rows)


def make_sample(log_ratio: NDArray[np.float64]) -> SequenceSample:
    """Return the sample of a dump with the given log ratios [S, T], four responses per prompt, in one step."""
    count, tokens = log_ratio.shape
    ends = np.minimum(LENGTH_GRID, tokens) - 1
    each = (log_ratio, np.expm1(log_ratio) - log_ratio, np.expm1(log_ratio))
    return SequenceSample(
        np.full(count, "planted", object), np.zeros(count, np.uint64), (np.arange(count) // 4).astype(np.uint64),
        np.full(count, tokens), np.zeros((count, 0)),
        np.stack([values.cumsum(axis=1)[:, ends] for values in each], axis=2),
        np.minimum.accumulate(log_ratio, axis=1)[:, ends], np.maximum.accumulate(log_ratio, axis=1)[:, ends],
    )  # fmt: skip


def length_error_table(samples: dict[str, SequenceSample]) -> str:
    """Return the mean absolute error of predicted rejection at 2 and 4 times the length, in percentage points."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, sample in samples.items():
        for gate, start, octave in length_cases(sample):
            shown, long = sample.truncate(start), sample.truncate(octave)
            statistic = STATISTICS[gate.level](long)
            for share in CHECK_QUANTILES:
                bound = float(np.quantile(statistic, share, method="inverted_cdf"))
                tried = gate.model_copy(update={"keep": (math.exp(bound), None)})
                observed = float((statistic < bound).mean())
                weights = np.ones((1, len(shown)))
                predicted = float(rejection_at_length(shown, [tried], int(LENGTH_GRID[octave]), weights)[0])
                noise = math.sqrt(2 / math.pi * observed * (1 - observed) / len(long))
                errors[name][gate.level].append(abs(predicted - observed))
                errors[name]["noise"].append(noise)
    columns = (*STATISTICS, "noise")
    means = {key: np.mean([error for found in errors.values() for error in found[key]]) for key in columns}
    return "\n".join(
        (
            "| | geometric | sequence | min | sampling noise |",
            "|---|---|---|---|---|",
            "| mean error | " + " | ".join(f"{100 * means[key]:.1f}" for key in columns) + " |",
            "| mean error minus the noise | "
            + " | ".join(f"{100 * (means[key] - means['noise']):.1f}" for key in STATISTICS)
            + " | |",
        )
    )


def length_cases(sample: SequenceSample) -> Iterator[tuple[Gate, int, int]]:
    for level, statistic in STATISTICS.items():
        if np.ptp(statistic(sample)) == 0:
            continue
        for start in range(1, len(LENGTH_GRID) - 2):
            for octave in (start + 1, start + 2):
                if (sample.tokens >= LENGTH_GRID[octave]).sum() >= 24:
                    yield Gate.model_validate({"level": level, "keep": [1e-9, None]}), start, octave


if __name__ == "__main__":
    main()
