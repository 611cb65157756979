"""Measure how often the gate fails without a change and with a planted change.

    python benchmarks/gate_calibration.py FOLDER [--splits 2000] [--detect MODEL ... --detect-splits 100]
                                          [--write docs/methods/gate.md]

FOLDER contains held-out runs: the models of second_numeric.py and recorded runs, one folder of Parquet files each, with
the columns rollout_log_probs, train_log_probs and prompt_id. All tokens count as valid. Writes the tables HELD_OUT,
DETECTION, RESCORED and FAMILIES of docs/methods/gate.md. The splits are judged by the gate's own statistics, with
the same relabelings for all splits of one design.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from measure import replace_section, table
from numpy.typing import NDArray

from mismatchctl.api.gate.gate import BASELINE_MARGIN, DEFAULT_LEVEL
from mismatchctl.api.gate.rules import DEFAULT_TOLERANCE
from mismatchctl.core.batch import Segments
from mismatchctl.core.bins import K3_CAPS, LAYER_K3, LAYER_TOKENS, PROBABILITY_BINS
from mismatchctl.stats.comparison import Allowance, ExcessStatistic, k3_statistics, linear_statistic
from mismatchctl.stats.resampling import SampleExchange, adjust_holm, shares_above, smallest_p_values
from mismatchctl.stats.samples import ClusterSample, K3Layers, find_metric

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.factories.cluster_samples import layer_columns

Array = NDArray[np.float64]
HELD_OUT = ((16, 16), (40, 8), (8, 40), (64, 16))
RULES = ("k3", "abs_diff_mean", "ess_token", "k2", "chi2_token", "prob_diff_mean", "ess_sequence", "chi2_sequence")
"""A family of 8 rules. The first 3 are a family of 3."""
HIGHER_IS_BETTER = ("ess_token", "ess_sequence")
RELABELINGS = 1023
"""Number of relabelings besides the observed one, a quarter of the gate's number to save time."""


@dataclass
class Run:
    """The tokens of a run, ordered by prompt and response."""

    rollout: Array
    log_ratio: Array
    prompts: NDArray[np.int64]
    responses: NDArray[np.int64]

    @classmethod
    def read(cls, folder: Path, rollouts: str = "rollout_log_probs") -> Run:
        paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        data = pl.concat([pl.read_parquet(path) for path in paths])
        data = (data if "prompt_id" in data.columns else data.with_row_index("prompt_id")).sort("prompt_id")
        rollout, train = (data[name].to_list() for name in (rollouts, "train_log_probs"))
        lengths = [len(each) for each in rollout]
        _, prompt = np.unique(data["prompt_id"].to_numpy(), return_inverse=True)
        flat = [np.concatenate([np.asarray(each, float) for each in column]) for column in (rollout, train)]
        return cls(flat[0], flat[1] - flat[0], np.repeat(prompt, lengths), np.repeat(np.arange(len(lengths)), lengths))

    @property
    def count(self) -> int:
        return int(self.prompts.max()) + 1

    def layers(self, log_ratio: Array | None = None) -> K3Layers:
        """Return K3 by rollout probability and cap for each response, optionally of other log ratios."""
        x = self.log_ratio if log_ratio is None else log_ratio
        k3 = np.maximum(np.expm1(x) - x, 0.0)
        sizes = np.bincount(self.responses)
        found = layer_columns(self.rollout, k3, Segments.from_lengths(sizes))
        capped = found[PROBABILITY_BINS:].T.reshape(len(sizes), PROBABILITY_BINS, len(K3_CAPS))
        return K3Layers(
            np.bincount(self.responses, weights=k3), np.ascontiguousarray(found[:PROBABILITY_BINS].T), capped
        )

    def by_prompt(self, layers: K3Layers, responses: NDArray[np.bool_] | None = None) -> K3Layers:
        """Add up K3 by rollout probability and cap of some responses by prompt."""
        starts = np.searchsorted(self.prompts[np.unique(self.responses, return_index=True)[1]], np.arange(self.count))
        chosen = np.ones(len(layers.k3)) if responses is None else responses.astype(float)
        k3, tokens, capped = layers.k3 * chosen, layers.tokens * chosen[:, None], layers.capped * chosen[:, None, None]
        return K3Layers(*(np.add.reduceat(each, starts, axis=0) for each in (k3, tokens, capped)))

    def halves(self, random: np.random.Generator) -> NDArray[np.bool_]:
        """Return a mask of a random half of the responses to each prompt."""
        owner = self.prompts[np.unique(self.responses, return_index=True)[1]]
        order = np.lexsort((random.random(len(owner)), owner))
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        chosen = np.zeros(len(owner), np.bool_)
        chosen[order] = 2 * place < np.bincount(owner)[owner]
        return chosen


