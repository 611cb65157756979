"""How often the gate fails without a cause, and how often it finds a planted one: writes docs/gate.md.

Usage: python benchmarks/gate_calibration.py FOLDER
FOLDER holds one folder of Parquet files per run, with columns rollout_log_probs, train_log_probs and prompt_id.
Regressions are planted in the runs `dense_bf16_decode` and `moe_bf16_decode`; the worse runs whose responses are mixed
in are `..._int8_weights`, `..._stale_policy` and `..._fp8_kv_cache`. All tokens are taken as valid.

Splits are made at once: sums by (split, prompt) times the gate's own weights are what it would see in each split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from mismatchctl.gate import LEVEL, TOLERANCE
from mismatchctl.gate.power import detectable
from mismatchctl.measure.table import hash_values
from mismatchctl.resample import Draws, weights

Array = NDArray[np.float64]
SPLITS, REPLICATES = 4000, 4096
NAIVE = 1.2
PROMPTS = 32
FAMILIES = {"dense": "dense_bf16_decode", "MoE": "moe_bf16_decode"}
SCALES = (1.1, 1.25, 1.5, 2.0)
WORSE = ("int8_weights", "stale_policy", "fp8_kv_cache")
OUT = Path(__file__).parent.parent / "docs" / "gate.md"


@dataclass
class Run:
    """Sequences of a run: log ratios, and the number of each one's prompt; the first PROMPTS prompts."""

    log_ratios: list[Array]
    prompts: NDArray[np.int64]
    keys: NDArray[np.uint64]

    @classmethod
    def read(cls, folder: Path) -> Run:
        data = pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])
        names, prompts = np.unique(data["prompt_id"].to_numpy(), return_inverse=True)
        pairs = zip(data["train_log_probs"].to_list(), data["rollout_log_probs"].to_list(), strict=True)
        ratios = [np.asarray(train) - np.asarray(rollout) for train, rollout in pairs]
        chosen = np.flatnonzero(prompts < PROMPTS)
        return cls([ratios[i] for i in chosen], prompts[chosen], hash_values(names[:PROMPTS]))

    def k3(self, scale: float = 1.0) -> Array:
        """Sum of K3 of each sequence, with log ratios `scale` times as large."""
        with np.errstate(over="ignore"):
            return np.array([np.sum(np.expm1(scale * x) - scale * x) for x in self.log_ratios])

    @property
    def tokens(self) -> Array:
        return np.array([len(x) for x in self.log_ratios], float)


@dataclass
class Side:
    """Sums of one side of every split [SPLITS, PROMPTS]; 0 where it does not hold a prompt."""

    k3: Array
    tokens: Array

    @property
    def value(self) -> Array:
        return self.k3.sum(axis=1) / self.tokens.sum(axis=1)

    def linear(self) -> Array:
        """Influence of each prompt on the value [SPLITS, PROMPTS]."""
        influence = (self.k3 - self.value[:, None] * self.tokens) / self.tokens.sum(axis=1)[:, None]
        return influence * (self.tokens > 0)


def side(masks: NDArray[np.bool_], run: Run, k3: Array) -> Side:
    """Sums by prompt of the sequences in each mask [SPLITS, sequences]."""
    table = np.zeros((len(run.prompts), PROMPTS))
    table[np.arange(len(run.prompts)), run.prompts] = 1
    return Side(masks @ (k3[:, None] * table), masks @ (run.tokens[:, None] * table))


def gate(new: Side, base: Side, keys: NDArray[np.uint64], tolerance: float) -> tuple[float, float, float]:
    """Shares of splits that passed, were undecided and failed."""
    drawn = weights(keys, 0, REPLICATES)
    with np.errstate(all="ignore"):
        above = (drawn @ new.k3.T) / (drawn @ new.tokens.T)
        below = (drawn @ base.k3.T) / (drawn @ base.tokens.T)
    p = (np.count_nonzero(~(above > (1 + tolerance) * below), axis=0) + 1) / (REPLICATES + 1)
    passed = new.value <= (1 + tolerance) * base.value
    failed = ~passed & (p <= LEVEL)
    return float(passed.mean()), float((~passed & ~failed).mean()), float(failed.mean())


