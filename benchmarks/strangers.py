"""Small language models that no test was written on: trained here, sampled from, and truly scored again.

Architectures that sample_data does not have, some sure of themselves and some not. An engine decodes token by token
with a cache, in its own numerics and with its own settings; a trainer scores the same tokens with one prefill.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from stranger_plans import CONTEXT, PROMPT, RESPONSE, Architecture, Text
from torch import Tensor, nn

SPARE = 24
"""Rows of the head that stand for no token: padding of the vocabulary to a round number."""
VERSIONS = 7


@dataclass(frozen=True)
class Numerics:
    """How a pass computes, and what is wrong with it.

    `dtype` "bfloat16" rounds weights and activations, "float64" is for a reference; `rope` multiplies the base;
    `window` bounds attention; `noise` is on the router's logits; `cap` bounds the logits smoothly; `spare` counts the
    head's padding; `coarse` names what alone is in bfloat16: "router" or "logits"; `order` is one of many in which the
    terms of a matrix product are added, chunk by chunk, each sum rounded to `dtype`.
    """

    dtype: str = "float32"
    rope: float = 1.0
    window: int | None = None
    dropout: float = 0.0
    fp8_cache: bool = False
    noise: float = 0.0
    cap: float | None = None
    spare: bool = False
    blanked: int = 0
    shifted_positions: int = 0
    coarse: str = ""
    order: int | None = None


@dataclass(frozen=True)
class Processors:
    """What an engine does to logits before it samples, in the order of these fields."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: float = 0.0
    banned: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Tensor, prompt: Tensor, response: Tensor) -> Tensor:
        """Logits [..., V] by counts of the tokens of prompt and response so far [..., V]."""
        if self.repetition != 1:
            seen = (prompt + response) > 0
            punished = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(seen, punished, logits)
        logits = logits - self.presence * (response > 0) - self.frequency * response
        every = torch.arange(logits.shape[-1])
        logits = logits + self.bias * (every % 37 == 5)
        if self.banned:
            logits = logits.masked_fill(every % 29 == 7, -torch.inf)
        logits = logits / self.temperature
        if self.top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[..., -1:], -torch.inf)
        if self.top_p < 1:
            ranked, order = logits.softmax(-1).sort(descending=True)
            beyond = ranked.cumsum(-1) - ranked >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        if self.min_p > 0:
            p = logits.softmax(-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return logits


CHUNKS, TAPS = 4, 4


def times(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, added in float32 and rounded once, as accelerators do: without instructions for it, 15 times as fast."""
    return (full(x) @ full(y)).to(x.dtype)


def product(x: Tensor, matrix: Tensor, how: Numerics) -> Tensor:
    """x @ matrix, its terms added in the order of the numerics."""
    if how.order is None:
        return times(x, matrix)
    order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(how.order + len(matrix)))
    first, *others = (times(x[..., part], matrix[part]) for part in order.chunk(CHUNKS))
    for other in others:
        first = first + other
    return first


class Block(nn.Module):
    """Attention (or a convolution of the same matrices) and a feed-forward part, plain or of experts."""

    def __init__(self, plan: Architecture, number: int) -> None:
        super().__init__()
        self.plan, width = plan, plan.width
        self.size = width // plan.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * width // plan.shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        hidden = width * (4 if plan.parallel else 2) if plan.experts == 1 else width // 2
        self.up = nn.Parameter(torch.randn(plan.experts, width, 2 * hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(plan.experts, hidden, width) * hidden**-0.5 / plan.layers)
        self.router = nn.Linear(width, plan.experts, bias=False)
        self.convolved = plan.convolved and number % 2 == 0
        if self.convolved:
            self.taps = nn.Parameter(torch.randn(TAPS, width) * TAPS**-0.5)

    def attend(self, x: Tensor, start: int, cache: list[Tensor], how: Numerics) -> Tensor:
        batch, length, width = x.shape
        q = product(x, self.q.weight.T, how).view(batch, length, -1, self.size).transpose(1, 2)
        k, v = product(x, self.kv.weight.T, how).view(batch, length, 2, -1, self.size).permute(2, 0, 3, 1, 4).unbind(0)
        place = torch.arange(start, start + length)
        if self.plan.positions == "rope":
            q, k = (turned(values, place + how.shifted_positions, 1e4 * how.rope) for values in (q, k))
        if how.fp8_cache:
            k, v = through_fp8(k), through_fp8(v)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        k, v = (values.repeat_interleave(self.plan.shared, 1) for values in (k, v))
        far = place[:, None] - torch.arange(k.shape[2])
        scores = full(times(q, k.transpose(-1, -2))) * self.size**-0.5
        if self.plan.positions == "alibi":
            slopes = 2.0 ** -(1 + torch.arange(self.plan.heads)) / how.rope
            scores = scores - slopes[:, None, None] * far.clamp_min(0)
        hidden = (far < 0) | (far >= (how.window or CONTEXT + 1))
        mixed = times(scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype), v)
        return product(mixed.transpose(1, 2).reshape(batch, length, width), self.out.weight.T, how)

    def convolve(self, x: Tensor, cache: list[Tensor], how: Numerics) -> Tensor:
        batch, length, width = x.shape
        gate = product(x, self.q.weight.T, how)
        values, opened = product(x, self.kv.weight.T, how).chunk(2, -1)
        values = values * opened.sigmoid()
        if how.fp8_cache:
            values = through_fp8(values)
        past = cache[0][:, 0] if cache else values.new_zeros(batch, 0, width)
        whole = torch.cat([past, values], 1)
        cache[:] = [whole[:, None]]
        seen = F.pad(whole, (0, 0, TAPS - 1, 0))[:, -(length + TAPS - 1) :]
        mixed = torch.stack([seen[:, i : i + length] * tap for i, tap in enumerate(self.taps)]).sum(0)
        return product(gate * mixed, self.out.weight.T, how)

    def feed(self, x: Tensor, how: Numerics) -> Tensor:
        inner = product(x, self.up.transpose(0, 1).flatten(1), how).unflatten(-1, self.up.shape[::2])
        a, b = inner.chunk(2, -1)
        inner = F.relu(a).square() if self.plan.parallel else F.silu(a) * b
        if self.plan.experts == 1:
            return product(inner[:, :, 0], self.down[0], how)
        logits = full(product(x, self.router.weight.T, how))
        logits = coarse(logits) if how.coarse == "router" else logits
        logits = logits + how.noise * torch.randn_like(logits) if how.noise else logits
        gates = logits.sigmoid() if self.plan.router == "sigmoid" else logits.softmax(-1)
        best, chosen = gates.topk(self.plan.chosen)
        if self.plan.router == "sigmoid":
            best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(gates).scatter(-1, chosen, best).to(x.dtype)
        return product((inner * weights[..., None]).flatten(2), self.down.flatten(0, 1), how)

    def forward(self, x: Tensor, start: int, cache: list[Tensor], how: Numerics) -> Tensor:
        def dropped(part: Tensor) -> Tensor:
            return F.dropout(part, how.dropout, training=how.dropout > 0)

        normed = self.norms[0](x)
        attended = dropped(
            self.convolve(normed, cache, how) if self.convolved else self.attend(normed, start, cache, how)
        )
        if self.plan.parallel:
            return x + attended + dropped(self.feed(self.norms[1](x), how))
        x = x + attended
        return x + dropped(self.feed(self.norms[1](x), how))


class Model(nn.Module):
    """A causal language model over `vocabulary` tokens; the last ends the text."""

    def __init__(self, plan: Architecture, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan, number) for number in range(plan.layers))
        self.norm, self.head = nn.RMSNorm(plan.width), nn.Linear(plan.width, vocabulary + SPARE, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None, how: Numerics) -> Tensor:
        """Logits [B, L, V]; with caches, `tokens` follow what these hold."""
        caches = [[] for _ in self.blocks] if caches is None else caches
        start = caches[0][0].shape[2] if caches[0] else 0
        x = self.embed(tokens)
        if how.blanked and not start:
            x = torch.cat([self.embed(torch.zeros_like(tokens[:, : how.blanked])), x[:, how.blanked :]], 1)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, start, cache, how)
        logits = full(product(self.norm(x), self.head.weight.T, how))
        logits = coarse(logits) if how.coarse == "logits" else logits
        logits = logits if how.spare else logits[..., : self.vocabulary]
        return logits if how.cap is None else how.cap * torch.tanh(logits / how.cap)


def full(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def coarse(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


def turned(values: Tensor, place: Tensor, base: float) -> Tensor:
    """Rotary positions on [B, H, L, D]."""
    half = values.shape[-1] // 2
    angle = place[:, None] * base ** -(torch.arange(half, dtype=full(values).dtype) / half)
    a, b = full(values).chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(values.dtype)


def through_fp8(values: Tensor) -> Tensor:
    scale = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


# Text.


def trained(plan: Architecture, text: Text) -> tuple[Model, Model]:
    """A model after its steps of learning, and an earlier checkpoint of it."""
    torch.manual_seed(plan.seed)
    model, random = Model(plan, text.vocabulary), np.random.default_rng(plan.seed)
    earlier = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(plan.steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 40) * (1.05 - step / plan.steps)
        if step == int(0.7 * plan.steps):
            earlier = deepcopy(model).eval().requires_grad_(False)
        tokens, valid = text.batch(random.integers(len(text.pieces), size=12))
        logits = model(tokens[:, :-1], None, Numerics(spare=True))
        loss = F.cross_entropy(logits[valid[:, 1:]], tokens[:, 1:][valid[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == plan.steps - 1:
            print(f"{plan.name} {step} loss {loss.item():.3f}", flush=True)
    return model.eval().requires_grad_(False), earlier


# The engine and the trainer.


def rounded(model: Model, dtype: str) -> Model:
    return model if dtype == "float32" else deepcopy(model).to(getattr(torch, dtype))


def int8(model: Model, bits: int = 8) -> Model:
    """A model whose matrices hold integers, one scale for each row."""
    model = deepcopy(model)
    for matrix in model.parameters():
        if matrix.ndim > 1:
            scale = matrix.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            matrix.copy_((matrix / scale).round() * scale)
    return model


@dataclass(eq=False)
class Rollout:
    """Prompts and sampled responses of the same length each, with how many of these are before their end."""

    prompts: Tensor
    tokens: Tensor
    log_probs: Tensor
    lengths: np.ndarray


@torch.inference_mode()
def decoded(
    model: Model,
    prompts: Tensor,
    how: Numerics,
    process: Processors,
    seed: int,
    *,
    raw: bool = False,
    cached_by: Model | None = None,
) -> Rollout:
    """Sample responses with a cache; `raw` records log-probs from before the processors.

    Of prompts all but the last token may be in the cache already, `cached_by` other weights.
    """
    generator = torch.Generator().manual_seed(seed)
    engine, end = rounded(model, how.dtype), model.vocabulary - 1
    caches: list[list[Tensor]] = [[] for _ in model.blocks]
    rows = torch.arange(len(prompts))
    if cached_by is not None:
        rounded(cached_by, how.dtype)(prompts[:, :-1], caches, how)
    logits = engine(prompts[:, caches[0][0].shape[2] if caches[0] else 0 :], caches, how)[:, -1]
    seen = F.one_hot(prompts, logits.shape[-1]).sum(1).float()
    counts, tokens, log_probs = torch.zeros_like(seen), [], []
    for _ in range(RESPONSE):
        processed = process(logits, seen, counts)
        drawn = torch.multinomial(processed.softmax(-1), 1, generator=generator)[:, 0].clamp_max(end)
        said = (logits if raw else processed).log_softmax(-1)
        tokens.append(drawn)
        log_probs.append(said[rows, drawn])
        counts[rows, drawn] += 1
        logits = engine(drawn[:, None], caches, replace(how, blanked=0))[:, -1]
    found = torch.stack(tokens, 1)
    ended = (found == end).long()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, RESPONSE)
    return Rollout(prompts, found, torch.stack(log_probs, 1), lengths.numpy())


@torch.inference_mode()
def scored(model: Model, rollout: Rollout, how: Numerics, process: Processors | None = None) -> Tensor:
    """The trainer's log-probs of the sampled tokens [B, RESPONSE], from one prefill."""
    trainer = rounded(model, how.dtype)
    found = []
    for part in torch.arange(len(rollout.prompts)).split(64):
        prompts, response = rollout.prompts[part], rollout.tokens[part]
        logits = trainer(torch.cat([prompts, response], 1)[:, :-1], None, how)[:, PROMPT - 1 :]
        if process is not None:
            ones = F.one_hot(response, logits.shape[-1])
            seen = F.one_hot(prompts, logits.shape[-1]).sum(1, keepdim=True).float()
            logits = process(logits, seen, ones.cumsum(1) - ones)
        found.append(logits.log_softmax(-1).gather(-1, response[..., None])[..., 0])
    return torch.cat(found)


def updated(model: Model, prompts: Tensor, seed: int) -> list[Model]:
    """The model and its next versions, one policy-gradient update apart."""
    versions = [model]
    model = deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for version in range(1, VERSIONS):
        rollout = decoded(model, prompts, Numerics(), Processors(), seed + version)
        inside = torch.arange(RESPONSE) < torch.tensor(rollout.lengths)[:, None]
        liked = ((rollout.tokens % 3 == 0) & inside).sum(1) / inside.sum(1)
        gain = ((liked - liked.mean()) / (liked.std() + 1e-6))[:, None]
        logits = model(torch.cat([prompts, rollout.tokens], 1)[:, :-1].clone(), None, Numerics())[:, PROMPT - 1 :]
        log_probs = logits.log_softmax(-1).gather(-1, rollout.tokens.clone()[..., None])[..., 0]
        loss = -(gain * log_probs * inside).sum() / inside.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        versions.append(deepcopy(model).eval().requires_grad_(False))
    return versions
