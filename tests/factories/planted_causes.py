"""Real dumps with a planted cause. Each function changes healthy rows of sample_data.

Temperature, truncation and raw log-probs act on distributions, but a dump has one log-prob per token. Each real
log-prob therefore stands for a context in which the token has its probability and a few other tokens share the rest.
Tokens are sampled again from the engine's distribution, so both columns are exact, and the real noise of the position
is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.paths import SAMPLE_DATA

SAMPLES = SAMPLE_DATA
HEALTHY = {"dense": range(9), "moe": range(8)}
"""Steps of the sample runs without a fault."""
OTHERS = 24
"""Number of other tokens. Their probabilities fall like 1 / rank."""


@dataclass
class Planted:
    """A dump in the wide layout, with flat token arrays that `lengths` divides into rows."""

    lengths: np.ndarray
    tokens: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def place(self) -> np.ndarray:
        return np.arange(self.lengths.sum()) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    def rows(self, chosen: np.ndarray) -> Planted:
        starts = np.cumsum(self.lengths) - self.lengths
        where = np.concatenate([np.arange(starts[i], starts[i] + self.lengths[i]) for i in chosen])
        return Planted(
            self.lengths[chosen],
            {name: values[where] for name, values in self.tokens.items()},
            {name: values[chosen] for name, values in self.columns.items()},
            self.random,
        )

    def write(self, path: Path) -> Path:
        offsets = pa.array(np.append(0, np.cumsum(self.lengths)).astype(np.int32))
        data = {name: pa.array(values) for name, values in self.columns.items()}
        for name, values in self.tokens.items():
            data[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
        pq.write_table(pa.table(data), path)
        return path


def healthy(kind: str = "dense", steps: range | None = None) -> Planted:
    files = [SAMPLES / kind / f"step_{step:05d}.parquet" for step in steps or HEALTHY[kind]]
    table = pa.concat_tables([pq.read_table(file) for file in files])
    lists = ["rollout_log_probs", "train_log_probs", "current_log_probs", "token_ids", "response_mask"]
    tokens = {name: np.concatenate([np.asarray(row) for row in table[name].to_pylist()]) for name in lists}
    for name in lists[:3]:
        tokens[name] = tokens[name].astype(np.float32)
    lengths = np.array([len(row) for row in table["rollout_log_probs"].to_pylist()])
    names = ["step", "sequence_id", "prompt_id", "rollout_version", "train_version", "worker", "reward"]
    return Planted(lengths, tokens, {name: table[name].to_numpy() for name in names})


def _with_rollout(dump: Planted, values: np.ndarray) -> Planted:
    dump.tokens["rollout_log_probs"] = values.astype(np.float32)
    return dump


def _with_train(dump: Planted, values: np.ndarray) -> Planted:
    dump.tokens["train_log_probs"] = values.astype(np.float32)
    return dump


def _sides(dump: Planted) -> tuple[np.ndarray, np.ndarray]:
    return tuple(dump.tokens[f"{side}_log_probs"].astype(np.float64) for side in ("rollout", "train"))  # type: ignore[return-value]


# Changes of the sampling distribution or of the recorded log-probs.


def _contexts(dump: Planted) -> tuple[np.ndarray, np.ndarray]:
    """Return a distribution for each token [T, 1 + OTHERS], and the noise of its logits [T]."""
    rollout, train = _sides(dump)
    p = np.exp(np.minimum(train, -1e-6))
    shares = 1 / np.arange(1, OTHERS + 1)
    rest = (1 - p)[:, None] * (shares / shares.sum())
    # the slope of the shares is random, because contexts differ in the number of likely tokens
    steep = dump.random.uniform(0.5, 3.0, len(p))[:, None]
    rest = rest**steep
    rest *= ((1 - p) / rest.sum(axis=1))[:, None]
    return np.concatenate([p[:, None], rest], axis=1), (train - rollout) / (1 - p + 0.02)


def _resampled(dump: Planted, sampler: np.ndarray, trainer: np.ndarray, recorded: np.ndarray) -> Planted:
    """Sample every token again from `sampler`, and store log-probs under `trainer` and `recorded`."""
    _, noise = _contexts(dump)
    cumulative = np.cumsum(sampler, axis=1)
    drawn = (dump.random.random(len(sampler))[:, None] * cumulative[:, -1:] > cumulative).sum(axis=1)
    at = np.arange(len(sampler)), np.minimum(drawn, sampler.shape[1] - 1)
    train, rollout = np.log(trainer[at]), np.log(recorded[at])
    noisy = rollout - noise * (1 - np.exp(rollout))
    rollout = np.where(noisy < 0, noisy, rollout)
    ahead = dump.tokens["current_log_probs"].astype(np.float64) - np.minimum(_sides(dump)[1], -1e-6)
    ahead *= (1 - trainer[at]) / (1 - trainer[:, 0] + 1e-9)
    dump.tokens["current_log_probs"] = np.minimum(train + np.clip(ahead, -1, 1), 0.0).astype(np.float32)
    dump.tokens["token_ids"] = ((dump.tokens["token_ids"] + 17 * at[1]) % 257).astype(np.int32)
    return _with_train(_with_rollout(dump, rollout), train)


def _tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    powers = probabilities ** (1 / temperature)
    return powers / powers.sum(axis=1, keepdims=True)


def temperature(dump: Planted, temperature: float) -> Planted:
    p, _ = _contexts(dump)
    q = _tempered(p, temperature)
    return _resampled(dump, q, p, q)


def raw_logprobs(dump: Planted, temperature: float) -> Planted:
    """Sample and recompute at a temperature, and record the log-probs before the temperature."""
    p, _ = _contexts(dump)
    q = _tempered(p, temperature)
    return _resampled(dump, q, q, p)


def top_p(dump: Planted, mass: float) -> Planted:
    p, _ = _contexts(dump)
    order = np.argsort(-p, axis=1)
    ranked = np.take_along_axis(p, order, axis=1)
    kept = np.zeros_like(p)
    np.put_along_axis(kept, order, ranked * (np.cumsum(ranked, axis=1) - ranked < mass), axis=1)
    q = kept / kept.sum(axis=1, keepdims=True)
    return _resampled(dump, q, p, q)


def top_k(dump: Planted, k: int) -> Planted:
    p, _ = _contexts(dump)
    cut = -np.sort(-p, axis=1)[:, k - 1 : k]
    kept = np.where(p >= cut, p, 0.0)
    q = kept / kept.sum(axis=1, keepdims=True)
    return _resampled(dump, q, p, q)


# Other weights. The difference of train and current log-probs is one real update.


def _ahead(dump: Planted, updates: np.ndarray | int) -> Planted:
    """Return train and current log-probs [T] of a trainer that is `updates` updates ahead of the engine."""
    train, current = (dump.tokens[name].astype(np.float64) for name in ("train_log_probs", "current_log_probs"))
    step = current - train
    moved = np.minimum(train + updates * step, 0.0)
    dump.tokens["current_log_probs"] = np.minimum(moved + step, 0.0).astype(np.float32)
    return _with_train(dump, moved)


def stale_policy(dump: Planted, lag: int, *, recorded: bool = True) -> Planted:
    dump.columns["train_version"] = dump.columns["rollout_version"] + (lag if recorded else 0)
    return _ahead(dump, lag)


def stale_worker(dump: Planted, lag: float, worker: int = 2) -> Planted:
    return _ahead(dump, lag * (dump.columns["worker"] == worker)[dump.row])


def growing(dump: Planted, lag: float, onset: int) -> Planted:
    """Move the trainer `lag` updates ahead with each step from `onset` on, without a version column."""
    return _ahead(dump, lag * np.maximum(dump.columns["step"] - onset + 1, 0)[dump.row])


def quantized_rollout(dump: Planted, scale: float) -> Planted:
    rollout, _ = _sides(dump)
    off = dump.random.normal(0, scale, 257)[dump.tokens["token_ids"]]
    return _with_rollout(dump, np.minimum(rollout + off * (1 - np.exp(rollout)), 0.0))


def cache_quantization(dump: Planted, scale: float) -> Planted:
    """Add noise to the logits that does not depend on the token and doubles over 100 positions."""
    rollout, _ = _sides(dump)
    noise = dump.random.normal(0, scale, len(rollout)) * (1 + dump.place / 100)
    return _with_rollout(dump, np.minimum(rollout + noise * (1 - np.exp(rollout)), 0.0))


def context_mismatch(dump: Planted, scale: float, reach: float = 30.0) -> Planted:
    """Change the trainer's logits at the start of the response, with a decreasing error."""
    _, train = _sides(dump)
    off = dump.random.normal(0, scale, len(train)) / (1 + dump.place / reach * 3)
    return _with_train(dump, np.minimum(train + off * (1 - np.exp(train)), 0.0))


