"""Architectures and training texts of the small language models of strangers.py."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

PROMPT, RESPONSE = 16, 72
CONTEXT = PROMPT + RESPONSE


@dataclass(frozen=True)
class Architecture:
    """Architecture and training of a model.

    Attributes:
        words: Whether tokens are words and punctuation, instead of bytes.
        prose: Whether the model learns Python's reference in subword tokens, instead of source code.
        common: Number of words in the vocabulary.
        shared: Number of query heads that share keys and values.
        positions: "rope", "alibi" or "none".
        convolved: Whether every other layer is a gated convolution instead of attention.
        experts: Number of experts per layer. 1 is a dense feed-forward layer.
        chosen: Number of experts per token.
        router: "sigmoid" or "softmax".
        parallel: Whether attention and feed-forward are parallel, with squared ReLU instead of SwiGLU.
        steps: Number of training steps. With few steps, the model is uncertain. With many steps on few `texts`, it is
            nearly deterministic.
    """

    name: str
    words: bool
    prose: bool = False
    common: int = 800
    width: int = 64
    layers: int = 2
    heads: int = 4
    shared: int = 1
    positions: str = "rope"
    convolved: bool = False
    experts: int = 1
    chosen: int = 1
    router: str = "sigmoid"
    parallel: bool = False
    steps: int = 500
    texts: int = 20_000
    seed: int = 0


SEEN = (
    Architecture("rope-swiglu", words=False, steps=900),
    Architecture("sigmoid-moe", words=True, experts=12, chosen=3, width=48, steps=700, seed=1),
    Architecture("gqa-unsure", words=True, width=48, layers=3, shared=2, steps=120, seed=2),
    Architecture(
        "softmax-moe-sure", words=True, width=48, experts=6, chosen=1, router="softmax", texts=250, steps=900, seed=4
    ),
    Architecture("alibi-parallel", words=False, positions="alibi", parallel=True, width=56, steps=700, seed=3),
    Architecture(
        "alibi-moe",
        words=True,
        common=300,
        width=56,
        positions="alibi",
        experts=8,
        chosen=2,
        router="softmax",
        steps=700,
        seed=22,
    ),
    Architecture(
        "convolved-prose", words=True, prose=True, positions="none", convolved=True, layers=4, steps=700, seed=41
    ),
    Architecture(
        "convolved-moe",
        words=False,
        positions="none",
        convolved=True,
        width=56,
        layers=6,
        experts=6,
        chosen=2,
        router="softmax",
        steps=450,
        seed=42,
    ),
    Architecture(
        "mqa-parallel", words=True, common=1500, layers=3, heads=8, shared=8, parallel=True, steps=600, seed=31
    ),
    Architecture(
        "alibi-gqa-moe", words=False, positions="alibi", width=48, shared=2, experts=10, chosen=2, steps=700, seed=32
    ),
    Architecture(
        "prose-moe",
        words=True,
        prose=True,
        common=500,
        width=48,
        layers=5,
        heads=6,
        convolved=True,
        experts=5,
        chosen=2,
        steps=550,
        seed=53,
    ),
    Architecture("alibi-wide", words=False, positions="alibi", width=96, layers=3, shared=2, steps=400, seed=54),
    Architecture("gqa-deep", words=True, common=500, width=64, layers=4, shared=2, steps=450, seed=31),
    Architecture("softmax-moe-bytes", words=False, width=56, experts=6, chosen=2, router="softmax", steps=600, seed=32),
)
"""Models on which the rules of `diagnose` were developed."""
UNSEEN = (
    Architecture("rope-words", words=True, common=600, width=56, layers=4, shared=2, steps=500, seed=61),
    Architecture(
        "alibi-moe-bytes",
        words=False,
        positions="alibi",
        layers=3,
        experts=8,
        chosen=2,
        router="softmax",
        steps=600,
        seed=62,
    ),
)
"""Held-out models, on which docs/methods/accuracy.md states rates."""
GATE_TRIED = (
    Architecture("alibi-moe-words", words=True, common=400, width=56, positions="alibi", experts=8, chosen=2,
                 router="softmax", steps=600, seed=71),
    Architecture("rope-moe-top1", words=True, common=600, width=48, layers=3, experts=4, router="softmax", steps=550,
                 seed=72),
    Architecture("mqa-moe-sigmoid", words=False, width=56, layers=3, shared=4, experts=8, chosen=2, steps=600, seed=73),
    Architecture("prose-dense", words=True, prose=True, common=500, width=56, layers=3, steps=450, seed=74),
    Architecture("alibi-moe-sharp", words=True, common=300, width=48, positions="alibi", experts=16, chosen=2,
                 router="softmax", steps=800, texts=2000, seed=75),
)  # fmt: skip
"""Models on which the margin of the gate's p-values was chosen."""
GATE_HELD_OUT = (
    Architecture("prose-moe-wide", words=True, prose=True, common=700, width=64, layers=3, shared=2, experts=6,
                 chosen=2, router="softmax", steps=500, seed=81),
    Architecture("convolved-moe-words", words=True, common=500, width=48, layers=4, convolved=True, positions="none",
                 experts=8, chosen=3, steps=500, seed=82),
    Architecture("rope-moe-bytes", words=False, width=48, layers=3, experts=12, chosen=1, router="softmax", steps=700,
                 seed=83),
    Architecture("alibi-dense", words=True, common=600, width=48, layers=3, positions="alibi", shared=2, steps=300,
                 seed=84),
)  # fmt: skip
"""Held-out models, on which docs/methods/gate.md states rates."""


