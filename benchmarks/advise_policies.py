"""Policies of advise_models.py: their task, sampling and training, and the mismatches of their rollout engines.

The task is to continue a sequence of symbols in steps of a stride that the prompt contains. The reward is the share of
right steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Responses = tuple[Tensor, Tensor, Tensor]
"""Tokens, mask of valid tokens and log-probs of the sampler, [B, T] each."""
PROMPTS, RESPONSES, STEP = 16, 4, 8
"""Prompts per batch, responses per prompt, and batches per step of the dump."""
SLIPS, BACKWARD = 0.06, 0.1
"""Probabilities that the teacher writes a random symbol or steps backward."""


@dataclass(frozen=True)
class Plan:
    """Architecture and training of a model, and the amount of its samples.

    Attributes:
        mean: Mean number of tokens per response.
        most: Maximum number of tokens per response.
        batches: Number of batches for the gradients of corrections.
        dumped: Number of batches in the dump.
        truth: Number of samples per prompt for the true gradient.
        taught: Number of supervised updates.
        updates: Number of REINFORCE updates.
        symbols, strides: Sizes of the two parts of the vocabulary.
        is_recurrent: Whether gated states replace attention.
        is_parallel: Whether the feed-forward layer is parallel to the attention.
    """

    name: str
    seed: int
    experts: int
    mean: int
    most: int
    batches: int
    dumped: int
    truth: int
    mismatches: tuple[str, ...]
    width: int = 32
    layers: int = 2
    heads: int = 2
    hidden: int = 64
    taught: int = 200
    updates: int = 18
    symbols: int = 24
    strides: int = 5
    is_recurrent: bool = False
    is_parallel: bool = False

    @property
    def end(self) -> int:
        """Return the token that ends a response."""
        return self.symbols + self.strides


SHORT = ("stale_16", "int4", "flips", "top_p", "bf16", "temperature")
LONG = ("stale_16", "int8", "flips", "kv")
OTHER = ("stale_4", "fp8", "kv", "int4")
NEWER = ("stale_8", "stale_16", "int6", "int4", "kv", "flips")
NEWEST = ("stale_8", "int4", "int6", "fp8", "kv", "flips")
UNSEEN = ("stale_1", "stale_4", "stale_8", "stale_16", "int4", "int6", "fp8", "kv", "flips")
SCALED = ("stale_1", "stale_4", "stale_16", "int4", "int6", "kv", "flips")
PLANS = (
    Plan("dense-32", 3, 1, 28, 40, 128, 40, 400, SHORT),
    Plan("moe-64", 17, 4, 60, 80, 24, 40, 40, SHORT, hidden=128),
    Plan("dense-128", 29, 1, 120, 160, 20, 30, 24, LONG),
    Plan("moe-512", 41, 4, 440, 512, 24, 20, 32, LONG[:3], hidden=128, taught=300, updates=17),
    Plan("dense-384", 53, 1, 330, 384, 24, 20, 64, LONG[:3], taught=300, updates=17),
    Plan("moe-96", 67, 8, 70, 96, 80, 20, 200, OTHER, width=48, layers=3, heads=4, hidden=192),
    Plan("recurrent-80", 71, 1, 60, 80, 64, 20, 320, NEWER, width=40, hidden=96, is_recurrent=True),
    Plan("parallel-48", 73, 1, 36, 48, 96, 20, 240, NEWER, width=48, layers=4, symbols=60, strides=3, is_parallel=True),
    Plan("moe-56", 79, 5, 42, 56, 96, 20, 240, NEWEST, width=40, layers=3, heads=4, hidden=160, symbols=36, strides=4),
    Plan("dense-44", 101, 1, 34, 44, 64, 20, 240, SCALED, width=36, layers=3, symbols=30, strides=4),
    Plan("moe-40", 103, 4, 32, 40, 64, 20, 240, SCALED, width=32, hidden=128, symbols=28, strides=4),
    Plan("parallel-36", 107, 1, 28, 36, 64, 20, 240, SCALED, width=40, symbols=40, strides=3, is_parallel=True),
    Plan("dense-52", 211, 1, 40, 52, 192, 20, 480, UNSEEN, width=44, layers=4, hidden=88, symbols=26, strides=6),
    Plan("moe-48", 223, 6, 36, 48, 192, 20, 480, UNSEEN, width=36, heads=3, hidden=144, symbols=32, strides=3),
    Plan("parallel-40", 227, 1, 32, 40, 192, 20, 480, UNSEEN, layers=3, symbols=22, is_parallel=True),
)


@dataclass(frozen=True)
class Engine:
    """A rollout engine that samples a policy with a mismatch."""

    policy: Policy
    temperature: float = 1.0
    top_p: float = 1.0
    flips: float = 0.0
    fp8_cache: bool = False


class Policy(nn.Module):
    """A transformer, dense or with a mixture of experts. Each token uses two experts."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, width, self.heads, self.experts = plan, plan.width, plan.heads, plan.experts
        self.embedding = nn.Embedding(plan.end + 1, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "mix": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "router": nn.Linear(width, plan.experts),
                    "up": nn.Linear(width, plan.hidden),
                    "down": nn.Linear(plan.hidden, width),
                }
            )
            for _ in range(plan.layers)
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, plan.end + 1)
        place = torch.arange(plan.most + 2)[:, None] / 10.0 ** (torch.arange(0, width, 2) * (4 / width))
        self.register_buffer("places", 0.3 * torch.cat([place.sin(), place.cos()], 1))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None, at: int = 0, flipped: Tensor | None = None,
                fp8_cache: bool = False) -> Tensor:  # fmt: skip
        """Return the next-token logits [B, T, V] of x [B, T] from position `at` on. `flipped` tokens change experts."""
        y = self.embedding(x) + self.places[at : at + x.shape[1]].to(self.head.weight.dtype)
        mixing = self._recurrence if self.plan.is_recurrent else self._attention
        for index, block in enumerate(self.blocks):
            inner = block["before"](y)
            mixed = block["out"](mixing(block["mix"](inner), None if cache is None else cache[index], at, fp8_cache))
            y = y + mixed
            y = y + self._feed(block, inner if self.plan.is_parallel else block["between"](y), flipped)
        logits: Tensor = self.head(self.last(y)).float()
        return logits

    def _attention(self, mixed: Tensor, kept: Tensor | None, at: int, fp8_cache: bool) -> Tensor:
        qkv, count = mixed.unflatten(-1, (3, self.heads, -1)), mixed.shape[1]
        q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
        if fp8_cache:
            k, v = (_as_fp8(each) for each in (k, v))
        if kept is not None:
            kept[0, :, :, at : at + count], kept[1, :, :, at : at + count] = k, v
            k, v = kept[0, :, :, : at + count], kept[1, :, :, : at + count]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if count > 1:
            later = torch.ones(count, k.shape[2], dtype=torch.bool).triu(1 + at)
            scores = scores.masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def _recurrence(self, mixed: Tensor, kept: Tensor | None, at: int, fp8_cache: bool) -> Tensor:
        new, keeps, shows = mixed.chunk(3, -1)
        keeps = keeps.sigmoid()
        state = torch.zeros_like(new[:, 0]) if kept is None else kept[0, :, :, 0].flatten(1)
        states = []
        for place in range(mixed.shape[1]):
            state = keeps[:, place] * state + (1 - keeps[:, place]) * new[:, place]
            state = _as_fp8(state) if fp8_cache else state
            states.append(state)
        if kept is not None:
            kept[0, :, :, 0] = state.unflatten(1, (self.heads, -1))
        return torch.stack(states, 1) * nn.functional.silu(shows)

    def _feed(self, block: Any, y: Tensor, flipped: Tensor | None) -> Tensor:
        hidden = torch.nn.functional.gelu(block["up"](y)).unflatten(-1, (self.experts, -1))
        if self.experts > 1:
            route = block["router"](y)
            best = route.topk(3, -1).values
            taken = route >= best[..., 1:2]
            if flipped is not None:  # use the third expert instead of the second
                other = (route >= best[..., :1]) | (route == best[..., 2:])
                taken = torch.where(flipped[..., None], other, taken)
            hidden = hidden * route.masked_fill(~taken, -torch.inf).softmax(-1)[..., None]
        elif flipped is not None:  # a quarter of the hidden units is lost
            lost = torch.arange(hidden.shape[-1]) % 4 == 0
            hidden = hidden.masked_fill(flipped[..., None, None] & lost, 0.0)
        fed: Tensor = block["down"](hidden.flatten(-2))
        return fed

    def log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probs of response tokens [B, T] after prompts [B, 2]."""
        logits = self(torch.cat([prompts, tokens[:, :-1]], 1))[:, prompts.shape[1] - 1 :]
        return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def _as_fp8(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).to(values.dtype)


def every_prompt(plan: Plan) -> Tensor:
    """Return all pairs of a stride and a first symbol, [strides x symbols, 2]."""
    pairs = torch.cartesian_prod(torch.arange(plan.strides), torch.arange(plan.symbols))
    return pairs + torch.tensor([plan.symbols, 0])


def write_teacher_text(plan: Plan, prompts: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return texts of a teacher that makes mistakes, and their mask, [B, most] each."""
    count, stride = len(prompts), prompts[:, 0].numpy() - plan.symbols + 1
    rows, last = [], prompts[:, 1].numpy()
    for _ in range(plan.most):
        chance = random.random(count)
        last = (last + np.where(chance < BACKWARD, -stride, stride)) % plan.symbols
        last = np.where(chance > 1 - SLIPS, random.integers(plan.symbols, size=count), last)
        rows.append(last)
    least = plan.mean // 2
    length = np.minimum(least + random.geometric(1 / (plan.mean - least), count), plan.most)
    places = np.arange(plan.most)
    tokens = np.where(places[None] == length[:, None] - 1, plan.end, np.stack(rows, 1))
    return torch.tensor(tokens), torch.tensor(places[None] < length[:, None])