def select_rows(layers: K3Layers, rows: NDArray[np.int64]) -> K3Layers:
    return K3Layers(layers.k3[rows], layers.tokens[rows], layers.capped[rows])


class Design:
    """A number of new prompts compared with other prompts or with the same prompts."""

    def __init__(self, new: int, old: int, *, paired: bool = False) -> None:
        self.new, self.old, self.paired = new, old, paired
        keys = np.arange(1, new + old + 1, dtype=np.uint64)
        self.exchange = SampleExchange(keys[:new], keys[:new] if paired else keys[new:])
        self.labels = np.concatenate(list(self.exchange.labels()))[:RELABELINGS]

    def judge(self, new: K3Layers, old: K3Layers, tolerance: float) -> tuple[float, float, bool]:
        """Return the p-value, the p-value of K3 alone, and whether a verdict above the level would be undecided."""
        found = k3_statistics(new, old, Allowance(relative=tolerance))
        shares = self.shares(found)
        smallest = smallest_p_values(shares, [each.weight for each in found])
        p = BASELINE_MARGIN * float(np.mean(smallest <= smallest[0] * (1 + 1e-9)))
        exceeded = [each.exceeds_limit for each in found]
        return p, float(shares[0, -1]), exceeded[-1] and any(exceeded[:2])

    def shares(self, statistics: Sequence[ExcessStatistic]) -> Array:
        """Return p-values by relabeling and statistic. The observed labels come first."""
        values = np.stack([np.concatenate([each.new, each.old]) for each in statistics], axis=1)
        seen = values[: self.new].sum(axis=0, keepdims=True)
        return shares_above(np.concatenate([seen, self.labels @ values]))

    def splits(self, run: Run, number: int, seed: int = 1) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        random = np.random.default_rng(seed)
        for _ in range(number):
            order = random.permutation(run.count)
            first = np.sort(order[: self.new])
            yield first, first if self.paired else np.sort(order[self.new : self.new + self.old])


def plant_changes(run: Run, random: np.random.Generator) -> dict[str, Array]:
    """Return the log ratios of each planted change."""
    x, size = run.log_ratio, np.abs(run.log_ratio)
    found = {"no rise": x} | {f"log ratio x {factor}": factor * x for factor in (1.05, 1.1, 1.25, 1.5)}
    found["bulk (90% of tokens) x 1.25"] = np.where(size <= np.quantile(size, 0.9), 1.25 * x, x)
    tail, rest = (np.flatnonzero(each) for each in (size > np.quantile(size, 0.974), size <= np.quantile(size, 0.974)))
    for factor in (1.5, 2.0):
        more = x.copy()
        more[random.choice(rest, int((factor - 1) * len(tail)), replace=False)] = x[
            random.choice(tail, int((factor - 1) * len(tail)))
        ]
        found[f"tail (2.6% of tokens) {factor:g} times as frequent"] = more
    found["largest 1% x 1.5"] = np.where(size > np.quantile(size, 0.99), 1.5 * x, x)
    found["one response of four x 1.5"] = np.where(run.responses % 4 == 2, 1.5 * x, x)
    found["0.03% of tokens at -1"] = np.where(random.random(len(x)) < 3e-4, -1.0, x)
    return found