@dataclass
class Text:
    """Training texts from the standard library or its reference as tokens. The last token ends a text."""

    vocabulary: int
    pieces: list[list[int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Architecture) -> Text:
        folder = Path(sysconfig.get_path("stdlib"))
        source = "\n\n".join(path.read_text(errors="ignore") for path in sorted(folder.glob("*.py"))[:120])
        source = "\n\n".join(topics.values()) if plan.prose else source
        blocks = [block for block in re.split(r"\n\s*\n", source) if len(block) > 60 and block.isascii()][: plan.texts]
        token = subword_pattern(blocks, plan.common) if plan.prose else r" *\w+|\s+|[^\w\s]"
        cut = [re.findall(token, block) if plan.words else list(block) for block in blocks]
        counts = Counter(token for block in cut for token in block)
        names = [*map(chr, range(128)), *[token for token, _ in counts.most_common(plan.common) if len(token) > 1]]
        number = {token: index for index, token in enumerate(names)}

        def encode(block: list[str]) -> Iterator[int]:
            for token in block:
                yield from [number[token]] if token in number else map(ord, token)

        end = len(names)
        pieces = [[*encode(block), end][:CONTEXT] for block in cut]
        return cls(end + 1, [piece for piece in pieces if len(piece) > PROMPT + 4], names)

    def batch(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return some texts, right-padded, and the mask of their tokens, [B, T]."""
        rows = [self.pieces[i] for i in chosen]
        length = max(map(len, rows))
        tokens = torch.tensor([row + [self.vocabulary - 1] * (length - len(row)) for row in rows])
        return tokens, torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]


def subword_pattern(blocks: list[str], count: int) -> str:
    """Return a regex of the `count` subwords that save the most tokens, longest first, or any character."""
    words = Counter(word for block in blocks for word in re.findall(r" ?[A-Za-z]+", block))
    saved: Counter[str] = Counter()
    for word, number in words.items():
        for size in range(2, 9):
            for start in range(len(word) - size + 1):
                saved[word[start : start + size]] += number * (size - 1)
    return "|".join([*sorted((piece for piece, _ in saved.most_common(count)), key=len, reverse=True), r"[\s\S]"])
