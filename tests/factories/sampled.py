"""Dumps of small random language models, with one planted fault of a chosen severity.

A model is a random recurrent network in numpy, so a dump of 20,000 tokens takes about a second. Models differ in
vocabulary, certainty and noise. No test of `diagnose` was developed on these models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray
Process = Callable[[Array, Array], Array]
"""Map logits [B, V] and the counts of earlier tokens [B, V] to the logits that are sampled from."""


@dataclass(frozen=True)
class Model:
    """A random recurrent network with states [H]. `focus` gives the certainty of a state."""

    mix: Array
    embed: Array
    head: Array
    bias: Array
    focus: Array
    certainty: float

    @classmethod
    def of(cls, seed: int, vocabulary: int = 256, certainty: float = 2.0, width: int = 24) -> Model:
        rng = np.random.default_rng(seed)
        mix = rng.normal(0, 0.7 / np.sqrt(width), (width, width))
        embed, head = rng.normal(0, 0.8, (vocabulary, width)), rng.normal(0, 1 / np.sqrt(width), (width, vocabulary))
        return cls(mix, embed, head, rng.normal(0, 0.7, vocabulary), rng.normal(0, 0.35, width), certainty)

    def moved(self, seed: int, size: float) -> Model:
        """Return the model after updates that move the output weights and biases."""
        rng = np.random.default_rng(seed)
        head = self.head + size * rng.normal(0, 1 / np.sqrt(len(self.mix)), self.head.shape)
        return replace(self, head=head, bias=self.bias + size * rng.normal(0, 1, len(self.bias)))

    def step(self, state: Array, token: Array) -> Array:
        return np.tanh(state @ self.mix + self.embed[token])

    def logits(self, state: Array) -> Array:
        scale = self.certainty * np.exp(np.clip(state @ self.focus, -1.2, 1.2))
        return (state @ self.head + 0.5 * self.bias) * scale[:, None]


@dataclass(frozen=True)
class Setup:
    """Sampling and scoring of a dump. Each field can contain a fault.

    older: the engine's weights up to the fraction `older_until` of the response.
    noise: standard deviation of the noise of the logits, by side.
    process, trainer_process: changes of the logits before the engine samples and before the trainer scores.
    raw: whether the engine records log-probs from before `process`.
    engine_shift, trainer_shift: offsets of the state by row [B, H], from position `shift_from` [B] on.
    masked: mask of observation tokens in the response [T].
    """

    rows: int = 96
    per_prompt: int = 8
    longest: int = 220
    steps: int = 4
    noise: tuple[float, float] = (0.006, 0.0)
    process: Process | None = None
    trainer_process: Process | None = None
    raw: bool = False
    engine_shift: Array | None = None
    trainer_shift: Array | None = None
    shift_from: Array | None = None
    masked: Array | None = None
    older: Model | None = None
    older_until: float = 1.0
    relative_noise: float = 0.0
    trainer_lost: float = 0.0
    """Share of the prompt's influence that the trainer loses."""


@dataclass
class Dump:
    tokens: dict[str, list[Array]]
    columns: dict[str, list[Any]]
    best: list[Array] = field(default_factory=list)
    """The engine's log-probs of the most likely tokens."""

    def __len__(self) -> int:
        return len(self.tokens["rollout_log_probs"])

    def write(self, path: Path) -> Path:
        data = {name: pa.array([row.tolist() for row in rows]) for name, rows in self.tokens.items()}
        for name in ("rollout_log_probs", "train_log_probs", "entropy"):
            if name in data:
                data[name] = data[name].cast(pa.list_(pa.float32()))
        pq.write_table(pa.table({**{name: pa.array(values) for name, values in self.columns.items()}, **data}), path)
        return path

    def each(self, column: str, change: Callable[[Array, int], Array]) -> Dump:
        return replace(
            self, tokens={**self.tokens, column: [change(row, i) for i, row in enumerate(self.tokens[column])]}
        )


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


_HEALTHY: dict[tuple[int, int], tuple[Model, Dump]] = {}
"""Healthy dumps by model and seed, from which the faults of a dump start."""


