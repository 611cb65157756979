"""Surrogate losses by name, with their numbers: `dual_clip`, `gspo:low=0.9997,high=1.0004`."""

from __future__ import annotations

import difflib

LOSSES: dict[str, dict[str, float]] = {
    "ppo": {"low": 0.8, "high": 1.2},
    "ppo_bypass": {"low": 0.8, "high": 1.2},
    "policy_gradient": {},
    "dual_clip": {"low": 0.8, "high": 1.2, "dual": 3.0},
    "two_sided": {"low": 0.8, "high": 1.2, "cap": 4.0},
    "cispo": {"low": 0.0, "high": 5.0},
    "cispo_bypass": {"low": 0.0, "high": 5.0},
    "gspo": {"low": 0.8, "high": 1.2},
    "gspo_token": {"low": 0.8, "high": 1.2},
    "gmpo": {"low": -0.4, "high": 0.4},
    "sapo": {"positive": 1.0, "negative": 1.05},
    "vespo": {"k_positive": 2.0, "rate_positive": 3.0, "k_negative": 3.0, "rate_negative": 2.0},
    "topr": {"low": 0.0, "high": 1.0},
    "importance_sampling": {},
    "dppo": {"low": 0.2, "high": 0.2},
    "ipo": {"eps": 0.1},
    "quadratic": {"tau": 1e-3},
}
"""Every loss with its numbers and their defaults, those that frameworks ship.

ppo clips current/train, ppo_bypass current/rollout; dual_clip bounds the loss where the advantage is negative,
two_sided the unclipped ratio too. cispo is REINFORCE with the bounded ratio as a constant. gspo takes the geometric
mean ratio of the sequence, gspo_token its value with the gradient of each token, gmpo the geometric mean of ratios that
are clipped on one side (in log space). sapo replaces the clip by a sigmoid, vespo by a gate on the product of
current/rollout. topr bounds the ratio where the advantage is negative. importance_sampling, dppo, ipo and quadratic
weight with current/rollout: as it is; without tokens whose probability moved too far the way the advantage pushes, or
either way; with tau times the squared log ratio besides.
"""

WITH_OWN_RATIO = frozenset(
    ("ppo_bypass", "cispo_bypass", "vespo", "topr", "importance_sampling", "dppo", "ipo", "quadratic")
)
"""Losses whose own ratio is current/rollout: weights of that ratio are in them already."""
OF_SEQUENCES = frozenset(("gspo", "gmpo"))
"""Losses whose gradient passes from each token to all of its sequence."""


def loss_numbers(text: str) -> tuple[str, dict[str, float]]:
    """The name of a loss, and all its numbers.

    Raises:
        ValueError: there is no such loss, or it has no such number.
    """
    name, _, given = text.partition(":")
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"there is no loss {name!r}{meant}: there are {', '.join(LOSSES)}")
    numbers = dict(LOSSES[name])
    for part in filter(None, given.split(",")):
        key, _, value = part.partition("=")
        if key not in numbers:
            known = ", ".join(numbers) or "none"
            raise ValueError(f"loss {name} has no number {key!r}: it has {known}")
        try:
            numbers[key] = float(value)
        except ValueError:
            raise ValueError(f"loss {text}: {value!r} is no number") from None
        if not abs(numbers[key]) < float("inf"):
            raise ValueError(f"loss {text}: {value} is no finite number")
    return name, numbers