def sure_experts(dump: Planted, noise: float, rate: float, far: float) -> Planted:
    """Scale the noise, and change the experts of a few tokens, without a column for experts."""
    rollout, _ = _sides(dump)
    flipped = dump.random.random(len(rollout)) < rate
    off = dump.random.normal(0, 1, len(rollout)) * np.where(flipped, far, noise)
    return _with_train(dump, np.minimum(rollout + off * (1 - np.exp(rollout)), 0.0))


def cut(dump: Planted, length: int) -> Planted:
    kept = dump.place < length
    return replace(
        dump,
        lengths=np.minimum(dump.lengths, length),
        tokens={name: values[kept] for name, values in dump.tokens.items()},
    )


def fading_weights(dump: Planted, scale: float, power: float) -> Planted:
    """Give each token of the vocabulary its own offset, which is larger in early, uncertain contexts."""
    rollout, _ = _sides(dump)
    off = dump.random.normal(0, scale, 257)[dump.tokens["token_ids"]] * (1.0 + dump.place) ** -power
    return _with_rollout(dump, np.minimum(rollout + off * (1 - np.exp(rollout)), 0.0))


def routing(dump: Planted, rate: float) -> Planted:
    """Route some tokens to other experts, with log-probs that differ by about 0.1. Both sides record the experts."""
    rollout, train = _sides(dump)
    total = len(rollout)
    experts = np.argsort(dump.random.random((total, 4, 8)), axis=2)[:, :, :2].astype(np.int8)
    other = experts.copy()
    flipped = dump.random.random(total) < rate
    other[flipped, 1] = (other[flipped, 1] + 1) % 8
    dump.tokens["rollout_experts"] = pa.FixedSizeListArray.from_arrays(pa.array(experts.reshape(-1)), 8)
    dump.tokens["train_experts"] = pa.FixedSizeListArray.from_arrays(pa.array(other.reshape(-1)), 8)
    off = dump.random.normal(0, 0.15, total) * flipped
    return _with_train(dump, np.minimum(train + off, 0.0))