def sampled(model: Model, seed: int, setup: Setup | None = None, first_row: int = 0, step: int = 0) -> Dump:
    """Sample responses with the engine and score them with the trainer."""
    if setup is None:
        if (id(model), seed) not in _HEALTHY:
            _HEALTHY[id(model), seed] = model, sampled(model, seed, Setup(), first_row, step)
        kept = _HEALTHY[id(model), seed][1]
        return replace(kept, tokens=dict(kept.tokens), columns=dict(kept.columns))
    rng = np.random.default_rng(seed)
    rows, vocabulary = setup.rows, len(model.bias)
    every = np.arange(rows)
    prompts = rng.integers(0, vocabulary, (rows // setup.per_prompt + 1, 12))[every // setup.per_prompt]
    lengths = np.minimum(rng.geometric(2.0 / setup.longest, rows) + 24, setup.longest)
    state = np.zeros((rows, len(model.mix)))
    for token in prompts.T:
        state = model.step(state, token)
    engine, trainer = state, state * (1 - setup.trainer_lost)
    seen = np.zeros((rows, vocabulary))
    found: dict[str, list[Array]] = {name: [] for name in ("r", "t", "ids", "entropy", "best", "old")}
    for place in range(int(lengths.max())):
        older = setup.older is not None
        old = (place < setup.older_until * lengths) & older
        logits = model.logits(engine)
        if older:
            assert setup.older is not None
            logits = np.where(old[:, None], setup.older.logits(engine), logits)
        if setup.relative_noise:
            logits = logits * (1 + setup.relative_noise * rng.normal(0, 1, logits.shape))
        raw = logits + rng.normal(0, setup.noise[0], logits.shape)
        processed = raw if setup.process is None else setup.process(raw, seen)
        own = log_softmax(processed)
        token = (own + rng.gumbel(size=own.shape)).argmax(axis=1)
        if setup.masked is not None and setup.masked[place]:
            token = rng.integers(0, vocabulary, rows)
        said = log_softmax(raw) if setup.raw else own
        scored = model.logits(trainer) + rng.normal(0, setup.noise[1], logits.shape)
        if setup.trainer_process is not None:
            scored = setup.trainer_process(scored, seen)
        theirs = log_softmax(scored)
        found["r"].append(said[every, token])
        found["t"].append(theirs[every, token])
        found["ids"].append(token)
        found["entropy"].append(-(np.exp(theirs) * np.maximum(theirs, -80)).sum(axis=1))
        found["best"].append(said.max(axis=1))
        found["old"].append(old)
        seen[every, token] += 1
        engine, trainer = model.step(engine, token), model.step(trainer, token)
        if setup.shift_from is not None:
            on = (place >= setup.shift_from)[:, None]
            engine = engine if setup.engine_shift is None else engine + setup.engine_shift * on
            trainer = trainer if setup.trainer_shift is None else trainer + setup.trainer_shift * on
    flat = {name: np.array(values).T for name, values in found.items()}
    rollout = [row[:n] for row, n in zip(flat["r"], lengths, strict=True)]
    tokens = {
        "rollout_log_probs": rollout,
        "train_log_probs": [row[:n] for row, n in zip(flat["t"], lengths, strict=True)],
        "token_ids": [row[:n] for row, n in zip(flat["ids"], lengths, strict=True)],
        "entropy": [row[:n] for row, n in zip(flat["entropy"], lengths, strict=True)],
    }
    if setup.older is not None:
        tokens["old"] = [row[:n] for row, n in zip(flat["old"], lengths, strict=True)]
    if setup.masked is not None:
        mask = (~setup.masked).astype(np.int8)
        tokens["response_mask"] = [mask[:n] for n in lengths]
        tokens["rollout_log_probs"] = [np.where(setup.masked[: len(row)], 0.0, row) for row in rollout]
    group = every // setup.per_prompt
    columns = {
        "step": (step + group % setup.steps).tolist(),
        "prompt_id": [f"{step}-{number}" for number in group],
        "sequence_id": (first_row + every).tolist(),
    }
    best = [row[:n] for row, n in zip(flat["best"], lengths, strict=True)]
    return Dump(tokens, columns, best)


# Logit processors of engines.


def sampler(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, repetition: float = 1.0
) -> Process:
    """Return the settings of a sampler, in the order in which vLLM applies them."""

    def process(logits: Array, seen: Array) -> Array:
        if repetition != 1:
            punished = np.where(logits > 0, logits / repetition, logits * repetition)
            logits = np.where(seen > 0, punished, logits)
        logits = logits / temperature
        if top_k:
            least = np.partition(logits, -top_k, axis=1)[:, -top_k][:, None]
            logits = np.where(logits < least, -1e9, logits)
        if top_p < 1:
            p = np.exp(log_softmax(logits))
            order = np.argsort(-p, axis=1)
            ranked = np.take_along_axis(p, order, axis=1)
            gone = np.zeros(p.shape, bool)
            np.put_along_axis(gone, order, np.cumsum(ranked, axis=1) - ranked >= top_p, axis=1)
            logits = np.where(gone, -1e9, logits)
        if min_p > 0:
            p = np.exp(log_softmax(logits))
            logits = np.where(p < min_p * p.max(axis=1, keepdims=True), -1e9, logits)
        return logits

    return process


def joined(dumps: list[Dump]) -> Dump:
    tokens = {name: [row for one in dumps for row in one.tokens[name]] for name in dumps[0].tokens}
    columns = {name: [value for one in dumps for value in one.columns[name]] for name in dumps[0].columns}
    return Dump(tokens, columns, [row for one in dumps for row in one.best])


# Faults. The severity is between 0 and 1, and is often a share of tokens, rows or prompts.

Fault = Callable[[Model, int, float], Dump]


def clean(model: Model, seed: int, severity: float = 0.0, **setup: Any) -> Dump:
    return sampled(model, seed, Setup(**setup))


def other_token(model: Model, seed: int, severity: float) -> Dump:
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 1)
    return dump.each("rollout_log_probs", lambda row, i: np.where(rng.random(len(row)) < severity, dump.best[i], row))


def other_token_in_rows(model: Model, seed: int, severity: float) -> Dump:
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 1)
    chosen = rng.random(len(dump)) < severity
    return dump.each("rollout_log_probs", lambda row, i: dump.best[i] if chosen[i] else row)


