"""Small language models with a rollout engine and a trainer, for benchmarks on models that no rule was developed on.

The engine decodes token by token with a KV cache, in its own numerics and with its own sampler settings. The trainer
scores the same tokens with one prefill. `stranger_plans.py` lists the architectures. Imported by the scripts
`stranger_dumps.py`, `sides.py`, `distributions.py` and `second_numeric.py`.
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
"""Rows of the output layer without a token, as in a vocabulary that is padded to a round number."""

VERSIONS = 7
"""Number of policies: the trained model and its updates."""


@dataclass(frozen=True)
class Numerics:
    """Arithmetic of a forward pass, and its faults.

    Attributes:
        dtype: Type of weights and activations. A reference uses "float64".
        rope: Factor of the base of rotary positions, or of the divisor of ALiBi slopes.
        window: Number of tokens that attention reaches back.
        noise: Standard deviation of the noise on the router's logits.
        cap: Soft cap of the logits.
        spare: Whether the softmax includes the padding of the vocabulary.
        lost_tokens: Number of prompt tokens that are replaced by token 0.
        bfloat16_part: The only part in bfloat16: "router" or "logits".
        order: Seed of the order in which terms of matrix products are added. Each partial sum is rounded to `dtype`.
    """

    dtype: str = "float32"
    rope: float = 1.0
    window: int | None = None
    dropout: float = 0.0
    fp8_cache: bool = False
    noise: float = 0.0
    cap: float | None = None
    spare: bool = False
    lost_tokens: int = 0
    bfloat16_part: str = ""
    order: int | None = None


@dataclass(frozen=True)
class Processors:
    """Sampler settings of an engine, applied to the logits in the order of the fields."""

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
        """Return processed logits [..., V]. `prompt` and `response` are counts of earlier tokens [..., V]."""
        if self.repetition != 1:
            seen = (prompt + response) > 0
            penalized = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
            logits = torch.where(seen, penalized, logits)
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
            removed = ranked.cumsum(-1) - ranked >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -torch.inf)
        if self.min_p > 0:
            p = logits.softmax(-1)
            logits = logits.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return logits


CHUNKS, TAPS = 4, 4


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, added in float32 and rounded once, as accelerators do. A CPU is 15x slower in bfloat16."""
    return (upcast(x) @ upcast(y)).to(x.dtype)


def product(x: Tensor, matrix: Tensor, numerics: Numerics) -> Tensor:
    """Return x @ matrix, with its terms added in the order that the numerics set."""
    if numerics.order is None:
        return multiply(x, matrix)
    order = torch.randperm(len(matrix), generator=torch.Generator().manual_seed(numerics.order + len(matrix)))
    first, *others = (multiply(x[..., part], matrix[part]) for part in order.chunk(CHUNKS))
    for other in others:
        first = first + other
    return first


