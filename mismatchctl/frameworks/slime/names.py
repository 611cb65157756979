"""What each name in a slime or Miles run means, and each that only slime's documents know."""

from __future__ import annotations

from dataclasses import replace

from mismatchctl.frameworks.framework import Meaning
from mismatchctl.frameworks.slime.metrics import DOCUMENTED, METRICS, NEVER_LOGGED, LoggedMetric
from mismatchctl.frameworks.slime.versions import Version
from mismatchctl.measure.metrics.quantity import BOUNDED_WEIGHTS, FINAL_WEIGHTS, KEPT, RAW_WEIGHTS, TOKENS

_OVER = {"original": TOKENS, "kept": KEPT, "none": "sequences"}
_BASIS = {
    "log-probs": "train/rollout",
    "raw weights": RAW_WEIGHTS,
    "bounded weights": BOUNDED_WEIGHTS,
    "final weights": FINAL_WEIGHTS,
    "loss": "train/rollout",
}


def meanings(version: Version) -> list[Meaning]:
    """Every name that a version can log, with `train/` before it; then what no version ever logged."""
    logged = [
        _meaning(item, item.name, item.when.words, version) for item in METRICS if version.finite or not item.miles_only
    ]
    whole = Meaning("train/loss", "", "pg_loss + kl_loss_coef * kl_loss", KEPT, "as each of the two")
    return [*logged, whole, *(_never_logged(name, version) for name in DOCUMENTED if name in NEVER_LOGGED)]


def _never_logged(name: str, version: Version) -> Meaning:
    item = next(item for item in METRICS if item.name == DOCUMENTED[name])
    when = f"never: only documented, the code logs train/{item.name}"
    return replace(_meaning(item, name, when, version), logged_as=f"train/{item.name}")


def _meaning(item: LoggedMetric, name: str, when: str, version: Version) -> Meaning:
    return Meaning(
        f"train/{name}",
        when,
        item.formula,
        _OVER[item.mask],
        _reduction(item, version),
        item.like,
        item.pair or _BASIS[item.basis],
    )


def _reduction(item: LoggedMetric, version: Version) -> str:
    counted = "rollouts" if version.rollout_denominators else "sequences"
    if item.mask == "none":
        return f"sum over sequences / {counted}"
    if version.rollout_denominators:
        return f"{item.within} within each rollout, by its tokens before rejection, then over rollouts"
    return f"{item.within} within each sequence (0 where none is left), then over sequences"