def _of_prompts(setup: Setup, seed: int, share: float) -> Array:
    """Return a mask of the rows [B] of a share of the prompts, at least one."""
    prompts = np.arange(setup.rows) // setup.per_prompt
    order = np.random.default_rng(seed + 2).permutation(prompts.max() + 1)
    return np.isin(prompts, order[: max(1, round(share * len(order)))])


def engine_state(model: Model, seed: int, severity: float, side: str = "engine", start: float = 0.3) -> Dump:
    """Shift the state of one side from a position on, for a share of the prompts."""
    setup = Setup()
    rng = np.random.default_rng(seed + 3)
    chosen = _of_prompts(setup, seed, severity)
    shift = np.where(chosen[:, None], rng.normal(0, 0.5, (1, len(model.mix))), 0.0)
    at = np.full(setup.rows, round(start * 60))
    return sampled(model, seed, replace(setup, shift_from=at, **{f"{side}_shift": shift}))


def end_of_length(model: Model, seed: int, severity: float, count: int = 6, side: str = "train") -> Dump:
    setup = Setup(longest=int(150 - 80 * severity))
    dump, rng = sampled(model, seed, setup), np.random.default_rng(seed + 4)
    other = rng.permutation(np.concatenate(dump.tokens["train_log_probs"]))
    most = max(len(row) for row in dump.tokens["token_ids"])

    def change(row: Array, i: int) -> Array:
        return np.append(row[:-count], rng.choice(other, count)) if len(row) == most else row

    return dump.each(f"{side}_log_probs", change)