class Block(nn.Module):
    """Transformer block with attention or a gated convolution, and a dense or MoE feed-forward layer."""

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

    def attend(self, x: Tensor, start: int, cache: list[Tensor], numerics: Numerics) -> Tensor:
        batch, length, width = x.shape
        q = product(x, self.q.weight.T, numerics).view(batch, length, -1, self.size).transpose(1, 2)
        k, v = (
            product(x, self.kv.weight.T, numerics)
            .view(batch, length, 2, -1, self.size)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        place = torch.arange(start, start + length)
        if self.plan.positions == "rope":
            q, k = (rotate(values, place, 1e4 * numerics.rope) for values in (q, k))
        if numerics.fp8_cache:
            k, v = round_to_fp8(k), round_to_fp8(v)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        k, v = (values.repeat_interleave(self.plan.shared, 1) for values in (k, v))
        far = place[:, None] - torch.arange(k.shape[2])
        scores = upcast(multiply(q, k.transpose(-1, -2))) * self.size**-0.5
        if self.plan.positions == "alibi":
            slopes = 2.0 ** -(1 + torch.arange(self.plan.heads)) / numerics.rope
            scores = scores - slopes[:, None, None] * far.clamp_min(0)
        hidden = (far < 0) | (far >= (numerics.window or CONTEXT + 1))
        mixed = multiply(scores.masked_fill(hidden, -torch.inf).softmax(-1).to(v.dtype), v)
        return product(mixed.transpose(1, 2).reshape(batch, length, width), self.out.weight.T, numerics)

    def convolve(self, x: Tensor, cache: list[Tensor], numerics: Numerics) -> Tensor:
        batch, length, width = x.shape
        gate = product(x, self.q.weight.T, numerics)
        values, gates = product(x, self.kv.weight.T, numerics).chunk(2, -1)
        values = values * gates.sigmoid()
        if numerics.fp8_cache:
            values = round_to_fp8(values)
        past = cache[0][:, 0] if cache else values.new_zeros(batch, 0, width)
        whole = torch.cat([past, values], 1)
        cache[:] = [whole[:, None]]
        seen = F.pad(whole, (0, 0, TAPS - 1, 0))[:, -(length + TAPS - 1) :]
        mixed = torch.stack([seen[:, i : i + length] * tap for i, tap in enumerate(self.taps)]).sum(0)
        return product(gate * mixed, self.out.weight.T, numerics)

    def feed(self, x: Tensor, numerics: Numerics) -> Tensor:
        inner = product(x, self.up.transpose(0, 1).flatten(1), numerics).unflatten(-1, self.up.shape[::2])
        a, b = inner.chunk(2, -1)
        inner = F.relu(a).square() if self.plan.parallel else F.silu(a) * b
        if self.plan.experts == 1:
            return product(inner[:, :, 0], self.down[0], numerics)
        logits = upcast(product(x, self.router.weight.T, numerics))
        logits = round_to_bfloat16(logits) if numerics.bfloat16_part == "router" else logits
        logits = logits + numerics.noise * torch.randn_like(logits) if numerics.noise else logits
        gates = logits.sigmoid() if self.plan.router == "sigmoid" else logits.softmax(-1)
        best, chosen = gates.topk(self.plan.chosen)
        if self.plan.router == "sigmoid":
            best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(gates).scatter(-1, chosen, best).to(x.dtype)
        return product((inner * weights[..., None]).flatten(2), self.down.flatten(0, 1), numerics)

    def forward(self, x: Tensor, start: int, cache: list[Tensor], numerics: Numerics) -> Tensor:
        def dropout(part: Tensor) -> Tensor:
            return F.dropout(part, numerics.dropout, training=numerics.dropout > 0)

        normed = self.norms[0](x)
        attended = dropout(
            self.convolve(normed, cache, numerics) if self.convolved else self.attend(normed, start, cache, numerics)
        )
        if self.plan.parallel:
            return x + attended + dropout(self.feed(self.norms[1](x), numerics))
        x = x + attended
        return x + dropout(self.feed(self.norms[1](x), numerics))


class Model(nn.Module):
    """Causal language model. The last token of the vocabulary ends the text."""

    def __init__(self, plan: Architecture, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embed = nn.Embedding(vocabulary, plan.width)
        self.blocks = nn.ModuleList(Block(plan, number) for number in range(plan.layers))
        self.norm, self.head = nn.RMSNorm(plan.width), nn.Linear(plan.width, vocabulary + SPARE, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None, numerics: Numerics) -> Tensor:
        """Return the logits [B, L, V]. With caches, `tokens` follow the cached tokens."""
        caches = [[] for _ in self.blocks] if caches is None else caches
        start = caches[0][0].shape[2] if caches[0] else 0
        x = self.embed(tokens)
        if numerics.lost_tokens and not start:
            x = torch.cat(
                [self.embed(torch.zeros_like(tokens[:, : numerics.lost_tokens])), x[:, numerics.lost_tokens :]], 1
            )
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, start, cache, numerics)
        logits = upcast(product(self.norm(x), self.head.weight.T, numerics))
        logits = round_to_bfloat16(logits) if numerics.bfloat16_part == "logits" else logits
        logits = logits if numerics.spare else logits[..., : self.vocabulary]
        return logits if numerics.cap is None else numerics.cap * torch.tanh(logits / numerics.cap)


def upcast(values: Tensor) -> Tensor:
    """Convert to float32, unless the values are in float64."""
    return values if values.dtype == torch.float64 else values.float()


def round_to_bfloat16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


def rotate(values: Tensor, place: Tensor, base: float) -> Tensor:
    """Apply rotary positions to [B, H, L, D]."""
    half = values.shape[-1] // 2
    angle = place[:, None] * base ** -(torch.arange(half, dtype=upcast(values).dtype) / half)
    a, b = upcast(values).chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(values.dtype)


def round_to_fp8(values: Tensor) -> Tensor:
    scale = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


def train_model(plan: Architecture, text: Text) -> tuple[Model, Model]:
    """Train a model, and return it with the checkpoint after 70% of the steps."""
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


def cast_model(model: Model, dtype: str) -> Model:
    return model if dtype == "float32" else deepcopy(model).to(getattr(torch, dtype))


def quantize(model: Model, bits: int = 8) -> Model:
    """Round the matrices of a model to integers with one scale per row."""
    model = deepcopy(model)
    for matrix in model.parameters():
        if matrix.ndim > 1:
            scale = matrix.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            matrix.copy_((matrix / scale).round() * scale)
    return model


@dataclass(eq=False)
class Rollout:
    """Prompts [B, PROMPT] and sampled responses [B, RESPONSE]. `lengths` counts the tokens up to the end of each."""

    prompts: Tensor
    tokens: Tensor
    log_probs: Tensor
    lengths: np.ndarray


@torch.inference_mode()
def sample_responses(
    model: Model,
    prompts: Tensor,
    numerics: Numerics,
    process: Processors,
    seed: int,
    *,
    raw: bool = False,
    cached_by: Model | None = None,
) -> Rollout:
    """Sample responses with a KV cache.

    Args:
        raw: Whether to record log-probs from before the processors.
        cached_by: A model with other weights that filled the cache with all prompt tokens but the last.
    """
    generator = torch.Generator().manual_seed(seed)
    engine, end = cast_model(model, numerics.dtype), model.vocabulary - 1
    caches: list[list[Tensor]] = [[] for _ in model.blocks]
    rows = torch.arange(len(prompts))
    if cached_by is not None:
        cast_model(cached_by, numerics.dtype)(prompts[:, :-1], caches, numerics)
    logits = engine(prompts[:, caches[0][0].shape[2] if caches[0] else 0 :], caches, numerics)[:, -1]
    seen = F.one_hot(prompts, logits.shape[-1]).sum(1).float()
    counts, tokens, log_probs = torch.zeros_like(seen), [], []
    for _ in range(RESPONSE):
        processed = process(logits, seen, counts)
        token = torch.multinomial(processed.softmax(-1), 1, generator=generator)[:, 0].clamp_max(end)
        distribution = (logits if raw else processed).log_softmax(-1)
        tokens.append(token)
        log_probs.append(distribution[rows, token])
        counts[rows, token] += 1
        logits = engine(token[:, None], caches, replace(numerics, lost_tokens=0))[:, -1]
    found = torch.stack(tokens, 1)
    ended = (found == end).long()
    lengths = torch.where(ended.any(1), ended.argmax(1) + 1, RESPONSE)
    return Rollout(prompts, found, torch.stack(log_probs, 1), lengths.numpy())


@torch.inference_mode()
def score_responses(model: Model, rollout: Rollout, numerics: Numerics, process: Processors | None = None) -> Tensor:
    """Return the trainer's log-probs of the sampled tokens from one prefill, [B, RESPONSE]."""
    trainer = cast_model(model, numerics.dtype)
    found = []
    for part in torch.arange(len(rollout.prompts)).split(64):
        prompts, response = rollout.prompts[part], rollout.tokens[part]
        logits = trainer(torch.cat([prompts, response], 1)[:, :-1], None, numerics)[:, PROMPT - 1 :]
        if process is not None:
            ones = F.one_hot(response, logits.shape[-1])
            seen = F.one_hot(prompts, logits.shape[-1]).sum(1, keepdim=True).float()
            logits = process(logits, seen, ones.cumsum(1) - ones)
        found.append(logits.log_softmax(-1).gather(-1, response[..., None])[..., 0])
    return torch.cat(found)


def update_policy(model: Model, prompts: Tensor, seed: int) -> list[Model]:
    """Return the model and its next versions, one policy-gradient update apart."""
    versions = [model]
    model = deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for version in range(1, VERSIONS):
        rollout = sample_responses(model, prompts, Numerics(), Processors(), seed + version)
        inside = torch.arange(RESPONSE) < torch.tensor(rollout.lengths)[:, None]
        reward = ((rollout.tokens % 3 == 0) & inside).sum(1) / inside.sum(1)
        advantage = ((reward - reward.mean()) / (reward.std() + 1e-6))[:, None]
        logits = model(torch.cat([prompts, rollout.tokens], 1)[:, :-1].clone(), None, Numerics())[:, PROMPT - 1 :]
        log_probs = logits.log_softmax(-1).gather(-1, rollout.tokens.clone()[..., None])[..., 0]
        loss = -(advantage * log_probs * inside).sum() / inside.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        versions.append(deepcopy(model).eval().requires_grad_(False))
    return versions
