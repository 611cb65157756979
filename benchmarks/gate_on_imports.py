"""Measure how often the gate fails healthy pairs of imported dumps.

    python benchmarks/gate_on_imports.py [--pairs 200] [--dumps 50] [--write docs/methods/gate.md]

Each dump has 16 prompts with 8 responses. The scale of the noise differs between prompts. The two dumps of a pair have
the same distribution, so each failure is false. The row `without prompts` uses the same log-probs in Parquet without
prompt ids. Writes the table IMPORTS.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from gate_calibration import make_page_parser, publish_table
from measure import table

sys.path.insert(0, str(Path(__file__).parents[1]))

from mismatchctl.api.gate.gate import Baseline, judge, load_result
from mismatchctl.api.gate.rules import DEFAULT_RULES
from mismatchctl.results.model import Result
from tests.factories.framework_dumps import WRITERS, Truth, Variant

PROMPTS, RESPONSES = 16, 8


def make_variant(seed: int) -> Variant:
    """Make a dump whose noise has a different scale for each prompt."""
    rng = np.random.default_rng(seed)
    truth = []
    for prompt in range(PROMPTS):
        scale = 0.02 * np.exp(0.5 * rng.normal())
        tokens = [int(token) for token in rng.integers(1, 9_999, 6)] + [prompt + 1]
        for _ in range(RESPONSES):
            length = int(rng.integers(20, 120))
            rollout = -rng.exponential(size=length)
            train = np.minimum(rollout + scale * rng.normal(size=length), 0)
            log_probs = [values.astype(np.float32).tolist() for values in (rollout, train)]
            truth.append(Truth(tokens, rng.integers(1, 999, length).tolist(), *log_probs, [1] * length))
    return Variant(truth, "float32", "int64", 0.0, 0, False, False, 1)


def import_dumps(name: str, dumps: int) -> list[Result]:
    """Return the Results of dumps in the files of one framework, or without prompt ids."""
    found = []
    for seed in range(dumps):
        folder = Path(tempfile.mkdtemp())
        made = make_variant(seed)
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


def failure_rates(name: str, pairs: int, dumps: int) -> tuple[str, ...]:
    """Return the percentage of pairs that fail, and the percentage that are undecided."""
    found, rng, counts = import_dumps(name, dumps), np.random.default_rng(1), Counter[str]()
    for _ in range(pairs):
        new, old = rng.choice(len(found), 2, replace=False)
        counts[judge(found[new], DEFAULT_RULES, Baseline("baseline", found[old])).outcome] += 1
    print(name, dict(counts), file=sys.stderr, flush=True)
    return tuple(f"{100 * counts[outcome] / pairs:.1f}" for outcome in ("failed", "undecided"))


def main() -> None:
    options = make_page_parser(__doc__)
    options.add_argument("--pairs", type=int, default=200)
    options.add_argument("--dumps", type=int, default=50)
    given = options.parse_args()
    rows = [(name, *failure_rates(name, given.pairs, given.dumps)) for name in ("trl", "without prompts")]
    publish_table("IMPORTS", table(["data", "failed", "undecided"], rows), given.write)


if __name__ == "__main__":
    main()