def edited(model: Model, seed: int, severity: float, shifted: bool = True, place: int | None = None) -> Dump:
    """Replace the trainer's log-probs from a position on, in a share of the rows: a random one, or `place`."""
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 12)
    pool = np.concatenate(dump.tokens["train_log_probs"])

    def change(row: Array, i: int) -> Array:
        if rng.random() > severity:
            return row
        at = place or rng.integers(len(row) // 3, max(len(row) - 8, len(row) // 3 + 1))
        if len(row) <= at:
            return row
        rest = np.append(row[at + 1 :], rng.choice(pool)) if shifted else rng.choice(pool, len(row) - at)
        return np.append(row[:at], rest)

    return dump.each("train_log_probs", change)


def edited_span(model: Model, seed: int, severity: float) -> Dump:
    """Replace a span of a share of the rows after sampling. The effect on later tokens fades."""
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 13)
    pool = np.concatenate(dump.tokens["train_log_probs"])

    def change(row: Array, i: int) -> Array:
        if rng.random() > severity or len(row) < 40:
            return row
        length = int(rng.integers(8, 16))
        at = int(rng.integers(6, len(row) - length - 10))
        after = np.arange(len(row) - at - length)
        fading = rng.normal(0, 0.3, len(after)) * np.exp(-after / 6) * -np.expm1(row[at + length :])
        rest = np.minimum(row[at + length :] + fading, 0.0)
        return np.concatenate([row[:at], rng.choice(pool, length), rest])

    return dump.each("train_log_probs", change)


def partial_rollout(model: Model, seed: int, severity: float) -> Dump:
    setup = Setup(older=model.moved(seed, 0.12), older_until=max(severity, 0.02))
    dump = sampled(model, seed, setup)
    dump.tokens["rollout_version"] = [np.where(old, 3, 5) for old in dump.tokens.pop("old")]
    dump.columns["train_version"] = [5] * len(dump)
    return dump


def _turns(longest: int, turn: int = 40, gap: int = 15) -> Array:
    place = np.arange(longest)
    return place % (turn + gap) >= turn


def context_from_turn(model: Model, seed: int, severity: float) -> Dump:
    setup = Setup(longest=260)
    masked = _turns(setup.longest)
    chosen = _of_prompts(setup, seed, severity)
    shift = np.where(chosen[:, None], np.random.default_rng(seed + 5).normal(0, 0.35, (1, len(model.mix))), 0.0)
    at = np.full(setup.rows, 50)
    return sampled(model, seed, replace(setup, masked=masked, trainer_shift=shift, shift_from=at))


def packed_columns(model: Model, seed: int, severity: float, side: str = "rollout") -> Dump:
    """Pack the values of one side without the masked gaps, in a share of the rows."""
    setup = Setup(longest=260)
    dump = sampled(model, seed, replace(setup, masked=_turns(setup.longest)))
    rng = np.random.default_rng(seed + 6)

    def change(row: Array, i: int) -> Array:
        kept = row[dump.tokens["response_mask"][i] == 1]
        return np.append(kept, np.zeros(len(row) - len(kept))) if rng.random() < severity else row

    return dump.each(f"{side}_log_probs", change)


def log_densities(model: Model, seed: int, severity: float, sigma: float = 0.1, dims: int = 1) -> Dump:
    rng = np.random.default_rng(seed)
    rows, length = 96, 20
    z = rng.normal(0, 1, (rows, length, dims))
    scale = sigma * np.exp(rng.normal(0, 0.2, (rows, length, dims)))
    density = (-0.5 * z**2 - np.log(scale) - 0.5 * np.log(2 * np.pi)).sum(axis=2)
    train = density + rng.normal(0, 1e-5, density.shape)
    return Dump(
        {"rollout_log_probs": list(density), "train_log_probs": list(train)},
        {"step": [0] * rows, "sequence_id": list(range(rows))},
    )


