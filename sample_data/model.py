"""The language model of the sample dumps: one definition, for the trainer in float32 and the engine in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor, nn

END = 256
VOCABULARY = 257
MAX_PROMPT, MAX_RESPONSE, MAX_TOOL = 64, 200, 24
CONTEXT = MAX_PROMPT + MAX_RESPONSE + MAX_TOOL
LAYERS, WIDTH, HEADS = 4, 128, 4


class Cache:
    """Keys and values of all earlier tokens of one layer, [B, heads, CONTEXT, width of a head]."""

    def __init__(self, batch: int, dtype: torch.dtype, fp8: bool) -> None:
        self.fp8, self.used = fp8, 0
        self.keys, self.values = torch.zeros(2, batch, HEADS, CONTEXT, WIDTH // HEADS, dtype=dtype)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token's keys and values; return all of them so far."""
        for store, new in ((self.keys, keys), (self.values, values)):
            store[:, :, self.used : self.used + 1] = through_fp8(new) if self.fp8 else new
        self.used += 1
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


def through_fp8(values: Tensor) -> Tensor:
    """Round to float8_e4m3fn and back, scaled so that the largest magnitude of each head is 448."""
    scale = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    return ((values.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(values.dtype)


class Experts(nn.Module):
    """The feed-forward part: `experts` of them, each token using its best two; with one, a plain MLP."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False) if experts > 1 else None
        self.up = nn.Parameter(torch.randn(experts, WIDTH, hidden) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, WIDTH) * hidden**-0.5 / LAYERS)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.router is None:
            return F.gelu(x @ self.up[0]) @ self.down[0]
        flat = x.reshape(-1, WIDTH)
        probabilities = self.router(flat).float().softmax(-1)
        best, chosen = probabilities.topk(2)
        share = (best / best.sum(-1, keepdim=True)).to(x.dtype)
        if self.training:  # keeps all experts in use (Switch Transformer's auxiliary loss)
            use = F.one_hot(chosen, len(self.up)).float().mean((0, 1))
            self.balance = len(self.up) * (use * probabilities.mean(0)).sum()
        out = torch.zeros_like(flat)
        for expert, (up, down) in enumerate(zip(self.up.unbind(), self.down.unbind(), strict=True)):
            tokens, slot = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                answer = F.gelu(flat[tokens] @ up) @ down
                out = out.index_add(0, tokens, answer * share[tokens, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    """Attention and feed-forward, each behind a layer norm."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_experts = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(experts, hidden)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv.unbind(0)
        if cache is None:
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            keys, values = cache.append(keys, values)
            scores = (queries @ keys.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
            mixed = scores.float().softmax(-1).to(x.dtype) @ values
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.experts(self.before_experts(x))


class Model(nn.Module):
    """A byte-level causal language model."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, hidden) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.embed, self.position):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None) -> Tensor:
        """Logits [B, L, vocabulary]; with caches, `tokens` [B, 1] follow what the caches hold."""
        start = 0 if caches is None else caches[0].used
        x = self.embed(tokens) + self.position(torch.arange(start, start + tokens.shape[1]))
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(self.norm(x))

    def balance(self) -> Tensor:
        """Take the router's auxiliary loss of the last forward pass; 0 for a dense model."""
        total = torch.zeros(())
        for block in self.blocks:
            total, block.experts.balance = total + block.experts.balance, torch.zeros(())
        return total
