"""Measure the cost of final weights with `mismatchctl.weights` relative to a padded torch helper.

    python benchmarks/weights.py --repeat 7 --write benchmarks/results.md

The padded helper computes like the helpers of trainers, on [B, T]: clamp, exponential, masked sums, bound, mask and
normalization. Runs in one process on one thread with interleaved cases, and states medians of processor time and of
ratios within a round. The script first checks that the two implementations give the same weights. Writes the section
"Weights of padded log-probs".
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
    "token weights truncated at 2, normalized": {"weight": {"truncate": 2.0, "normalize": "token"}},
    "sequence weights truncated at 2, geometric rejection": {
        "weight": {"level": "sequence", "truncate": 2.0},
        "gates": [{"level": "geometric", "keep": [0.999, 1.001]}],
    },
}
SHAPES = {"all of one length": (256, 2048, False), "long-tailed lengths": (256, 8192, True)}


def padded_weights(
    rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor, rules: dict[str, Any]
) -> tuple[Any, Any]:
    """Return the weights and the mask of kept tokens, computed on padded tensors."""
    weight, bound = rules["weight"], 20.0
    log_ratio = train - rollout
    counts = mask.sum(-1, keepdim=True).clamp(min=1)
    raw = log_ratio
    if weight.get("level") == "sequence":
        raw = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    weights = torch.exp(raw.clamp(-bound, bound)) * mask
    weights = weights.clamp(max=weight["truncate"])
    if weight.get("normalize") == "token":
        weights = weights / ((weights * mask).sum() / mask.sum().clamp(min=1))
    keep = mask.bool()
    for gate in rules.get("gates", ()):
        low, high = gate["keep"]
        mean = torch.exp(((log_ratio * mask).sum(-1, keepdim=True) / counts).clamp(-bound, bound))
        keep = keep & ((mean >= low) & (mean <= high))
    return weights * mask, keep


def make_log_probs(sequences: int, width: int, long_tailed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs of the two sides and their mask, [B, T]."""
    rng = np.random.default_rng(5)
    lengths = np.full(sequences, width)
    if long_tailed:
        lengths = np.clip(rng.lognormal(np.log(width / 12), 0.9, sequences), 1, width).astype(int)
        lengths[0] = width
    mask = np.arange(width) < lengths[:, None]
    rollout = np.where(mask, -rng.exponential(0.5, mask.shape), 0.0).astype(np.float32)
    train = np.where(mask, np.minimum(rollout + rng.normal(0, 0.01, mask.shape), 0), 0.0).astype(np.float32)
    return torch.from_numpy(rollout), torch.from_numpy(train), torch.from_numpy(mask)


def time_call(call: Callable[[], Any]) -> float:
    """Return the processor time of a call in seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


def table_rows(repeat: int) -> list[tuple[str, ...]]:
    """Measure each shape and correction, and return the rows of the table."""
    found = []
    for shape, (sequences, width, long_tailed) in SHAPES.items():
        rollout, train, mask = make_log_probs(sequences, width, long_tailed)
        for name, rules in CORRECTIONS.items():
            ours, kept = mm.weights(rollout, train, mask, rules)
            theirs, flags = padded_weights(rollout, train, mask, rules)
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)
            assert (kept == flags).float().mean() > 0.999  # float32 can reject a mean next to its bound
            times: dict[str, list[float]] = {"padded": [], "ours": []}
            for _ in range(repeat):
                times["padded"].append(time_call(partial(padded_weights, rollout, train, mask, rules)))
                times["ours"].append(time_call(partial(mm.weights, rollout, train, mask, rules)))
            ratio = statistics.median(own / other for own, other in zip(times["ours"], times["padded"], strict=True))
            tokens = int(mask.sum())
            title = f"{shape}, {sequences} x {width}, {tokens / 1e6:.2f} M valid"
            middles = (f"{statistics.median(times[side]) * 1e3:.0f}" for side in ("padded", "ours"))
            found.append((title, name, *middles, f"{ratio:.2f}"))
    return found


def main() -> None:
    """Print or write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = "log-probs", "correction", "padded helper, ms", "`mm.weights`, ms", "ours / padded"
    publish(HEAD.format(repeat=given.repeat) + table(heads, table_rows(given.repeat)), given.write)


HEAD = """## Weights of padded log-probs

`benchmarks/weights.py`: one thread, float32, {repeat} rounds of interleaved cases, medians of processor time.
The padded helper is straightforward torch on [B, T]. `mm.weights` computes in float64 on valid tokens only.

"""


if __name__ == "__main__":
    main()
