"""What is said of each correction in a ranking, and of the ranking's limits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatchctl.advise.applied import Candidate
from mismatchctl.advise.choose import FEWEST, SURE, CandidateRanking, widened
from mismatchctl.advise.gradient import Moments
from mismatchctl.advise.model import Advised
from mismatchctl.advise.reference import CONVERGES, Reference
from mismatchctl.advise.sample import ENOUGH, RunSample
from mismatchctl.advise.words import called
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.framework import Framework

TOLD_APART, UNKNOWN = 1.05, 10.0
"""Times the error of the best from which it is said that there may be better, and from which it is not said how far."""
SHORT = 128
"""Tokens of a response up to which the advice was measured on many mismatches (docs/advise.md)."""


def advised(
    name: str, own: Candidate, choice: CandidateRanking, sample: RunSample, framework: Framework | None
) -> Advised:
    """The row of a candidate."""
    found, (gain, gain_se) = choice.moments[name], choice.gain(name)
    reward, length = _selection(own, sample)
    return Advised(
        name=name,
        correction=own.correction.to_mapping(),
        bias2=found.bias2,
        bias2_se=found.bias2_se,
        bias2_counted=found.bias2_counted,
        variance=choice.variance(name),
        mse=choice.mse[name],
        gain=gain,
        gain_se=gain_se,
        rejected_tokens=own.rejected_tokens,
        rejected_sequences=own.rejected_sequences,
        ess=own.ess,
        ties=choice.ties(name),
        why=_why(name, choice),
        kept_reward_difference=reward,
        kept_length_difference=length,
        config=_config(own.correction, framework),
    )


def _why(name: str, choice: CandidateRanking) -> str:
    """What speaks for the first, and why the others stand behind it."""
    own, first, none = (choice.moments[each] for each in (name, choice.first, "none"))
    if name == choice.first:
        return "nothing beats it beyond noise" if name == "none" else f"less {_more(none, own)} than no correction"
    if choice.ties(name):
        return "cannot be told from the first"
    if name != "none" and name not in choice.better:
        return "not better than no correction beyond noise"
    return "less error" if choice.mse[name] < choice.mse[choice.first] else f"more {_more(own, first)}"


def _more(own: Moments, other: Moments) -> str:
    """In which parts of the error one has more than another."""
    pairs = (("bias", own.bias2_counted, other.bias2_counted), ("variance", own.variance, other.variance))
    return " and ".join(word for word, value, less in pairs if value > less) or "error"


def _selection(own: Candidate, sample: RunSample) -> tuple[float | None, float | None]:
    """Mean reward and mean length of rejected less kept sequences; None where all or none are rejected."""
    lengths = sample.batch.segments.lengths
    filled = lengths > 0
    kept = filled & (own.kept > 0)
    rejected = filled & ~kept
    if not kept.any() or not rejected.any():
        return None, None
    reward = sample.batch.columns.get("reward")
    numeric = reward is not None and reward.dtype.kind in "fiu" and bool(np.isfinite(reward).all())
    length = float(lengths[rejected].mean() - lengths[kept].mean())
    if reward is None or not numeric:
        return None, length
    return float(reward[rejected].mean() - reward[kept].mean()), length


def _config(correction: Correction, framework: Framework | None) -> dict[str, object] | None:
    if framework is None:
        return None
    try:
        native, lost = framework.native(correction)
    except ConfigError:
        return None
    return None if lost else dict(native)


def notes(sample: RunSample, reference: Reference, choice: CandidateRanking, refused: Mapping[str, str]) -> list[str]:
    """What limits the advice, in sentences."""
    found = [
        "errors are those of a surrogate gradient of one update: offline data cannot show a collapse, and what token "
        "weights leave out grows with the length of responses"
    ]
    if sample.token_ids is None:
        found.append(
            "the dump has no token_ids: ranks of probabilities stand for them, and chose worse where the truth is known"
        )
    if len(sample) < ENOUGH:
        broken = ", and broke" if len(sample) < FEWEST else ""
        found.append(
            f"{len(sample)} sequences: below {ENOUGH} the advice was less reliable{broken} where the truth is known; "
            f"a difference counts from {widened(len(sample)):.2g} standard errors on, in place of {SURE:.2g}"
        )
    mean = sample.batch.tokens / max(len(sample), 1)
    if mean > SHORT:
        found.append(
            f"responses of {mean:,.0f} tokens on average: of more than {SHORT} the advice was measured on few "
            "mismatches whose truth is known, most of which it was chosen on, and on none of thousands"
        )
    if reference.is_heavy:
        found.append(f"sequence weights have a k-hat of {reference.k_hat:.2f}: their mean does not converge here")
    if reference.lower_bound:
        found.append(f"biases are lower bounds, and count {reference.counts:g} times: {_left_out(reference)}")
    surest = next((name for name in choice.order if name in choice.better), None)
    if surest is not None and choice.first not in (surest, "none"):
        (gain, error), (less, _) = (choice.gain(name) for name in (choice.first, surest))
        found.append(
            f"{choice.first} takes {gain:.0%} of the error away by estimate, which is not sure (standard error "
            f"{error:.0%}); {surest} surely takes some away, {less:.0%} by estimate"
        )
    regret = choice.most_regret()
    if regret > TOLD_APART:
        most = f"up to {regret:.2g}" if regret < UNKNOWN else "many"
        found.append(
            f"as far as sampling noise goes (95 %), {called(choice.first)} may have {most} times the error of the best "
            "candidate: more sequences tell them apart"
        )
    tipping = choice.tipping(reference.counts)
    if tipping is not None:
        times = tipping.factor * reference.counts
        told = "as large as estimated, noise and all" if times <= 1 else f"{times:.2g} times those estimated"
        found.append(f"if squared biases are {told}, {called(tipping.instead)} is better than {called(choice.first)}")
    if not sample.is_complete:
        found.append(f"from {len(sample):,} of {sample.dump_sequences:,} sequences, whole prompts chosen by a hash")
    if refused:
        shown = ", ".join(f"{name} ({why})" for name, why in list(refused.items())[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        found.append(f"out of the question: {shown}{more}; no correction is weighed whatever is asked for")
    return found


def _left_out(reference: Reference) -> str:
    """Why what stands for no bias leaves something out that the sample cannot show."""
    name, mean = reference.correction.name, f"{reference.sequence_mean:.2f}"
    if not reference.is_per_token:
        return f"{name} stands for no bias (mean weight {mean}), but the tail of its weights is not in this sample"
    low, high = CONVERGES
    return (
        f"sequence weights have a mean of {mean} here, outside {low:g} to {high:g}, so {name} stands for no bias, "
        "which leaves out what the tokens before it do to a token"
    )