# Changes of whole columns.


def identical(dump: Planted) -> Planted:
    return _with_train(dump, dump.tokens["rollout_log_probs"])


def shifted(dump: Planted, by: int, share: float = 1.0) -> Planted:
    """Move the rollout's log-probs along their rows, cyclically."""
    values, starts = dump.tokens["rollout_log_probs"].copy(), np.cumsum(dump.lengths) - dump.lengths
    for i in range(len(dump)):
        if dump.random.random() < share:
            part = slice(starts[i], starts[i] + dump.lengths[i])
            values[part] = np.roll(values[part], by)
    return _with_rollout(dump, values)


def rounded(dump: Planted, side: str, kind: str) -> Planted:
    values = dump.tokens[f"{side}_log_probs"].astype(np.float32)
    if kind == "bfloat16":
        bits = values.view(np.uint32)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    else:
        values = values.astype(np.float16).astype(np.float32) if kind == "float16" else np.round(values, int(kind))
    dump.tokens[f"{side}_log_probs"] = values
    return dump


def other_logarithm(dump: Planted, side: str, factor: float) -> Planted:
    dump.tokens[f"{side}_log_probs"] = (dump.tokens[f"{side}_log_probs"] * factor).astype(np.float32)
    return dump


def probabilities(dump: Planted, side: str) -> Planted:
    dump.tokens[f"{side}_log_probs"] = np.exp(dump.tokens[f"{side}_log_probs"])
    return dump


