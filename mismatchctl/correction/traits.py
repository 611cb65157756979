"""What a Correction does, costs and assumes, in words: derived from its rules, whoever ships it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mismatchctl.correction.model import Correction
from mismatchctl.correction.presets import Preset

TITLES = {
    "name": "preset",
    "weight": "IS weight",
    "rejection": "rejection",
    "clip": "PPO clip",
    "bypass": "bypass",
    "old_policy": "old policy",
    "corrects": "corrects",
    "forward_pass": "extra forward pass",
    "cost": "cost beside it",
    "assumes": "assumes",
}
_NOTHING = "-"


@dataclass(frozen=True)
class Traits:
    """One row of the table, in words."""

    name: str
    weight: str
    rejection: str
    clip: str
    bypass: str
    old_policy: str
    corrects: str
    forward_pass: str
    cost: str
    assumes: str


def traits(name: str, correction: Correction) -> Traits:
    """A correction in the words of the table."""
    loss = correction.loss
    return Traits(
        name,
        _weight(correction),
        "; ".join(gate.title for gate in correction.gates) or _NOTHING,
        {"ppo": "on current/train", "ppo_bypass": "on current/rollout", "policy_gradient": _NOTHING}[loss],
        "no" if loss == "ppo" else "yes",
        {"ppo": "recomputed", "ppo_bypass": "= rollout", "policy_gradient": "none"}[loss],
        _corrects(correction),
        "yes, to recompute" if loss == "ppo" else "none",
        "; ".join(_costs(correction)) or "nothing",
        "; ".join(_assumptions(correction)),
    )


def _weight(correction: Correction) -> str:
    weight = correction.weight
    if weight is None:
        return _NOTHING
    low, high = weight.bounds
    bounds = ""
    if weight.truncate is not None:
        bounds = f", truncated at {high:g}"
    elif weight.clip or weight.zero:
        bounds = f", {'clipped to' if weight.clip else '0 outside'} {low:g}..{high:g}"
    return f"{weight.level}{bounds}{'' if weight.normalize == 'none' else ', normalized'}"


def _corrects(correction: Correction) -> str:
    if correction.loss == "ppo_bypass":
        return "rollout to current by PPO's ratio (weights are 1)"
    if correction.weight is not None:
        return "rollout to current" if correction.loss == "policy_gradient" else "rollout to train"
    return "nothing (rejection only)" if correction.gates else "nothing"


def _costs(correction: Correction) -> list[str]:
    found = []
    if correction.weight is not None and correction.weight.level == "sequence":
        found.append("variance that grows with length")
    if any(gate.effect == "mask" for gate in correction.gates):
        found.append("rejected data")
    if any(gate.effect == "zero" for gate in correction.gates):
        found.append("rejected data, which still counts in the mean")
    return found


def _assumptions(correction: Correction) -> list[str]:
    found = []
    if correction.loss == "ppo_bypass":
        found.append("rollout and train nearly agree, so that one clip may hold both drifts")
    if correction.loss == "policy_gradient":
        found.append("updates are small: no clip holds them")
    if correction.weight is not None:
        found.append(
            {
                "token": "what the tokens before it do to a token's weight may be left out (bias, little variance)",
                "sequence": "sequences are short or nearly matched, or batches large (no bias within the bound)",
                "geometric": "the mean mismatch of a sequence stands for that of its tokens (bias, little variance)",
            }[correction.weight.level]
        )
        if correction.weight.normalize != "none":
            found.append("batches are large enough for their mean weight to be 1")
    if correction.gates:
        found.append("what lies outside the bounds may be left out of training")
    return found or ["rollout and train agree"]


def traits_of(presets: Mapping[str, Preset]) -> list[Traits]:
    """Those of presets, aliases left out."""
    return [traits(name, item.correction) for name, item in presets.items() if item.alias_of is None]
