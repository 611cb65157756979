"""How often the gate fails healthy pairs of imported dumps: 16 prompts x 8 responses, as each framework lays them out.

Usage: python benchmarks/gate_on_imports.py [--pairs 200] [--dumps 25]

Responses to one prompt are alike: their noise has a scale of their prompt's. Both dumps of a pair have the same
distribution, so that every failure is a false one. `without prompts` is the same data as Parquet without prompt ids.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))

from mismatchctl.api.gate.gate import load_result
from mismatchctl.api.gate.judgement import AcceptedResults, judge
from mismatchctl.api.gate.rules import DEFAULT_RULES
from mismatchctl.results.model import Result
from tests.factories.framework_dumps import WRITERS, Truth, Variant

PROMPTS, RESPONSES = 16, 8
WITHOUT = ("skyrl", "miles-policy-loss")


def sample(seed: int) -> Variant:
    """A dump whose noise differs from prompt to prompt."""
    rng = np.random.default_rng(seed)
    truth = []
    for prompt in range(PROMPTS):
        scale = 0.02 * np.exp(0.5 * rng.normal())
        tokens = [int(token) for token in rng.integers(1, 9_999, 6)] + [prompt + 1]
        for _ in range(RESPONSES):
            length = int(rng.integers(20, 120))
            rollout = -rng.exponential(size=length)
            train = np.minimum(rollout + scale * rng.normal(size=length), 0)
            both = [values.astype(np.float32).tolist() for values in (rollout, train)]
            truth.append(Truth(tokens, rng.integers(1, 999, length).tolist(), *both, [1] * length))
    return Variant(truth, "float32", "int64", 0.0, 0, False, False, 1)


def results(name: str, dumps: int) -> list[Result]:
    """The Results of dumps as one framework writes them, or without prompts."""
    found = []
    for seed in range(dumps):
        folder = Path(tempfile.mkdtemp())
        made = sample(seed)
        if name == "without prompts":
            columns = {
                "rollout_log_probs": [t.rollout for t in made.truth],
                "train_log_probs": [t.train for t in made.truth],
            }
            pq.write_table(pa.table(columns), folder / "a.parquet")
        else:
            WRITERS[name](made, folder)
        found.append(load_result([str(folder)], DEFAULT_RULES, ()))
        shutil.rmtree(folder)
    return found


def rate(found: list[Result], pairs: int) -> dict[str, int]:
    """Outcomes over pairs of a new dump and its baseline."""
    rng = np.random.default_rng(1)
    counts = {"passed": 0, "failed": 0, "undecided": 0}
    for _ in range(pairs):
        new, old = rng.choice(len(found), 2, replace=False)
        verdict = judge(found[new], DEFAULT_RULES, AcceptedResults("baseline", (found[old],)))
        counts[verdict.outcome] += 1
    return counts


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--dumps", type=int, default=25)
    given = parser.parse_args()
    print("| importer | failed | undecided |\n|---|---|---|")
    for name in [*(name for name in WRITERS if name not in WITHOUT), "without prompts"]:
        counts = rate(results(name, given.dumps), given.pairs)
        print(
            f"| {name} | {counts['failed'] / given.pairs:.1%} | {counts['undecided'] / given.pairs:.1%} |", flush=True
        )


if __name__ == "__main__":
    main()