def duplicated(dump: Planted, share: float) -> Planted:
    again = np.flatnonzero(dump.random.random(len(dump)) < share)
    return dump.rows(np.concatenate([np.arange(len(dump)), again]))


# Changes of single tokens.


def _inserted(dump: Planted, rows: np.ndarray, at: np.ndarray, count: int, values: dict[str, Any]) -> Planted:
    starts = np.cumsum(dump.lengths) - dump.lengths
    where = np.repeat(starts[rows] + at, count)
    for name in dump.tokens:
        value = values.get(name, 0)
        new = value(len(where)) if callable(value) else np.full(len(where), value)
        dump.tokens[name] = np.insert(dump.tokens[name], where, new.astype(dump.tokens[name].dtype))
    dump.lengths = dump.lengths.copy()
    dump.lengths[rows] += count
    return dump


def _denied(dump: Planted) -> Callable[[int], np.ndarray]:
    """Return log-probs of tokens that the trainer would hardly sample."""
    return lambda n: -dump.random.exponential(3.0, n) - 0.3


def unsampled_tokens(dump: Planted, count: int, share: float = 0.5) -> Planted:
    """Insert tool output into some rows without masking it. The engine reports 0."""
    rows = np.flatnonzero((dump.random.random(len(dump)) < share) & (dump.lengths > 10))
    values = {"train_log_probs": _denied(dump), "current_log_probs": _denied(dump), "response_mask": True}
    return _inserted(dump, rows, dump.lengths[rows] // 2, count, values)


def mask_covers_prompt(dump: Planted, count: int) -> Planted:
    rows = np.arange(len(dump))
    values = {"train_log_probs": _denied(dump), "current_log_probs": _denied(dump), "response_mask": True}
    return _inserted(dump, rows, np.zeros(len(rows), np.int64), count, values)


def mask_covers_scored_prompt(dump: Planted, count: int) -> Planted:
    """Insert a prompt before each response. The two sides agree on its tokens except for noise."""
    names, prompts = np.unique(dump.columns["prompt_id"], return_inverse=True)
    ids, scores = dump.random.integers(0, 99, (len(names), count)), -dump.random.exponential(2.0, (len(names), count))

    def score(number: int) -> np.ndarray:
        return scores[prompts].ravel() + dump.random.normal(0, 1e-3, number)

    values: dict[str, Any] = {f"{name}_log_probs": score for name in ("rollout", "train", "current")}
    values |= {"token_ids": lambda n: ids[prompts].ravel(), "response_mask": True}
    rows = np.arange(len(dump))
    return _inserted(dump, rows, np.zeros(len(rows), np.int64), count, values)


def mask_inverted(dump: Planted, count: int) -> Planted:
    dump = mask_covers_prompt(dump, count)
    dump.tokens["response_mask"] = dump.place < count
    return dump


def edited(dump: Planted, share: float, kept: float = 0.5) -> Planted:
    """Replace the end of some rows by the trainer's log-probs of another row."""
    values = dump.tokens["train_log_probs"].copy()
    starts = np.cumsum(dump.lengths) - dump.lengths
    for i in np.flatnonzero((dump.random.random(len(dump)) < share) & (dump.lengths > 30)):
        cut = starts[i] + int(kept * dump.lengths[i])
        end = starts[i] + dump.lengths[i]
        values[cut:end] = dump.random.permutation(dump.tokens["rollout_log_probs"])[: end - cut]
    return _with_train(dump, values)


def placeholder(dump: Planted, side: str, value: float, share: float) -> Planted:
    chosen = dump.random.random(len(dump.row)) < share
    dump.tokens[f"{side}_log_probs"] = np.where(chosen, value, dump.tokens[f"{side}_log_probs"]).astype(np.float32)
    return dump


def no_end(dump: Planted) -> Planted:
    """Set the rollout's log-prob of the last token to 0."""
    last = dump.place == dump.lengths[dump.row] - 1
    dump.tokens["train_log_probs"] = np.where(last, -2.5, dump.tokens["train_log_probs"]).astype(np.float32)
    return _with_rollout(dump, np.where(last, 0.0, dump.tokens["rollout_log_probs"]))


# Columns with wrong numbers, or with right numbers in the wrong position.


def by_row(dump: Planted, side: str, change: Callable[[np.ndarray], np.ndarray]) -> Planted:
    parts = np.split(dump.tokens[f"{side}_log_probs"].astype(np.float64), np.cumsum(dump.lengths)[:-1])
    dump.tokens[f"{side}_log_probs"] = np.concatenate([change(part) for part in parts]).astype(np.float32)
    return dump


def reversed_rows(dump: Planted) -> Planted:
    return by_row(dump, "rollout", lambda row: row[::-1])


def cumulative(dump: Planted, side: str = "rollout") -> Planted:
    return by_row(dump, side, np.cumsum)


def sequence_means(dump: Planted) -> Planted:
    return by_row(dump, "rollout", lambda row: np.full(len(row), row.mean()))


def clamped(dump: Planted, bound: float) -> Planted:
    return by_row(dump, "rollout", lambda row: np.maximum(row, bound))


def swapped(dump: Planted, share: float) -> Planted:
    parts = np.split(dump.tokens["rollout_log_probs"], np.cumsum(dump.lengths)[:-1])
    chosen = np.flatnonzero(dump.random.random(len(dump)) < share)
    new = list(parts)
    for i, j in zip(chosen, np.roll(chosen, 1), strict=True):
        new[i] = np.resize(parts[j], len(parts[i]))
    dump.tokens["rollout_log_probs"] = np.concatenate(new)
    return dump


def wrong_ends(dump: Planted, share: float) -> Planted:
    ends = np.cumsum(dump.lengths) - 1
    dump.tokens["train_log_probs"][ends[dump.random.random(len(dump)) < share]] = -6.0
    return dump


def penalized(dump: Planted, size: float, freed: float = 0.6) -> Planted:
    """Lower the rollout's logits of tokens that occurred before by `size`, and raise others to `freed` times that."""
    rollout, _ = _sides(dump)
    p = np.exp(rollout)
    seen = np.zeros(len(p), np.bool_)
    for part in np.split(np.arange(len(p)), np.cumsum(dump.lengths)[:-1]):
        ids = dump.tokens["token_ids"][part]
        seen[part] = np.arange(len(ids)) > np.array([int(np.flatnonzero(ids == token)[0]) for token in ids])
    off = np.where(seen, -size, freed * size) * (1 - p)
    return _with_rollout(dump, np.minimum(rollout + off, -1e-6))


def biased(dump: Planted, size: float) -> Planted:
    rollout, _ = _sides(dump)
    logit = rollout - np.log(-np.expm1(np.minimum(rollout, -1e-6)))
    moved = logit + size * np.isin(dump.tokens["token_ids"], (101, 116))
    return _with_rollout(dump, np.minimum(-np.log1p(np.exp(-moved)), -1e-7))


def one_step_off(dump: Planted, lag: float, step: int) -> Planted:
    """Move the trainer `lag` updates ahead in one step, without a version column."""
    return _ahead(dump, lag * (dump.columns["step"] == step)[dump.row])


def farther(dump: Planted, scale: float) -> Planted:
    """Change the trainer's logits by the square of the distance from the start."""
    _, train = _sides(dump)
    off = dump.random.normal(0, scale, len(train)) * np.minimum((dump.place / 60) ** 2, 4)
    return _with_train(dump, np.minimum(train + off * (1 - np.exp(train)), 0.0))
