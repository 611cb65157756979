"""A bias on some tokens of the vocabulary, on one side."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import calibration, fact, listed, loudest, percent

_ENOUGH, _SIZE, _STEADY, _Z = 6, 0.15, 0.35, 8.0
_MOST, _HELD, _SURE, _FAR = 0.2, 0.4, 0.6, 6.0


def _test(case: Case) -> Detection | None:
    ids = case.rows.tokens.get("token_ids")
    if ids is None or case.reshaped or len(case.x) < 300:
        return None
    logits = [values - np.log(-np.expm1(np.minimum(values, -1e-9))) for values in (case.r, case.t)]
    apart = logits[0] - logits[1]
    names, index, counts = np.unique(ids[case.index], return_inverse=True, return_counts=True)
    mean = np.bincount(index, apart) / counts
    spread = np.sqrt(np.maximum(np.bincount(index, apart * apart) / counts - mean * mean, 0.0))
    steady = (counts >= _ENOUGH) & (np.abs(mean) > _SIZE) & (spread < _STEADY * np.abs(mean))
    steady &= np.abs(mean) > _Z * np.maximum(spread, case.noise) / np.sqrt(counts)
    known = counts >= _ENOUGH
    if not steady.any() or steady.sum() > _MOST * known.sum():
        return None
    chosen = steady[index]
    held = float(case.k3[chosen].sum() / max(float(case.k3.sum()), 1e-300))
    rest = float(np.median(np.abs(apart[~chosen])))
    size = float(np.median(mean[steady]))
    if held < _HELD or rest > 0.3 * abs(size):
        return None
    tokens = case.marked(chosen)
    _, z, _, inverse_z = calibration(case)
    sampled = min(abs(z), abs(inverse_z)) < _FAR  # a bias leaves both sides distributions, one of which sampled
    return Detection(
        "high" if held > _SURE and steady.sum() >= 2 and sampled else "medium",
        f"{int(steady.sum())} of {len(names)} tokens of the vocabulary are {abs(size):.2g} "
        f"{'higher' if size > 0 else 'lower'} in the logits of the rollout wherever they stand, and hold "
        f"{percent(held)} of the K3; the others move by {rest:.2g}: a bias on these, on one side",
        share=case.share(tokens),
        evidence=(
            fact("bias", size, "median offset of these tokens in the logits, rollout minus train"),
            fact("tokens", listed(names[steady].tolist(), 8), "their ids"),
            fact("k3_share", held, "share of the K3 on them"),
            fact("others", rest, "median offset of all others"),
        ),
        where={"tokens": f"ids {listed(names[steady].tolist(), 4)}"},
        examples=loudest(case, case.counts > 0, case.sums(case.k3 * chosen)),
        rivals={"weights_differ": "the engine's logit_bias, bad_words and allowed tokens; a new row of the embedding"},
        everywhere=True,
    )


CAUSE = Cause(
    id="logit_bias",
    title="Some tokens have a bias on one side",
    shows="A few tokens of the vocabulary are off by the same amount in every context, and the others hardly.",
    test=_test,
    advice="Look for logit_bias, bad_words, suppressed or forced tokens in the engine's sampling parameters, and for a "
    "head or embedding with rows that one side trained or resized. Apply the same on both sides or on none.",
    pointless="importance weights: they would undo the bias token by token",
    columns=("token_ids",),
)
