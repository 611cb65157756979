"""Sequences with their true values, before a framework pads, shifts or packs them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

GROUP = 2
"""Responses per prompt."""
GARBAGE = -77.0
"""A value without meaning, for padding and prompts."""


@dataclass(frozen=True)
class Sampled:
    """One response to one prompt, with lists over the tokens of the response.

    ours: whether the policy sampled the token and trains on it.
    rollout, train: log-probs that float32 represents exactly, without meaning if not `ours`.
    rejected: whether the framework's correction drops the sequence after the snippet.
    versions: version of the weights that sampled each token.
    """

    prompt_id: int
    prompt: list[int]
    response: list[int]
    ours: list[bool]
    rollout: list[float]
    train: list[float]
    advantage: float
    reward: float
    rejected: bool
    versions: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    def whole(self, values: Iterable[Any], before: Any) -> list[Any]:
        return [before] * len(self.prompt) + list(values)

    def sampled(self, values: Sequence[float], elsewhere: float = 0.0) -> list[float]:
        """Return `values` on sampled tokens and `elsewhere` on tool output, as engines report."""
        return [value if ours else elsewhere for value, ours in zip(values, self.ours, strict=True)]


@dataclass(frozen=True)
class Step:
    number: int
    sequences: list[Sampled]


def steps() -> list[Step]:
    """Make two steps of six sequences: one with tool output, one outside of training, two that are rejected."""
    rng = np.random.default_rng(7)
    return [Step(number, [_sampled(rng, row) for row in range(6)]) for number in (3, 4)]


def _sampled(rng: np.random.Generator, row: int) -> Sampled:
    before, length = 2 + (row // GROUP) * 2 + row % 2, [5, 9, 4, 3, 7, 6][row]
    ours = np.ones(length, bool)
    if row == 1:
        ours[3:6] = False  # tokens of a tool
    if row == 3:
        ours[:] = False  # cut off, and not in the loss
    rollout = -rng.exponential(size=length).astype(np.float32) - np.float32(0.01)
    train = np.minimum(rollout + rng.normal(scale=0.2, size=length).astype(np.float32), np.float32(-0.001))
    return Sampled(
        prompt_id=row // GROUP,
        prompt=rng.integers(10, 1000, before).tolist(),
        response=rng.integers(1000, 9000, length).tolist(),
        ours=ours.tolist(),
        rollout=rollout.tolist(),
        train=train.tolist(),
        advantage=float(np.float32(rng.normal())),
        reward=[0.0, 1.0, 0.5, 0.25, 1.0, 0.75][row],
        rejected=row in (0, 4),
        versions=[11, 12] * (length // 2) + [12] * (length % 2),
    )


def padded(
    rows: Iterable[Sequence[Any]],
    fill: Any,
    dtype: torch.dtype = torch.float32,
    side: Literal["left", "right"] = "right",
    width: int | None = None,
) -> torch.Tensor:
    """Return rows as a tensor [B, T], padded to the longest row or to `width`."""
    lists = [list(row) for row in rows]
    width = max(len(row) for row in lists) if width is None else width
    pads = [[fill] * (width - len(row)) for row in lists]
    return torch.tensor(
        [pad + row if side == "left" else row + pad for pad, row in zip(pads, lists, strict=True)], dtype=dtype
    )


def repeated(sequence: Sampled) -> list[float]:
    return sequence.sampled([sequence.advantage] * len(sequence.response))


def record_of(step: int, sequence: Sampled) -> dict[str, Any]:
    ours = np.array(sequence.ours)

    def valid(values: Sequence[Any]) -> list[Any]:
        return [value for value, kept in zip(values, ours, strict=True) if kept]

    return {
        "step": step,
        "rollout": valid(sequence.rollout),
        "train": valid(sequence.train),
        "token_ids": valid(sequence.response),
        "advantages": valid([sequence.advantage] * len(ours)),
        "reward": sequence.reward,
        "prompt_id": sequence.prompt_id,
        "rollout_version": min(sequence.versions),
        "train_version": step,
    }


def truth(
    steps: Sequence[Step], columns: Sequence[str], keep: Callable[[Sampled], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Return the content of a correct dump of the steps, as `reading.recorded` returns it."""
    full = [record_of(step.number, sequence) for step in steps for sequence in step.sequences if keep(sequence)]
    return [{name: record[name] for name in ("step", "rollout", "train", *columns)} for record in full]