def length_mismatch(model: Model, seed: int, severity: float, kind: str = "doubled") -> Dump:
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 7)
    chosen = rng.random(len(dump)) < severity
    chosen[0] = True
    if kind == "doubled":  # a list of 2n + 1

        def change(row: Array, i: int) -> Array:
            return row[: (len(row) - 1) // 2] if chosen[i] else row

        return dump.each("rollout_log_probs", change)
    cut = {"first": slice(1, None), "last": slice(None, -1)}[kind]
    return dump.each("rollout_log_probs", lambda row, i: row[cut] if chosen[i] else row)


def unmasked_padding(model: Model, seed: int, severity: float, value: float = 0.0) -> Dump:
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 8)
    most = max(len(row) for row in dump.tokens["token_ids"])
    chosen = rng.random(len(dump)) < severity
    for name in ("rollout_log_probs", "train_log_probs", "token_ids"):
        pad = 0 if name == "token_ids" else value
        dump = dump.each(name, lambda row, i, pad=pad: np.append(row, np.full((most - len(row)) * int(chosen[i]), pad)))
    dump.tokens.pop("entropy")
    return dump


def both(model: Model, seed: int, change: Callable[[Array], Array]) -> Dump:
    dump = sampled(model, seed)
    for name in ("rollout_log_probs", "train_log_probs"):
        dump = dump.each(name, lambda row, i: change(row))
    dump.tokens.pop("entropy")
    return dump


def both_negated(model: Model, seed: int, severity: float) -> Dump:
    return both(model, seed, np.negative)


def both_probabilities(model: Model, seed: int, severity: float) -> Dump:
    return both(model, seed, np.exp)


def constant_column(model: Model, seed: int, severity: float, value: float = 0.0, side: str = "rollout") -> Dump:
    return sampled(model, seed).each(f"{side}_log_probs", lambda row, i: np.full(len(row), value))


def never_updated(model: Model, seed: int, severity: float, steps: int = 12, lag: int = 1) -> Dump:
    parts, size = [], 0.02 + 0.06 * severity
    trainer = model
    for step in range(steps):
        setup = Setup(rows=16, steps=1, longest=120, older=model, older_until=2.0)
        part = sampled(trainer, seed + step, setup, first_row=16 * step, step=step)
        part.tokens.pop("old")
        part.columns["train_version"] = [step + lag] * len(part)
        part.columns["rollout_version"] = [max(step + lag - lag, 0)] * len(part)
        parts.append(part)
        trainer = trainer.moved(seed + 100, size)
    return joined(parts)


def entropy_of_another_temperature(model: Model, seed: int, severity: float) -> Dump:
    return sampled(model, seed, Setup(process=sampler(1 - 0.6 * severity), raw=True))


def batch_dependent(model: Model, seed: int, severity: float, recorded: bool = True) -> Dump:
    dump = sampled(model, seed, Setup(noise=(0.0, 0.0)))
    rng = np.random.default_rng(seed + 9)
    batch = np.arange(len(dump)) // 8
    other = np.isin(batch, rng.permutation(batch.max() + 1)[: max(1, round(severity * (batch.max() + 1)))])

    def change(row: Array, i: int) -> Array:
        off = 2e-4 * rng.normal(0, 1, len(row)) * (1 - np.exp(row))
        return np.minimum(row + off, 0.0) if other[i] else row

    dump = dump.each("rollout_log_probs", change)
    if recorded:
        dump.columns["micro_batch"] = batch.tolist()
    return dump


def prefixes_removed(model: Model, seed: int, severity: float) -> Dump:
    dump, rng = sampled(model, seed), np.random.default_rng(seed + 10)
    gone = np.where(rng.random(len(dump)) < severity, rng.integers(1, 4, len(dump)), 0)

    def change(row: Array, i: int) -> Array:
        return np.append(row[gone[i] :], -rng.exponential(2.0, gone[i]))

    return dump.each("train_log_probs", change)


def nearly_bitwise(model: Model, seed: int, severity: float, count: int = 10) -> Dump:
    dump = sampled(model, seed, Setup(noise=(0.0, 0.0)))
    rng = np.random.default_rng(seed + 11)
    dump = dump.each("rollout_log_probs", lambda row, i: row.astype(np.float32))
    dump.tokens["train_log_probs"] = [row.copy() for row in dump.tokens["rollout_log_probs"]]
    unsure = [(i, k) for i, row in enumerate(dump.tokens["rollout_log_probs"]) for k in np.flatnonzero(row < -0.5)]
    for at in rng.choice(len(unsure), count, replace=False):
        i, k = unsure[at]
        dump.tokens["train_log_probs"][i][k] *= np.float32(1.001)
    return dump


