"""The policies of benchmarks/advise_models.py: what they are taught, how they sample, and how a rollout may differ.

The task is to continue a sequence in steps that the prompt names; the reward is the share of right steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Drawn = tuple[Tensor, Tensor, Tensor]
"""Tokens, where they are, and the log-probs that they were drawn with [B, T]."""
PROMPTS, RESPONSES, STEP = 16, 4, 8
"""Prompts of a batch, responses to each, and batches of a step of the dump."""
SYMBOLS, STRIDES = 24, 5
END = SYMBOLS + STRIDES
SLIPS, BACKWARD = 0.06, 0.1


@dataclass(frozen=True)
class Plan:
    """A model and how much of it is measured; `mean` tokens of a response, at most `most`."""

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


SHORT = ("stale_16", "int4", "flips", "top_p", "bf16", "temperature")
LONG = ("stale_16", "int8", "flips", "kv")
OTHER = ("stale_4", "fp8", "kv", "int4")
PLANS = (
    Plan("dense-32", 3, 1, 28, 40, 32, 40, 80, SHORT),
    Plan("moe-64", 17, 4, 60, 80, 24, 40, 40, SHORT, hidden=128),
    Plan("dense-128", 29, 1, 120, 160, 20, 30, 24, LONG),
    Plan("moe-512", 41, 4, 440, 512, 24, 20, 32, LONG[:3], hidden=128, taught=300, updates=17),
    Plan("dense-384", 53, 1, 330, 384, 24, 20, 64, LONG[:3], taught=300, updates=17),
    Plan("moe-96", 67, 8, 70, 96, 16, 20, 40, OTHER, width=48, layers=3, heads=4, hidden=192),
)


@dataclass(frozen=True)
class Engine:
    """How a rollout differs from the policy that samples in it."""

    policy: Policy
    temperature: float = 1.0
    top_p: float = 1.0
    flips: float = 0.0
    fp8_cache: bool = False


class Policy(nn.Module):
    """A transformer, dense or a mixture of experts of which each token takes two."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        width, self.heads, self.experts = plan.width, plan.heads, plan.experts
        self.embedding = nn.Embedding(END + 1, width)
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
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, END + 1)
        place = torch.arange(plan.most + 2)[:, None] / 10.0 ** (torch.arange(0, width, 2) * (4 / width))
        self.register_buffer("places", 0.3 * torch.cat([place.sin(), place.cos()], 1))

    def forward(self, x: Tensor, cache: list[Tensor] | None = None, at: int = 0, flipped: Tensor | None = None,
                fp8_cache: bool = False) -> Tensor:  # fmt: skip
        """Logits [B, T, V] of what follows x [B, T], whose first place is `at`; `flipped` ones are routed otherwise."""
        y = self.embedding(x) + self.places[at : at + x.shape[1]].to(self.head.weight.dtype)
        for index, block in enumerate(self.blocks):
            qkv = block["mix"](block["before"](y)).unflatten(-1, (3, self.heads, -1))
            q, k, v = (qkv[:, :, each].transpose(1, 2) for each in range(3))
            if fp8_cache:
                k, v = (each.to(torch.float8_e4m3fn).to(q.dtype) for each in (k, v))
            if cache is not None:
                kept = cache[index]
                kept[0, :, :, at : at + x.shape[1]], kept[1, :, :, at : at + x.shape[1]] = k, v
                k, v = kept[0, :, :, : at + x.shape[1]], kept[1, :, :, : at + x.shape[1]]
            scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if x.shape[1] > 1:
                later = torch.ones(x.shape[1], k.shape[2], dtype=torch.bool).triu(1 + at)
                scores = scores.masked_fill(later, -torch.inf)
            y = y + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            y = y + self._feed(block, block["between"](y), flipped)
        logits: Tensor = self.head(self.last(y)).float()
        return logits

    def _feed(self, block: Any, y: Tensor, flipped: Tensor | None) -> Tensor:
        hidden = torch.nn.functional.gelu(block["up"](y)).unflatten(-1, (self.experts, -1))
        if self.experts > 1:
            route = block["router"](y)
            best = route.topk(3, -1).values
            taken = route >= best[..., 1:2]
            if flipped is not None:  # the third in place of the second
                other = (route >= best[..., :1]) | (route == best[..., 2:])
                taken = torch.where(flipped[..., None], other, taken)
            hidden = hidden * route.masked_fill(~taken, -torch.inf).softmax(-1)[..., None]
        elif flipped is not None:  # a quarter of the hidden units is lost
            lost = torch.arange(hidden.shape[-1]) % 4 == 0
            hidden = hidden.masked_fill(flipped[..., None, None] & lost, 0.0)
        fed: Tensor = block["down"](hidden.flatten(-2))
        return fed

    def log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Of response tokens [B, T] after prompts [B, 2]."""
        logits = self(torch.cat([prompts, tokens[:, :-1]], 1))[:, prompts.shape[1] - 1 :]
        return logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]


def every_prompt() -> Tensor:
    """A stride and a start [120, 2]."""
    pairs = torch.cartesian_prod(torch.arange(STRIDES), torch.arange(SYMBOLS))
    return pairs + torch.tensor([SYMBOLS, 0])


def taught(plan: Plan, prompts: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """What a careless teacher writes [B, most], and where [B, most]: it slips, and steps backward."""
    count, stride = len(prompts), prompts[:, 0].numpy() - SYMBOLS + 1
    rows, last = [], prompts[:, 1].numpy()
    for _ in range(plan.most):
        chance = random.random(count)
        last = (last + np.where(chance < BACKWARD, -stride, stride)) % SYMBOLS
        last = np.where(chance > 1 - SLIPS, random.integers(SYMBOLS, size=count), last)
        rows.append(last)
    least = plan.mean // 2
    length = np.minimum(least + random.geometric(1 / (plan.mean - least), count), plan.most)
    places = np.arange(plan.most)
    tokens = np.where(places[None] == length[:, None] - 1, END, np.stack(rows, 1))
    return torch.tensor(tokens), torch.tensor(places[None] < length[:, None])


def rewards(prompts: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Share of right steps [B]."""
    stride = prompts[:, :1] - SYMBOLS + 1
    before = torch.cat([prompts[:, 1:], tokens[:, :-1]], 1)
    written = mask & (tokens < SYMBOLS)
    right = written & ((before + stride) % SYMBOLS == tokens)
    return right.sum(1) / written.sum(1).clamp(min=1)