def held_out_table(runs: dict[str, Run], splits: int) -> str:
    """Return false failures at allowance 0 and 25%, and the power against two rises in 16 v 16."""
    rows = []
    for name, run in runs.items():
        layers, cells, seed = run.by_prompt(run.layers()), [name], sum(map(ord, name))
        for new, old in HELD_OUT:
            cells.append(failure_rate(Design(new, old), run, layers, layers, splits, seed))
        design = Design(16, 16)
        pairs = [(select_rows(layers, i), select_rows(layers, j)) for i, j in design.splits(run, splits, seed)]
        judged = [design.judge(one, two, DEFAULT_TOLERANCE) for one, two in pairs]
        failed, undecided = (np.mean([(p <= DEFAULT_LEVEL) == which and (which or doubt) for p, _, doubt in judged])
                             for which in (True, False))  # fmt: skip
        cells += [format_percent(failed), format_percent(undecided)]
        for x in (1.1 * run.log_ratio, np.where(run.responses % 4 == 2, 1.5 * run.log_ratio, run.log_ratio)):
            cells.append(failure_rate(design, run, run.by_prompt(run.layers(x)), layers, splits, seed + 1))
        rows.append(cells)
        print(rows[-1], file=sys.stderr, flush=True)
    heads = ("model", *(f"{new} v {old}" for new, old in HELD_OUT), "failed at 25%", "undecided at 25%", "K3 x 1.21",
             "one response of four x 1.5")  # fmt: skip
    return table(heads, rows)


def failure_rate(design: Design, run: Run, new: K3Layers, old: K3Layers, splits: int, seed: int) -> str:
    """Return the percentage that fails at allowance 0, ± half the width of its 95% interval."""
    if run.count < design.new + design.old:
        return "-"
    p = [design.judge(select_rows(new, i), select_rows(old, j), 0.0)[0] for i, j in design.splits(run, splits, seed)]
    share = float(np.mean(np.array(p) <= DEFAULT_LEVEL))
    return f"{100 * share:.1f} ± {196 * np.sqrt(share * (1 - share) / len(p)):.1f}"


def format_percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def detection_table(named: dict[str, Run], splits: int) -> str:
    rows: dict[str, list[str]] = {}
    heads = ["rise"]
    designs = [("16 v 16", Design(16, 16)), ("the same 16", Design(16, 16, paired=True))]
    for model, run in named.items():
        for title, design in designs:
            if run.count < (design.new if design.paired else design.new + design.old):
                continue
            heads.append(f"{model}, {title}")
            random = np.random.default_rng(2)
            old = run.layers()
            for name, x in plant_changes(run, random).items():
                new, found = run.layers(x), []
                sides = run.by_prompt(new), run.by_prompt(old)
                for i, j in design.splits(run, splits, len(name)):
                    if design.paired:
                        half = run.halves(random)
                        sides = run.by_prompt(new, half), run.by_prompt(old, ~half)
                    found.append(design.judge(select_rows(sides[0], i), select_rows(sides[1], j), 0.0))
                shares = [np.mean([each[place] <= DEFAULT_LEVEL for each in found]) for place in (0, 1)]
                rows.setdefault(name, []).append(f"{format_percent(shares[0])} ({format_percent(shares[1])})")
            print(heads[-1], [row[-1] for row in rows.values()], file=sys.stderr, flush=True)
    return table(heads, ((name, *cells) for name, cells in rows.items()))


def rescored_table(folder: Path, names: Sequence[str], splits: int) -> str:
    """Return the power if a second engine scores the same tokens and its log ratio is multiplied by a factor."""
    rows, heads = {f"x {factor:g}" if factor > 1 else "no rise": [] for factor in (1.0, 1.05, 1.1, 1.25)}, ["log ratio"]
    for name in names:
        first, second = Run.read(folder / name), Run.read(folder / name, "second_log_probs")
        assert first.count == second.count
        old, design = first.by_prompt(first.layers()), Design(16, 16, paired=True)
        heads.append(name)
        for title, cells in rows.items():
            factor = 1.0 if title == "no rise" else float(title[2:])
            new = second.by_prompt(second.layers(factor * second.log_ratio))
            found = [
                design.judge(select_rows(new, i), select_rows(old, j), 0.0) for i, j in design.splits(first, splits, 3)
            ]
            shares = [np.mean([each[place] <= DEFAULT_LEVEL for each in found]) for place in (0, 1)]
            cells.append(f"{format_percent(shares[0])} ({format_percent(shares[1])})")
        print(heads[-1], [cells[-1] for cells in rows.values()], file=sys.stderr, flush=True)
    return table(heads, ((title, *cells) for title, cells in rows.items()))