def coarse_logits(model: Model, seed: int, severity: float) -> Dump:
    """Add relative noise to the engine's logits, as 8-bit arithmetic does."""
    return sampled(model, seed, Setup(relative_noise=0.01 + 0.04 * severity))


# Corruptions of a share of tokens or rows, for the test that severity never falls with more corruption.


def _at_tokens(change: Callable[[Array, np.random.Generator, Array], Array]) -> Fault:
    def fault(model: Model, seed: int, severity: float) -> Dump:
        dump, rng = sampled(model, seed), np.random.default_rng(seed + 20)
        pool = np.concatenate(dump.tokens["rollout_log_probs"])
        return dump.each(
            "rollout_log_probs",
            lambda row, i: np.where(rng.random(len(row)) < severity, change(row, rng, pool), row),
        )

    return fault


def _at_rows(change: Callable[[Array, np.random.Generator, Array], Array]) -> Fault:
    def fault(model: Model, seed: int, severity: float) -> Dump:
        dump, rng = sampled(model, seed), np.random.default_rng(seed + 20)
        pool = np.concatenate(dump.tokens["rollout_log_probs"])
        order = rng.permutation(len(dump))
        chosen = np.isin(np.arange(len(dump)), order[: max(1, round(severity * len(dump)))])
        return dump.each("rollout_log_probs", lambda row, i: change(row, rng, pool) if chosen[i] else row)

    return fault


def _noisy(row: Array, rng: np.random.Generator, pool: Array) -> Array:
    return -np.abs(row + rng.normal(0, 3.0, len(row)))


def _slightly_noisy(row: Array, rng: np.random.Generator, pool: Array) -> Array:
    return np.minimum(row + rng.normal(0, 0.6, len(row)) * (1 - np.exp(row)), 0.0)


def _of_others(row: Array, rng: np.random.Generator, pool: Array) -> Array:
    return rng.choice(pool, len(row))


CORRUPTIONS: dict[str, Fault] = {
    "tokens: noise of 3 nats": _at_tokens(_noisy),
    "tokens: noise of 0.6 in the logits": _at_tokens(_slightly_noisy),
    "tokens: values of other tokens": _at_tokens(_of_others),
    "tokens: 0": _at_tokens(lambda row, rng, pool: np.zeros(len(row))),
    "tokens: -30": _at_tokens(lambda row, rng, pool: np.full(len(row), -30.0)),
    "tokens: NaN": _at_tokens(lambda row, rng, pool: np.full(len(row), np.nan)),
    "rows: noise of 3 nats": _at_rows(_noisy),
    "rows: noise of 0.6 in the logits": _at_rows(_slightly_noisy),
    "rows: values of other rows": _at_rows(_of_others),
    "rows: shifted": _at_rows(lambda row, rng, pool: np.append(row[1:], rng.choice(pool))),
    "rows: negated": _at_rows(lambda row, rng, pool: -row),
    "rows: base 2": _at_rows(lambda row, rng, pool: row / np.log(2)),
    "rows: probabilities": _at_rows(lambda row, rng, pool: np.exp(row)),
    "rows: reversed": _at_rows(lambda row, rng, pool: row[::-1]),
    "rows: 0": _at_rows(lambda row, rng, pool: np.zeros(len(row))),
    "other token": other_token,
    "edited": edited,
    "engine state": engine_state,
    "prefixes removed": prefixes_removed,
    "packed columns": packed_columns,
    "padding 0": unmasked_padding,
    "padding -1": lambda model, seed, severity: unmasked_padding(model, seed, severity, -1.0),
    "lengths": length_mismatch,
    "context from a turn": context_from_turn,
}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.3, 0.6, 1.0)