@torch.no_grad()
def sampled(engine: Engine, prompts: Tensor, most: int) -> Drawn:
    """What an engine writes after prompts [B, 2], with a cache of keys and values."""
    policy, count = engine.policy, len(prompts)
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
        at, x, alive = at + x.shape[1], drawn, alive & (drawn[:, 0] != END)
        if not alive.any():
            break
    tokens, mask, told = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    return tokens.masked_fill(~mask, END), mask, told.masked_fill(~mask, 0.0)


def trained(plan: Plan) -> list[Policy]:
    """The policy of the teacher's writing, and each of its updates by REINFORCE."""
    torch.manual_seed(plan.seed)
    random, prompts = np.random.default_rng(plan.seed), every_prompt()
    policy = Policy(plan)
    optimizer = torch.optim.AdamW(policy.parameters(), 4e-3)
    count = max(12, 2560 // plan.most)
    for update in range(plan.taught):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (update + 1) / 30, (plan.taught - update) / 100)
        chosen = prompts[random.integers(len(prompts), size=count)]
        tokens, mask = taught(plan, chosen, random)
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask).sum() / mask.sum())
    optimizer, versions = torch.optim.Adam(policy.parameters(), 2e-4), [copy.deepcopy(policy)]
    for _ in range(plan.updates):
        chosen = prompts[random.permutation(len(prompts))[:PROMPTS]].repeat_interleave(8, 0)
        tokens, mask, _ = sampled(Engine(policy), chosen, plan.most)
        reward = rewards(chosen, tokens, mask).view(-1, 8)
        advantage = ((reward - reward.mean(1, keepdim=True)) / reward.std(1).mean()).flatten()
        _descend(optimizer, -(policy.log_probs(chosen, tokens) * mask * advantage[:, None]).sum() / mask.sum())
        versions.append(copy.deepcopy(policy))
    return versions


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def rounded(policy: Policy, cast: Callable[[Tensor], Tensor]) -> Policy:
    """A copy with the weights of its linear layers on a grid of one scale per row."""
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


def engines(versions: list[Policy]) -> dict[str, Engine]:
    """One for each mismatch."""
    policy = versions[-1]
    same = Engine(policy)
    return {
        "on_policy": same,
        "bf16": Engine(copy.deepcopy(policy).bfloat16()),
        "fp8": Engine(rounded(policy, _fp8)),
        "int8": Engine(rounded(policy, _integers(8))),
        "int4": Engine(rounded(policy, _integers(4))),
        **{f"stale_{count}": Engine(versions[-1 - count]) for count in (1, 4, 16)},
        "temperature": replace(same, temperature=0.9),
        "top_p": replace(same, top_p=0.95),
        "kv": replace(same, fp8_cache=True),
        "flips": replace(same, flips=0.05 if policy.experts > 1 else 0.02),
    }