def to_cluster_sample(run: Run) -> ClusterSample:
    """Return the sums of a run that the metrics in `RULES` need, by prompt."""
    x, layers = run.log_ratio, run.by_prompt(run.layers())
    owner = run.prompts[np.unique(run.responses, return_index=True)[1]]
    product = np.exp(np.clip(np.bincount(run.responses, weights=x), -20, 20))
    distance = np.abs(np.exp(run.rollout + x) - np.exp(run.rollout))
    tokens = {"abs": np.abs(x), "square": x**2, "excess": np.expm1(x), "squared_excess": np.expm1(x) ** 2,
              "squared_ratio": np.exp(2 * x), "prob_diff": distance}  # fmt: skip
    sequences = {"sequences": np.ones(len(product)), "product": product, "squared_product": product**2,
                 "product_excess": product - 1, "squared_product_excess": (product - 1) ** 2}  # fmt: skip
    columns = {"tokens": layers.tokens.sum(1), "k3": layers.k3}
    columns |= {name: np.bincount(run.prompts, weights=values) for name, values in tokens.items()}
    columns |= {name: np.bincount(owner, weights=values) for name, values in sequences.items()}
    names = (*columns, *LAYER_TOKENS, *LAYER_K3)
    sums = [*columns.values(), *layers.tokens.T, *layers.capped.reshape(run.count, -1).T]
    return ClusterSample(np.arange(1, run.count + 1, dtype=np.uint64), names, np.column_stack(sums))


def family_table(runs: dict[str, Run], splits: int) -> str:
    """Measure how often any of several rules fails without a change."""
    rows = []
    for new, old in ((16, 16), (8, 40), (40, 8)):
        design, failed = Design(new, old), []
        for name, run in runs.items():
            if run.count < new + old:
                continue
            whole, layers, shares = to_cluster_sample(run), run.by_prompt(run.layers()), []
            for i, j in design.splits(run, splits, sum(map(ord, name)) + 1):
                one, two = (replace(whole, keys=whole.keys[rows], sums=whole.sums[rows]) for rows in (i, j))
                others = [
                    linear_statistic(one, two, find_metric(key), Allowance(), lower=key in HIGHER_IS_BETTER)
                    for key in RULES[1:]
                ]
                p = [design.judge(select_rows(layers, i), select_rows(layers, j), 0.0)[0], *design.shares(others)[0]]
                shares.append([min(adjust_holm(p[:size])) <= DEFAULT_LEVEL for size in (1, 3, 8)])
            failed.append(np.mean(shares, axis=0))
        ends = zip(np.mean(failed, axis=0), np.max(failed, axis=0), strict=True)
        cells = [f"{format_percent(mean)} ({format_percent(most)})" for mean, most in ends]
        rows.append((f"{new} v {old}", str(len(failed)), *cells))
        print(rows[-1], file=sys.stderr, flush=True)
    return table(("prompts, new v baseline", "runs", "1 rule", "3 rules", "8 rules"), rows)


def main() -> None:
    options = make_page_parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--splits", type=int, default=2000)
    options.add_argument("--detect", nargs="*", default=[], help="models for the table of planted rises")
    options.add_argument("--detect-splits", type=int, default=100)
    given = options.parse_args()
    runs = {path.name: Run.read(path) for path in sorted(given.folder.iterdir()) if path.is_dir()}
    scored = [name for name in runs if (given.folder / name / "tokens.parquet").exists()]
    named = {name: runs[name] for name in given.detect}
    publish_table("DETECTION", detection_table(named, given.detect_splits), given.write)
    publish_table("RESCORED", rescored_table(given.folder, scored, given.detect_splits), given.write)
    publish_table("FAMILIES", family_table(runs, given.detect_splits), given.write)
    publish_table("HELD_OUT", held_out_table(runs, given.splits), given.write)


def make_page_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts that write docs/methods/gate.md."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page to write the tables to")
    return parser


def publish_table(name: str, text: str, page: Path | None) -> None:
    """Print a table, and write it between the markers of its name if a page is given."""
    replace_section(f"\n{text}", page, f"<!-- {name} -->", f"<!-- /{name} -->")


if __name__ == "__main__":
    main()