def rewards(plan: Plan, prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the share of right steps [B]."""
    stride = prompts[:, :1] - plan.symbols + 1
    before = torch.cat([prompts[:, 1:], tokens[:, :-1]], 1)
    written = mask & (tokens < plan.symbols)
    right = written & ((before + stride) % plan.symbols == tokens)
    return right.sum(1) / written.sum(1).clamp(min=1)


@torch.no_grad()
def sample_responses(engine: Engine, prompts: Tensor) -> Responses:
    """Sample responses to prompts [B, 2] with a KV cache."""
    policy, count = engine.policy, len(prompts)
    most, end = policy.plan.most, policy.plan.end
    weight = policy.head.weight
    shape = (2, count, policy.heads, most + 2, weight.shape[1] // policy.heads)
    cache = [torch.zeros(shape, dtype=weight.dtype) for _ in policy.blocks]
    x, at, alive, rows = prompts, 0, torch.ones(count, dtype=torch.bool), []
    for _ in range(most):
        flipped = torch.rand(x.shape) < engine.flips if engine.flips else None
        logits = policy(x, cache, at, flipped, engine.fp8_cache)[:, -1] / engine.temperature
        if engine.top_p < 1:
            p, order = logits.softmax(-1).sort(-1, descending=True)
            beyond = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, p.cumsum(-1) - p >= engine.top_p)
            logits = logits.masked_fill(beyond, -torch.inf)
        log_probs = logits.log_softmax(-1)
        drawn = torch.multinomial(log_probs.exp(), 1)
        rows.append((drawn[:, 0], alive, log_probs.gather(1, drawn)[:, 0]))
        at, x, alive = at + x.shape[1], drawn, alive & (drawn[:, 0] != end)
        if not alive.any():
            break
    tokens, mask, told = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    return tokens.masked_fill(~mask, end), mask, told.masked_fill(~mask, 0.0)


def train_policies(plan: Plan) -> list[Policy]:
    """Train a policy on the teacher's texts, and return it with each of its REINFORCE updates."""
    torch.manual_seed(plan.seed)
    random, prompts = np.random.default_rng(plan.seed), every_prompt(plan)
    policy = Policy(plan)
    optimizer = torch.optim.AdamW(policy.parameters(), 4e-3)
    count = max(12, 2560 // plan.most)
    for update in range(plan.taught):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (update + 1) / 30, (plan.taught - update) / 100)
        chosen = prompts[random.integers(len(prompts), size=count)]
        tokens, mask = write_teacher_text(plan, chosen, random)
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask).sum() / mask.sum())
    optimizer, versions = torch.optim.Adam(policy.parameters(), 2e-4), [copy.deepcopy(policy)]
    for _ in range(plan.updates):
        chosen = prompts[random.permutation(len(prompts))[:PROMPTS]].repeat_interleave(8, 0)
        tokens, mask, _ = sample_responses(Engine(policy), chosen)
        reward = rewards(plan, chosen, tokens, mask).view(-1, 8)
        advantage = ((reward - reward.mean(1, keepdim=True)) / reward.std(1).mean()).flatten()
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask * advantage[:, None]).sum() / mask.sum())
        versions.append(copy.deepcopy(policy))
    return versions


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def quantize(policy: Policy, cast: Callable[[Tensor], Tensor]) -> Policy:
    """Return a copy with quantized linear layers."""
    policy = copy.deepcopy(policy)
    for layer in policy.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = cast(layer.weight.data)
    return policy


def _integers(bits: int) -> Callable[[Tensor], Tensor]:
    def cast(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weight / scale).round() * scale

    return cast


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def make_engines(versions: list[Policy]) -> dict[str, Engine]:
    """Return one engine per mismatch."""
    policy = versions[-1]
    same = Engine(policy)
    return {
        "on_policy": same,
        "bf16": Engine(copy.deepcopy(policy).bfloat16()),
        "fp8": Engine(quantize(policy, _fp8)),
        "int8": Engine(quantize(policy, _integers(8))),
        "int6": Engine(quantize(policy, _integers(6))),
        "int4": Engine(quantize(policy, _integers(4))),
        **{f"stale_{count}": Engine(versions[-1 - count]) for count in (1, 4, 8, 16)},
        "temperature": replace(same, temperature=0.9),
        "top_p": replace(same, top_p=0.95),
        "kv": replace(same, fp8_cache=True),
        "flips": replace(same, flips=0.05 if policy.experts > 1 else 0.02),
    }