def cluster_t(new: Side, base: Side, paired: bool) -> float:
    """Share of splits in which a cluster-robust one-sided t-test rejects."""
    from scipy import stats

    count = (new.tokens[0] > 0).sum()
    parts = [new.linear() - base.linear()] if paired else [new.linear(), base.linear()]
    error = np.sqrt(sum((part**2).sum(axis=1) for part in parts) * count / (count - 1))
    degrees = len(parts) * (count - 1)
    return float(((new.value - base.value) / error > stats.t.ppf(1 - LEVEL, degrees)).mean())


def naive(new: Side, base: Side) -> float:
    return float((new.value > NAIVE * base.value).mean())


def halves(run: Run, prompts: int, seed: int = 1) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Two disjoint sets of so many prompts, as masks of sequences."""
    random = np.random.default_rng(seed)
    order = np.argsort(random.random((SPLITS, PROMPTS)), axis=1)
    rank = np.argsort(order, axis=1)[:, run.prompts]
    return rank < prompts, (rank >= prompts) & (rank < 2 * prompts)


def within(run: Run, prompts: int, seed: int = 1) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """The same prompts on both sides, half of the responses to each on either."""
    random = np.random.default_rng(seed)
    chosen = np.argsort(np.argsort(random.random((SPLITS, PROMPTS)), axis=1), axis=1)[:, run.prompts] < prompts
    noise = random.random((SPLITS, len(run.prompts)))
    first = np.zeros_like(chosen)
    for prompt in range(PROMPTS):
        rows = np.flatnonzero(run.prompts == prompt)
        first[:, rows] = np.argsort(np.argsort(noise[:, rows], axis=1), axis=1) < len(rows) // 2
    return chosen & first, chosen & ~first


def percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    heads = list(heads)
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def false_failures(runs: dict[str, Run]) -> Iterator[str]:
    found = {}
    for name, run in runs.items():
        new, base = (side(mask, run, run.k3()) for mask in halves(run, 16))
        found[name] = gate(new, base, run.keys, 0.0)[2], cluster_t(new, base, False), naive(new, base)
    every = np.array(list(found.values()))
    rows = [(name, *map(percent, shares)) for name, shares in found.items()]
    rows.append(("**mean**", *map(percent, every.mean(axis=0))))
    rows.append(("**largest**", *map(percent, every.max(axis=0))))
    yield from table(("run", "gate", "cluster t", f"K3 > {NAIVE} x baseline"), rows)


def detection(runs: dict[str, Run]) -> Iterator[str]:
    rows = []
    for family, name in FAMILIES.items():
        run = runs[name]
        designs = [
            *(("other prompts", size, halves(run, size), False) for size in (8, 12, 16)),
            *(("same prompts, other responses", size, within(run, size), True) for size in (8, 16, 32)),
        ]
        for words, size, (first, second), paired in designs:
            base = side(second, run, run.k3())
            for scale in (1.0, *SCALES):
                new = side(first, run, run.k3(scale))
                at_zero, at_default = (gate(new, base, run.keys, t) for t in (0.0, TOLERANCE))
                sequences = int(first.sum(axis=1).mean())
                shares = at_zero[2], at_default[2], 1 - at_default[0], cluster_t(new, base, paired), naive(new, base)
                rows.append((family, words, f"{size} ({sequences})", f"{scale:g}", *map(percent, shares)))
    heads = (
        "model", "compared", "prompts (sequences) a side", "log ratio x", "gate at 0: failed", "gate: failed",
        "gate: not passed", "cluster t", f"K3 > {NAIVE} x baseline",
    )  # fmt: skip
    yield from table(heads, rows)


def same_tokens(runs: dict[str, Run]) -> Iterator[str]:
    """The engine alone changed: the same responses on both sides."""
    rows = []
    for family, name in FAMILIES.items():
        run = runs[name]
        for size in (8, 16):
            mask, _ = halves(run, size)
            base = side(mask, run, run.k3())
            for scale in (1.01, 1.05, 1.25):
                new = side(mask, run, run.k3(scale))
                shares = gate(new, base, run.keys, 0.0)[2], gate(new, base, run.keys, TOLERANCE)[2], naive(new, base)
                rows.append((family, str(size), f"{scale:g}", *map(percent, shares)))
    yield from table(("model", "prompts", "log ratio x", "gate at 0", "gate", f"K3 > {NAIVE} x baseline"), rows)


def mixtures(runs: dict[str, Run]) -> Iterator[str]:
    """A share of the responses comes from a worse run, to the same prompts."""
    random = np.random.default_rng(2)
    rows = []
    for family, name in FAMILIES.items():
        run = runs[name]
        for cause in WORSE:
            worse = runs[name.replace("bf16_decode", cause)]
            for share in (0.1, 0.25, 0.5, 1.0):
                cells = []
                for split, paired in ((halves, False), (within, True)):
                    first, second = split(run, 16)
                    others, _ = split(worse, 16)
                    keep = random.random(first.shape) >= share
                    taken = random.random(others.shape) < share
                    old, bad = side(first & keep, run, run.k3()), side(others & taken, worse, worse.k3())
                    new, base = Side(old.k3 + bad.k3, old.tokens + bad.tokens), side(second, run, run.k3())
                    cells += [gate(new, base, run.keys, 0.0)[2], gate(new, base, run.keys, TOLERANCE)[2]]
                    cells += [naive(new, base)] if not paired else []
                factor = new.value.mean() / base.value.mean()
                rows.append((family, cause, f"{100 * share:.0f} %", f"{factor:.2f}", *map(percent, cells)))
    heads = (
        "model", "worse run", "of its responses", "K3 x", "gate at 0, unpaired", "gate, unpaired",
        f"K3 > {NAIVE} x baseline", "gate at 0, paired", "gate, paired",
    )  # fmt: skip
    yield from table(heads, rows)


def tolerances(runs: dict[str, Run]) -> Iterator[str]:
    rows = []
    for family, name in FAMILIES.items():
        run = runs[name]
        for words, (first, second), size in (
            ("other prompts", halves(run, 16), 16),
            ("same prompts", within(run, 32), 32),
        ):
            base = side(second, run, run.k3())
            for tolerance in (0.0, 0.1, 0.25, 0.5, 1.0):
                quiet = gate(side(first, run, run.k3()), base, run.keys, tolerance)
                found = [1 - gate(side(first, run, run.k3(s)), base, run.keys, tolerance)[0] for s in (1.25, 1.5)]
                found += [gate(side(first, run, run.k3(s)), base, run.keys, tolerance)[2] for s in (1.25, 1.5)]
                label = f"{100 * tolerance:.0f} %" + " (default)" * (tolerance == TOLERANCE)
                rows.append((family, f"{words}, {size}", label, *map(percent, (*quiet, *found))))
    heads = (
        "model", "compared, prompts a side", "tolerance", "passed", "undecided", "failed",
        "x 1.25: not passed", "x 1.5: not passed", "x 1.25: failed", "x 1.5: failed",
    )  # fmt: skip
    yield from table(heads, rows)


def powers(runs: dict[str, Run]) -> Iterator[str]:
    """What the gate says it could have found, planted: it should fail in four of five."""
    rows = []
    for family, name in FAMILIES.items():
        run = runs[name]
        for words, (first, second) in (("other prompts, 16", halves(run, 16)), ("same prompts, 32", within(run, 32))):
            new, base = side(first, run, run.k3()), side(second, run, run.k3())
            drawn = weights(run.keys, 0, REPLICATES)
            with np.errstate(all="ignore"):
                above, below = (drawn @ each.k3.T / (drawn @ each.tokens.T) for each in (new, base))
            noise = (Draws(new.value[i] / base.value[i], above[:, i] / below[:, i]) for i in range(SPLITS))
            said = np.array([detectable(1 + TOLERANCE, each, LEVEL) or np.nan for each in noise])
            planted = Side(new.k3 * np.nanmedian(said), new.tokens)
            low, middle, high = (f"{factor:.2f}" for factor in np.nanquantile(said, [0.1, 0.5, 0.9]))
            failed = gate(planted, base, run.keys, TOLERANCE)[2]
            rows.append((family, words, middle, f"{low} to {high}", percent(failed)))
    heads = (
        "model",
        "compared, prompts a side",
        "K3 x, as said (median)",
        "in four of five splits",
        "failed when planted",
    )
    yield from table(heads, rows)


def main(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.endswith("_bitwise"))
    runs = {name: Run.read(folder / name) for name in names}
    tables = {
        "FALSE": false_failures, "TOLERANCE": tolerances, "DETECTION": detection, "TOKENS": same_tokens,
        "MIXTURES": mixtures, "POWER": powers,
    }  # fmt: skip
    text = OUT.read_text(encoding="utf-8")
    for mark, made in tables.items():
        start, end = f"<!-- {mark} -->\n", f"<!-- /{mark} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "\n" + "\n".join(made(runs)) + "\n\n" + end + after
        print(mark, "done", file=sys.stderr)
    OUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
