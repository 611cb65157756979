"""The ranking of one run: candidates applied to its sample, their errors, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.advise.choose import Choice, choose, stability
from mismatchctl.advise.gradient import Surrogate
from mismatchctl.advise.limits import Limits
from mismatchctl.advise.model import Advice, Advised
from mismatchctl.advise.sample import Corrected, Sample, correct
from mismatchctl.batch import Float64s, Ints
from mismatchctl.correction import Correction, correction_from_mapping
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.framework import Framework
from mismatchctl.measure.metrics.pareto import khat, khat_limit, tail_length

ENOUGH, FEWEST = 640, 320
"""Sequences from which advice is reliable, and below which it broke where the truth is known (docs/advise.md)."""
BATCHES = 64
MOST_ADVISED = 5
_FEWEST_CLUSTERS = 16
_CONVERGES = (0.5, 1.5)  # mean weight of the reference: 1 where it leaves nothing out
_REFERENCES = tuple(
    correction_from_mapping({"name": name, "weight": {"level": level, "truncate": bound}})
    for name, level, bound in (("seq_truncate_10", "sequence", 10.0), ("token_truncate_5", "token", 5.0))
)
_TOO_LARGE = "the advantages or log ratios are too large: the gradient's error overflows, so nothing is ranked"


@dataclass(frozen=True)
class Candidate:
    """A correction on a sample, with what it costs there; `refused`: why it is out of the question."""

    correction: Correction
    applied: Corrected
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    refused: str = ""


def rank(
    sample: Sample,
    corrections: Sequence[Correction],
    batch: int | None,
    limits: Limits,
    framework: Framework | None,
    yours: Sequence[Correction] = (),
) -> Advice:
    """Rank corrections by the error of the gradient of one update of `batch` sequences (None: the dump's per step).

    What is `yours` is measured beside them, whatever the limits, and is not itself ranked.
    """
    update = batch or max(round(len(sample) / (int(sample.step.max(initial=0)) + 1)), 1)
    k_hat = _sequence_tail(sample)
    known = {"batch": update, "sequences": len(sample), "prompts": sample.clusters, "k_hat": k_hat}
    unranked = Advice.model_validate(known)
    needed = {"token_ids": sample.token_ids, "advantages or rewards": sample.advantages}
    missing = [name for name, given in needed.items() if given is None]
    if missing or sample.clusters < _FEWEST_CLUSTERS:
        why = f"the dump has no {' and no '.join(missing)}" if missing else f"{sample.clusters} prompts are too few"
        note = (
            f"{why}: the gradient's error cannot be estimated, so nothing is ranked; sweep shows what thresholds cost"
        )
        return unranked.model_copy(update={"notes": [note]})
    able = {correction.name: correction for correction in corrections if not _lacks(correction, sample)}
    candidates = {name: _candidate(correction, sample, limits) for name, correction in able.items()}
    layout = _batches(sample)
    surrogate = Surrogate(sample, layout)
    reference, lower_bound = _reference(sample)
    unbiased = _gradients(surrogate, correct(reference, sample))
    usable = {name: own for name, own in candidates.items() if name == "none" or not own.refused}
    own = {f"yours: {each.name}": _candidate(each, sample, Limits()) for each in yours if not _lacks(each, sample)}
    scale = len(sample) / (int(layout.max()) + 1) / update
    with np.errstate(all="ignore"):  # what overflows cannot be ranked
        gradients, beside = (
            {name: _gradients(surrogate, found.applied) for name, found in some.items()} for some in (usable, own)
        )
        choice = choose(gradients, unbiased, scale, beside)
    if not all(math.isfinite(error) for error in choice.mse.values()):
        return unranked.model_copy(update={"notes": [_TOO_LARGE]})
    refused = {each.name: why for each in (*corrections, *yours) if (why := _lacks(each, sample))}
    refused |= {name: own.refused for name, own in candidates.items() if name not in usable}
    return Advice.model_validate(
        {
            **known,
            "basis": "gradient",
            "advice": [_advised(name, usable[name], choice, sample, framework) for name in choice.order[:MOST_ADVISED]],
            "yours": [_advised(name, own[name], choice, sample, framework) for name in own],
            "reference": reference.name,
            "lower_bound": lower_bound,
            "stable": stability(gradients, unbiased, scale),
            "notes": _notes(sample, lower_bound, reference.name, k_hat, refused),
            "front": {
                name: (found.bias2, found.variance * scale, (usable | own)[name].rejected_tokens)
                for name, found in choice.moments.items()
            },
        }
    )


def _lacks(correction: Correction, sample: Sample) -> str:
    """Which column of the dump a correction needs in vain."""
    lacking = sample.batch.lacking(correction.columns)
    return f"needs {' and '.join(lacking)}" if lacking else ""


def _candidate(correction: Correction, sample: Sample, limits: Limits) -> Candidate:
    applied = correct(correction, sample)
    tokens, kept = sample.batch.tokens, int(applied.kept.sum())
    lengths = sample.batch.segments.lengths
    weights = applied.weights[applied.kept]
    squares = float(np.square(weights).sum())
    ess = float(weights.sum()) ** 2 / squares / tokens if squares > 0 and math.isfinite(squares) else 0.0
    gone = float(((applied.sequences == 0) & (lengths > 0)).sum() / max(int((lengths > 0).sum()), 1))
    rejected = 1 - kept / tokens
    return Candidate(correction, applied, rejected, gone, ess, limits.refuse(correction, rejected, ess))


def _gradients(surrogate: Surrogate, applied: Corrected) -> Float64s:
    return surrogate.gradients(applied.weights, applied.kept, applied.counted)


def _batches(sample: Sample) -> Ints:
    """The batch of each sequence [S]: whole prompts in the order of their hashes, about as many in each."""
    count = min(BATCHES, sample.clusters // 4)
    return sample.cluster * count // sample.clusters


def _reference(sample: Sample) -> tuple[Correction, bool]:
    """The least biased correction whose weights have a mean near 1, and whether even it leaves something out."""
    means = [float(correct(correction, sample).weights.mean()) for correction in _REFERENCES]
    for correction, mean in zip(_REFERENCES, means, strict=True):
        if _CONVERGES[0] < mean < _CONVERGES[1]:
            return correction, correction.weight is not None and correction.weight.level != "sequence"
    return _REFERENCES[-1], True


def _sequence_tail(sample: Sample) -> float | None:
    """Pareto k-hat of the sequence weights."""
    batch = sample.batch
    sums = batch.segments.sum(batch.train.astype(np.float64) - batch.rollout)[batch.segments.nonempty]
    found = khat(np.sort(sums)[-tail_length(len(sums)) - 1 :], len(sums)) if len(sums) else math.nan
    return found if math.isfinite(found) else None


def _advised(name: str, own: Candidate, choice: Choice, sample: Sample, framework: Framework | None) -> Advised:
    found, (gain, gain_se) = choice.moments[name], choice.gain(name)
    reward, length = _selection(own, sample)
    return Advised(
        name=name,
        correction=own.correction.to_mapping(),
        bias2=found.bias2,
        bias2_se=found.bias2_se,
        variance=choice.mse[name] - max(found.bias2, 0.0),
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


def _why(name: str, choice: Choice) -> str:
    """What speaks for the first, and why the others stand behind it."""
    first, none = choice.moments[choice.first], choice.moments["none"]
    own = choice.moments[name]
    if name == choice.first:
        if name == "none":
            return "nothing beats it beyond the noise of the batches"
        less = [
            word
            for word, better in (("bias", max(own.bias2, 0) < none.bias2), ("variance", own.variance < none.variance))
            if better
        ]
        return f"less {' and '.join(less)} than no correction" if less else "less error than no correction"
    if choice.ties(name):
        return "cannot be told from the first on this sample"
    if choice.mse[name] < choice.mse[choice.first]:
        return "less error than the first"
    more = [
        word
        for word, worse in (
            ("bias", max(own.bias2, 0) > max(first.bias2, 0)),
            ("variance", own.variance > first.variance),
        )
        if worse
    ]
    if name != "none" and name not in choice.better:
        return "not better than no correction beyond noise"
    return f"more {' and '.join(more)} than the first" if more else "behind the first"


def _selection(own: Candidate, sample: Sample) -> tuple[float | None, float | None]:
    """Mean reward and mean length of rejected less kept sequences; None where all or none are rejected."""
    lengths = sample.batch.segments.lengths
    filled = lengths > 0
    kept = filled & (own.applied.sequences > 0)
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


def _notes(
    sample: Sample, lower_bound: bool, reference: str, k_hat: float | None, refused: Mapping[str, str]
) -> list[str]:
    notes = ["errors are those of a surrogate gradient of one update: offline data cannot show a collapse"]
    if len(sample) < ENOUGH:
        broken = ", and broke" if len(sample) < FEWEST else ""
        notes.append(
            f"{len(sample)} sequences: below {ENOUGH} the advice was less reliable{broken} where the truth is known"
        )
    if k_hat is not None and k_hat > khat_limit(len(sample)):
        notes.append(f"sequence weights have a k-hat of {k_hat:.2f}: their mean does not converge on this sample")
    if lower_bound:
        notes.append(
            f"biases are lower bounds: {reference}, the least biased correction that converges, leaves some out itself"
        )
    if not sample.is_complete:
        notes.append(f"from {len(sample):,} sequences, whole prompts chosen by a hash")
    if refused:
        shown = ", ".join(f"{name} ({why})" for name, why in list(refused.items())[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        notes.append(f"out of the question: {shown}{more}")
    return notes
