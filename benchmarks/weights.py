"""What final weights of padded log-probs cost: a padded helper as trainers have it, against `mismatchctl.weights`.

    python benchmarks/weights.py --repeat 7 --write benchmarks/results.md

The padded helper is written for this benchmark: torch, [B, T] throughout, as trainers' own helpers compute: clamp,
exponent, sums over masked positions, bound, mask, division by the mean. One process, one thread; cases interleaved,
medians of processor time, and of its ratio within a round. Both are checked to give the same weights first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from measure import publish, table

import mismatchctl as mm

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token weights truncated at 2": {"weight": {"truncate": 2.0}},
    "and normalized": {"weight": {"truncate": 2.0, "normalize": "token"}},
    "sequence weights truncated at 2, geometric rejection": {
        "weight": {"level": "sequence", "truncate": 2.0},
        "gates": [{"level": "geometric", "keep": [0.999, 1.001]}],
    },
}
SHAPES = {"all of one length": (256, 2048, False), "long-tailed lengths": (256, 8192, True)}


def padded(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor, rules: dict[str, Any]) -> tuple[Any, Any]:
    """The same on padded tensors."""
    weight, bound = rules["weight"], 20.0
    log_ratio = train - rollout
    counts = mask.sum(-1, keepdim=True).clamp(min=1)
    raw = log_ratio
    if weight.get("level") == "sequence":
        raw = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    made = torch.exp(raw.clamp(-bound, bound)) * mask
    made = made.clamp(max=weight["truncate"])
    if weight.get("normalize") == "token":
        made = made / ((made * mask).sum() / mask.sum().clamp(min=1))
    keep = mask.bool()
    for gate in rules.get("gates", ()):
        low, high = gate["keep"]
        mean = torch.exp(((log_ratio * mask).sum(-1, keepdim=True) / counts).clamp(-bound, bound))
        keep = keep & ((mean >= low) & (mean <= high))
    return made * mask, keep


def rows(sequences: int, width: int, tailed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the two sides and their mask."""
    rng = np.random.default_rng(5)
    lengths = np.full(sequences, width)
    if tailed:
        lengths = np.clip(rng.lognormal(np.log(width / 12), 0.9, sequences), 1, width).astype(int)
        lengths[0] = width
    mask = np.arange(width) < lengths[:, None]
    rollout = np.where(mask, -rng.exponential(0.5, mask.shape), 0.0).astype(np.float32)
    train = np.where(mask, np.minimum(rollout + rng.normal(0, 0.01, mask.shape), 0), 0.0).astype(np.float32)
    return torch.from_numpy(rollout), torch.from_numpy(train), torch.from_numpy(mask)


def timed(call: Callable[[], Any]) -> float:
    """Processor time of a call, in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(repeat: int) -> list[tuple[str, ...]]:
    """The rows of the table."""
    found = []
    for shape, (sequences, width, tailed) in SHAPES.items():
        rollout, train, mask = rows(sequences, width, tailed)
        for name, rules in CORRECTIONS.items():
            ours, kept = mm.weights(rollout, train, mask, rules)
            theirs, flags = padded(rollout, train, mask, rules)
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
            assert (kept == flags).float().mean() > 0.999  # a mean next to its bound may fall otherwise in float32
            times: dict[str, list[float]] = {"padded": [], "ours": []}
            for _ in range(repeat):
                times["padded"].append(timed(partial(padded, rollout, train, mask, rules)))
                times["ours"].append(timed(partial(mm.weights, rollout, train, mask, rules)))
            ratio = statistics.median(own / other for own, other in zip(times["ours"], times["padded"], strict=True))
            tokens = int(mask.sum())
            about = f"{shape}, {sequences} x {width}, {tokens / 1e6:.2f} M valid"
            middles = (f"{statistics.median(times[side]) * 1e3:.0f}" for side in ("padded", "ours"))
            found.append((about, name, *middles, f"{ratio:.2f}"))
    return found


def main() -> None:
    """Measure and print, or write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = "log-probs", "correction", "padded helper, ms", "`mm.weights`, ms", "ours / padded"
    publish(HEAD.format(repeat=given.repeat) + table(heads, measured(given.repeat)), given.write)


HEAD = """## Weights of padded log-probs

`benchmarks/weights.py`: one thread, float32, {repeat} rounds of interleaved cases, medians of processor time.
The padded helper is straightforward torch on [B, T]. `mm.weights` computes in float64 on valid tokens only.

"""


if __name__ == "__main__":
    main()
