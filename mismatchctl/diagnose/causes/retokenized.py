"""Text that was tokenized anew: agreement up to a position, and again after it when one side is shifted."""

from __future__ import annotations

import numpy as np

from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.cause import Cause, Detection
from mismatchctl.diagnose.causes.edited_response import broken
from mismatchctl.diagnose.causes.misaligned import shifts
from mismatchctl.diagnose.measures import fact, listed, loudest, percent, share_of

_FARTHEST, _FEWEST, _MOST_OF = 12, 2, 0.5


def _test(case: Case) -> Detection | None:
    breaks = broken(case)
    if breaks is None:
        return None
    found, split = breaks
    after = case.marked((case.place >= case.each(split)) & case.each(found))
    shift, agreement = shifts(case.without(~after), np.flatnonzero(found), _FARTHEST)
    moved = found & (shift != 0)
    if moved.sum() < max(_FEWEST, _MOST_OF * found.sum()):
        return None
    share = share_of("sequences", found, case.counts > 0, "share of sequences that disagree from a position on")
    values, counts = np.unique(shift[moved], return_counts=True)
    examples = loudest(case, moved, case.sums(after[case.index]))
    at = case.rows.position[case.index[np.minimum(case.starts + split, len(case.index) - 1)]]
    told = [f"{values[i]:+d}: {counts[i]}" for i in np.argsort(-counts)]
    return Detection(
        "high" if moved.sum() > _FEWEST else "medium",
        f"{percent(float(found.sum() / max((case.counts > 0).sum(), 1)))} of the sequences agree up to a position, and "
        "from there on again when one column is shifted: both sides have the same text there in other tokens",
        share=case.share(after),
        evidence=(
            share,
            fact(
                "shifts", listed(told), "sequences by shift: rollout[i + shift] belongs to train[i] after the position"
            ),
            fact("agreement", float(np.median(agreement[moved])), "mean difference at that shift over that at none"),
        ),
        where={
            "sequences": percent(float(found.mean())),
            "positions": f"from {listed(at[examples], 3)} on in the examples",
        },
        examples=examples,
        positions=at[examples],
        rivals={"misaligned": "the lengths of both sides' token ids: does one lose or repeat tokens there?"},
        leaves=case.without(after),
    )


CAUSE = Cause(
    id="retokenized",
    title="The text was tokenized anew",
    shows="Agreement up to a position, and again from there on when one column is shifted: the same text in more or "
    "fewer tokens.",
    test=_test,
    advice="Train on the token ids that the engine returned, and append to them between turns. Decoding to text and "
    "tokenizing that again gives other tokens; vLLM return_token_ids and SGLang output_ids give them{settings}.",
    pointless="importance weights and vetoes: they act on tokens that were never sampled",
)
