"""A repetition, presence or frequency penalty on one side: tokens that were there before are punished."""

from __future__ import annotations

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, loudest
from mismatchctl.result import Fact

_Z, _SURE, _APART, _SURE_APART = 6.0, 10.0, 0.4, 0.6
_ENOUGH, _OF_NOISE, _OF_OTHER = 100, 0.3, 0.1
_PROBABILITIES, _PLACES = 8, 4


@once
def earlier(case: Case) -> Ints:
    """How often each sound token stood in its response before [N]."""
    ids = case.rows.tokens["token_ids"][case.index].astype(np.int64)
    pairs = case.where * (ids.max(initial=0) + 1) + ids
    order = np.argsort(pairs, kind="stable")
    sorted_pairs = pairs[order]
    first = np.append(True, sorted_pairs[1:] != sorted_pairs[:-1])
    starts = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    counts = np.empty(len(order), np.int64)
    counts[order] = np.arange(len(order)) - starts
    return counts


def _test(case: Case) -> Detection | None:
    ids = case.rows.tokens.get("token_ids")
    if ids is None or case.reshaped or len(case.x) < 2 * _ENOUGH or case.noise < 1e-3:
        return None
    before = earlier(case)
    fresh, again = before == 0, before > 0
    if min(fresh.sum(), again.sum()) < _ENOUGH:
        return None
    up, down = float(np.median(case.scaled[again])), float(np.median(case.scaled[fresh]))
    small = abs(up - down) < _OF_NOISE * case.noise
    small |= min(abs(up), abs(down)) < _OF_OTHER * max(abs(up), abs(down))  # a penalty moves both: one is lower
    if up * down >= 0 or small:
        return None
    apart, z = _difference(case, np.clip(case.standard, -4, 4), again)
    if abs(z) < _Z or abs(apart) < _APART:
        return None
    often = before > 2
    steeper = float(np.median(case.scaled[often])) / up if often.sum() > _ENOUGH and up else None
    side = "rollout" if apart > 0 else "trainer"
    return Detection(
        "high" if abs(z) > _SURE and abs(apart) > _SURE_APART else "medium",
        f"tokens that stood in the response before are {abs(up):.2g} lower in the logits of the {side} than those "
        f"that did not ({abs(down):.2g} the other way): a repetition, presence or frequency penalty there, and not on "
        "the other side",
        evidence=(
            fact("apart", apart, "mean difference of repeated and fresh tokens, in units of the noise"),
            fact("z", z, "the same in standard errors, over sequences"),
            fact("repeated", up, "median difference of repeated tokens, in logits (train minus rollout)"),
            fact("fresh", down, "that of fresh tokens: the other way, as the rest of the probability is shared"),
            *_by_count(steeper),
        ),
        where={"tokens": "those seen before in their response", "side": side},
        examples=loudest(case, case.counts > 0, case.sums(np.abs(case.x) * again)),
        rivals={"weights_differ": f"the {side}'s repetition_penalty, presence_penalty, frequency_penalty, logit_bias"},
        everywhere=True,
    )


def _by_count(steeper: float | None) -> list[Fact]:
    meaning = "that of tokens seen three times, over repeated: 1 for presence and repetition, more for frequency"
    return [] if steeper is None else [fact("after_two", steeper, meaning)]


def _difference(case: Case, size: Float64s, again: np.ndarray) -> tuple[float, float]:
    """Mean of repeated minus that of fresh tokens of the same probability and place, and its z over sequences."""
    bins = np.zeros(len(size), np.int64)
    for values, parts in ((case.t, _PROBABILITIES), (case.place, _PLACES)):
        bins = bins * parts + np.searchsorted(np.quantile(values, np.linspace(0, 1, parts + 1)[1:-1]), values)
    number = np.maximum(np.bincount(bins), 1)
    share, mean = (np.bincount(bins, values) / number for values in (again, size))
    across = again - share[bins]
    spread = float((across * across).sum())
    if spread == 0:
        return 0.0, 0.0
    value = float((across * (size - mean[bins])).sum()) / spread
    sums = case.sums(across * (size - mean[bins] - value * across))
    error = float(np.sqrt((sums * sums).sum())) / spread
    return value, value / error if error > 0 else 0.0


CAUSE = Cause(
    id="logit_penalty",
    title="A penalty on repeated tokens acts on one side",
    shows="Of tokens of the same probability, those that stood in the response before are lower on one side, the "
    "others higher.",
    test=_test,
    advice="Set repetition_penalty=1, presence_penalty=0, frequency_penalty=0 and no logit_bias or no_repeat_ngram "
    "while sampling for training: a model's generation_config.json may set them (vLLM --generation-config vllm ignores "
    "it). Or have the trainer apply the same.",
    pointless="importance weights: they would undo the penalty token by token, with large variance",
    columns=("token_ids",),
)
