"""A mask that is inverted, or that covers the prompt."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.measures import fact, loudest, percent, share_of, suspicious_runs

_IMPROBABLE = 20.0
"""A common beginning of this many nats is not sampled twice."""
_SOME = 20


def _test(case: Case) -> Detection | None:
    return _inverted(case) or _covers_prompt(case) or _shares_prefix(case)


def _inverted(case: Case) -> Detection | None:
    """Masked tokens agree as sampled ones do, the valid ones do not."""
    if case.rows.mask.all():
        return None
    finite = np.isfinite(case.rollout) & np.isfinite(case.train)
    masked = ~case.rows.mask & finite & (case.rollout < 0) & (case.train < 0)
    if masked.sum() < _SOME or not len(case.x):
        return None
    outside = np.abs(case.train - case.rollout)[masked]
    inside = np.abs(case.x)
    spread = float(np.std(case.rollout[masked]))
    if spread < 0.05 or np.median(outside) > 0.2 * np.median(inside) or np.median(inside) < 0.2:
        return None
    masked_share = float(masked.sum() / max(masked.sum() + len(inside), 1))
    return Detection(
        "high",
        f"the two sides agree on masked tokens (median difference {np.median(outside):.3g} nats) and not on valid "
        f"ones ({np.median(inside):.3g}): the mask is inverted",
        share=1.0,
        evidence=(
            fact("difference_masked", float(np.median(outside)), "median |log ratio| on masked tokens, nats"),
            fact("difference_valid", float(np.median(inside)), "median |log ratio| on valid tokens, nats"),
            fact("masked_share", masked_share, "share of tokens with log-probs that are masked"),
        ),
        examples=loudest(case, np.bincount(case.sequence[masked], minlength=case.size) > 0, case.means(np.abs(case.x))),
        leaves=case.without(case.sound),
    )


def _covers_prompt(case: Case) -> Detection | None:
    """Responses that begin with a constant the trainer denies: the engine has no log-probs for the prompt."""
    runs = suspicious_runs(case)
    runs = runs[runs.at_start & ~runs.at_end]
    sequences = np.isin(np.arange(case.size), runs.sequence)
    if sequences.sum() < max(3, 0.05 * (case.counts > 0).sum()):
        return None
    tokens = runs.tokens(case)
    return Detection(
        "high",
        f"{percent(float(sequences.mean()))} of the sequences begin with {runs.length.mean():.3g} tokens on average "
        f"to which one side gives the constant {runs.value[0]:g}: the mask covers the prompt",
        share=case.share(tokens),
        evidence=(
            share_of("sequences", sequences, case.counts > 0, "share of sequences that begin with a constant log-prob"),
            fact("tokens_each", float(runs.length.mean()), "tokens in such a beginning"),
            fact("difference", float(runs.off.mean()), "mean |log ratio| there, nats"),
        ),
        where={"positions": "the beginning of the response"},
        examples=loudest(case, sequences),
        rivals={
            "unsampled_tokens": "token_ids: is the constant stretch the prompt, or a forced prefix of the response?"
        },
        leaves=case.without(tokens),
    )


def _shares_prefix(case: Case) -> Detection | None:
    """Responses to one prompt that begin alike for longer than chance allows."""
    ids = case.rows.tokens.get("token_ids")
    if ids is None or case.rows.columns.get("prompt_id") is None:
        return None
    members: defaultdict[int, list[int]] = defaultdict(list)
    for sequence in np.flatnonzero(case.counts > 0).tolist():
        members[int(case.clusters[sequence])].append(sequence)
    ends = np.cumsum(case.counts)
    pairs = [sequences[:2] for sequences in members.values() if len(sequences) > 1]
    prefix = np.zeros(len(case.sound), np.bool_)
    hits, lengths = [], []
    for first, second in pairs:
        one, two = (case.index[ends[s] - case.counts[s] : ends[s]] for s in (first, second))
        shorter = min(len(one), len(two))
        differ = np.flatnonzero(ids[one[:shorter]] != ids[two[:shorter]])
        common = int(differ[0]) if len(differ) else 0
        surprise = -np.maximum(case.train, case.rollout)[one[:common]].sum()  # as both sides admit
        if common and surprise > _IMPROBABLE:
            hits.append(first)
            lengths.append(common)
            prefix[one[:common]] = prefix[two[:common]] = True
    if len(hits) < max(3, 0.5 * len(pairs)):
        return None
    return Detection(
        "medium",
        f"responses to one prompt share their first {np.mean(lengths):.0f} tokens, for {len(hits)} of {len(pairs)} "
        "prompts: the mask covers the prompt",
        share=case.share(prefix),
        evidence=(
            fact("prompts", len(hits) / len(pairs), "share of prompts whose responses begin with the same tokens"),
            fact("tokens_each", float(np.mean(lengths)), "tokens that they share"),
            fact("nats", _IMPROBABLE, "no two samples share a beginning less probable than e^-20 by chance"),
        ),
        where={"positions": f"the first {int(np.median(lengths))} tokens"},
        examples=np.array(hits[:3]),
        rivals={"unsampled_tokens": "a forced prefix of the response (a template) looks the same: look at token_ids"},
    )


CAUSE = Cause(
    id="mask_wrong",
    title="The mask covers the wrong tokens",
    shows="Masked tokens agree and valid ones do not; or responses begin with a constant, or with the same "
    "improbable tokens.",
    test=_test,
    advice="Print token_ids of a row beside its mask. Masks are 1 on sampled tokens{settings}; attention_mask is"
    " not one.",
    pointless="every correction: it would weigh tokens that nobody sampled",
    columns=("token_ids",),
)
