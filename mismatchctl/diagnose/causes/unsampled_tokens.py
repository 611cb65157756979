"""Tokens inside the mask that the policy did not sample: tool output, templates, forced text."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.numerical_noise import BFLOAT16_NOISE
from mismatchctl.diagnose.measures import fact, loudest, percent, share_of, suspicious_runs

_ONE_SIDED, _LONG, _DENIED = 0.85, 8, 2.0
_MANY = 0.01
"""Single tokens at log-prob 0 that the trainer denies can be a policy that has moved far, where they are few."""


def _test(case: Case) -> Detection | None:
    runs = suspicious_runs(case)
    runs = runs[~runs.at_end & ~runs.at_start & ~(case.reshaped & (runs.value == 0))]  # a nucleus of one token has 0
    if float((case.x < 0).sum()) > _ONE_SIDED * len(case.x):  # a sampler that cuts leaves a single token now and then
        runs = runs[(runs.value != 0) | ((runs.length >= _LONG) & (runs.off > _DENIED))]
    tokens = runs.tokens(case)
    sequences = np.bincount(case.sequence[tokens], minlength=case.size) > 0
    long = runs[runs.length >= 4]
    quiet = case.noise < BFLOAT16_NOISE  # then no policy has moved so far
    if tokens.sum() < (2 if quiet else 8) or sequences.sum() < (2 if quiet else max(2, 0.002 * case.size)):
        return None
    share = float(tokens.sum() / len(case.index))
    values, counts = np.unique(runs.value, return_counts=True)
    value = float(values[np.argmax(counts)])
    start = np.zeros(case.size, np.int64)
    start[runs.sequence[::-1]] = case.rows.position[case.index[runs.first[::-1]]]
    examples = loudest(case, sequences, case.sums(tokens[case.index]))
    return Detection(
        "high" if len(long) >= 2 else "medium" if share > _MANY or quiet else "low",
        f"{percent(share)} of the valid tokens, in {percent(float(sequences.mean()))} of the sequences, have the "
        f"constant rollout log-prob {value:g} where the trainer gives them {runs.off.mean():.3g} nats less: nobody "
        "sampled them",
        share=case.share(tokens),
        evidence=(
            fact("tokens", share, "share of valid tokens with a constant log-prob that the other side denies"),
            share_of("sequences", sequences, case.counts > 0, "share of sequences that hold such tokens"),
            fact("constant", value, "the constant, nats"),
            fact("run_length", float(runs.length.mean()), "tokens in a row"),
            fact("difference", float(runs.off.mean()), "mean |log ratio| there, nats"),
        ),
        where={"sequences": percent(float(sequences.mean())), "positions": "inside the response"},
        examples=examples,
        positions=start[examples],
        rivals={} if len(long) >= 2 else {"padding_or_sentinel": "is 0 what is written where a log-prob is missing?"},
        leaves=case.without(tokens),
    )


CAUSE = Cause(
    id="unsampled_tokens",
    title="Tokens that nobody sampled are not masked",
    shows="Runs of one constant log-prob inside a response, where the other side says that the token was unlikely.",
    test=_test,
    advice="Set the mask to 0 on tool output, templates and forced text{settings}. Engines report 0 or nothing "
    "for such tokens.",
    pointless="every correction: weights on such tokens are noise, and rejection would drop every sequence that "
    "uses a tool",
)
