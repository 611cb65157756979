"""What AReaL exports of a step: before and since it moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatchctl.batch import Bools
from mismatchctl.frameworks.run import Run
from mismatchctl.surrogates import Array, exp

if TYPE_CHECKING:
    from mismatchctl.frameworks.areal import Areal


def _summary(name: str, values: Array, where: Bools) -> dict[str, float]:
    """Mean, least and largest; nothing of no tokens, and no end that is infinite."""
    chosen = values[where]
    if not len(chosen):
        return {}
    found = {f"{name}/avg": float(np.mean(chosen, dtype=np.float64))}
    ends = {f"{name}/min": float(chosen.min()), f"{name}/max": float(chosen.max())}
    return found | {key: value for key, value in ends.items() if not np.isinf(value)}


def _behave(run: Run) -> Bools:
    return run.weights > 0


def _filtered(run: Run) -> float:
    """Share of tokens that the rule rejects, or would clamp."""
    valid = max(run.counted.sum(), 1)
    rule = run.options["rejection_sampling"]
    if rule["action"] == "mask":
        return float((run.counted & ~run.keep).sum() / valid)
    weights = run.applied.weights
    assert weights is not None
    changed = weights.bounded != weights.raw
    flags = changed if len(changed) == run.tokens else run.segments.spread(changed)
    return float((flags & run.counted).sum() / valid)


def _clips(shelf: Areal, run: Run) -> tuple[Array, Bools, Bools]:
    """Update ratio, and the tokens whose loss the clip or the dual clip decides."""
    x, advantages, _ = shelf.update(run)
    ratio = exp(x)
    low, high = 1 - run.options["eps_clip"], shelf.high_of(run.options)
    clipped = np.clip(ratio, low, high)
    if run.options["use_cispo_loss"]:
        return ratio, (clipped != ratio) & run.keep, np.zeros(run.tokens, np.bool_)
    plain, bounded = -advantages * ratio, -advantages * clipped
    dual = np.zeros(run.tokens, np.bool_)
    if run.options["c_clip"] is not None:
        dual = (advantages < 0) & (np.maximum(plain, bounded) > -advantages * run.options["c_clip"])
    return ratio, plain < bounded, dual


def before(shelf: Areal, run: Run) -> dict[str, float]:
    """At 4aef98d8d818."""
    logged: dict[str, float] = {}
    if run.has_loss:
        _, clipped, _ = _clips(shelf, run)
        logged["clip_ratio"] = float((clipped & run.keep).sum() / max(run.counted.sum(), 1))
    if run.correction.weight is not None:
        behave = _behave(run)
        logged["rs_filtered_fraction"] = _filtered(run)
        logged |= _summary("behave_imp_weight", run.weights, behave) | _summary("behave_approx_kl", run.d, behave)
        if behave.any():
            logged["unclipped_behave_tokens"] = float(behave.sum())
    return logged


def since(shelf: Areal, run: Run) -> dict[str, float]:
    """Since 2026-08: ratios and clips on the mask before rejection, log-probs, and counts."""
    valid, left = run.counted, run.keep
    logged: dict[str, float] = {"n_valid_tokens": float(valid.sum())}
    behave = _behave(run) if run.correction.weight is not None else valid
    if run.has_loss:
        ratio, clipped, dual = _clips(shelf, run)
        sequences, cispo = run.options["importance_sampling_level"] != "token", run.options["use_cispo_loss"]
        within = left if sequences else valid
        clipped, dual = clipped & within, dual & within
        (term, _), *_ = shelf.terms(run)
        losses = np.where(left, run.weights * term.losses, 0)
        logged |= {"clipped_tokens": float(clipped.sum()), "dual_clipped_tokens": float(dual.sum())}
        logged |= _summary("importance_weight", np.where(within, ratio, 0), valid)
        logged |= _summary("approx_kl", run.u, valid)
        logged |= _summary("new_logp", run.current, valid) | _summary("old_logp", run.rollout, valid)
        logged |= _summary("actor_loss", losses, valid)
        logged |= _summary("clip_ratio", clipped.astype(float), valid)
        logged |= _summary("dual_clip_ratio", dual.astype(float), valid)
        logged |= _summary("clipped_new_logp", run.current, clipped) | _summary(
            "clipped_old_logp", run.rollout, clipped
        )
        logged |= _summary("logp_diff", -run.v, valid) | _summary("logp_abs_diff", np.abs(run.v), valid)
        if not cispo:
            positions = float(len(run.step) * run.width)
            logged |= {"n_total_tokens": positions, "n_valid_tokens_in_loss": float(valid.sum())}
            logged["n_masked_tokens"] = positions - logged["n_valid_tokens_in_loss"]
            logged["masked_token_ratio"] = logged["n_masked_tokens"] / max(positions, 1)
        kl = run.v.astype(np.float64)
        logged["compute_logp/n_valid_tokens"] = float(behave.sum())
        for name, values in (
            ("prox_logp_gt", run.train),
            ("kl_div_direct", -run.v),
            ("kl_div_taylor", 0.5 * kl * kl),
            ("kl_div_dual", np.expm1(kl) - kl),
        ):
            logged |= _summary(f"compute_logp/{name}", values, behave)
    if run.correction.weight is not None:
        logged["unclipped_behave_tokens"] = float(behave.sum())
        logged |= _summary("behave_imp_weight", run.weights, behave) | _summary("behave_approx_kl", run.d, behave)
        logged |= _summary("behave_filtered_ratio", (~run.keep).astype(float), valid)
        logged["rs_filtered_fraction"] = _filtered(run)
    return logged
