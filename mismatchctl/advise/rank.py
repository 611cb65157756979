"""The ranking of one run: candidates applied to its sample, the errors of their gradients, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatchctl.advise.applied import Candidate, CorrectedSample, candidate, correct
from mismatchctl.advise.choose import CandidateRanking, choose, stability, stability_in_time, widened
from mismatchctl.advise.gradient import Products, SampleLayout, Standard, Surrogate
from mismatchctl.advise.limits import Limits
from mismatchctl.advise.model import Advice
from mismatchctl.advise.outlook import outlook
from mismatchctl.advise.reference import Reference, reference_of, sequence_tail
from mismatchctl.advise.rows import advised, notes
from mismatchctl.advise.sample import RunSample
from mismatchctl.batch import Ints
from mismatchctl.correction import Correction
from mismatchctl.errors import option
from mismatchctl.frameworks.framework import Framework

BATCHES = 64
MOST_ADVISED = 5
_FEWEST_CLUSTERS = 16
_TOO_LARGE = "the advantages or log ratios are too large: the gradient's error overflows, so nothing is ranked"


def rank(
    sample: RunSample,
    corrections: Sequence[Correction],
    batch: int | None,
    limits: Limits,
    framework: Framework | None,
    yours: Sequence[Correction] = (),
) -> Advice:
    """Rank corrections by the error of the gradient of one update of `batch` sequences (None: the dump's per step).

    What is `yours` is measured beside them, whatever the limits, and is not itself ranked.
    """
    update = batch or sample.per_step or 0
    known: dict[str, Any] = {"batch": update, "sequences": len(sample), "prompts": sample.clusters}
    why = _unrankable(sample, update)
    if why:
        return Advice.model_validate(known | {"k_hat": sequence_tail(sample), "notes": [why]})
    sure = widened(len(sample))
    with np.errstate(all="ignore"):  # what overflows cannot be ranked
        made = _measured(sample, corrections, limits, yours)
        scale = len(sample) / len(made.products["none"]) / update
        choice = choose(made.products, scale, sure, made.beside)
    known["k_hat"] = made.reference.k_hat
    if not all(math.isfinite(error) for error in choice.mse.values()):
        return Advice.model_validate(known | {"notes": [_TOO_LARGE]})
    refused = {each.name: why for each in (*corrections, *yours) if (why := _lacks(each, sample))} | made.refused

    def again(other: RunSample) -> CandidateRanking:
        chosen = [own.correction for own in made.usable.values()]
        return choose(_measured(replace(other, steps=()), chosen, Limits()).products, scale, sure)

    return Advice.model_validate(
        {
            **known,
            "basis": "gradient" if sample.token_ids is not None else "probabilities",
            "advice": [
                advised(name, made.usable[name], choice, sample, framework) for name in choice.order[:MOST_ADVISED]
            ],
            "yours": [advised(name, own, choice, sample, framework) for name, own in made.yours.items()],
            "reference": made.reference.correction.name,
            "sequence_mean": made.reference.sequence_mean,
            "lower_bound": made.reference.lower_bound,
            "bias_counts": made.reference.counts,
            "holds_to": choice.tipping(made.reference.counts),
            "stable": stability(made.products, scale, sure),
            "stable_later": stability_in_time(made.in_time, scale, sure) if made.in_time else None,
            "outlook": outlook(sample, made.usable[choice.first], choice, limits, again),
            "notes": notes(sample, made.reference, choice, refused),
            "front": {
                name: (found.bias2_counted, choice.variance(name), (made.usable | made.yours)[name].rejected_tokens)
                for name, found in choice.moments.items()
            },
        }
    )


def _unrankable(sample: RunSample, update: int) -> str:
    """Why nothing can be ranked; "" where something can."""
    if not sample.batch.tokens:
        return "the run has no valid tokens: nothing is ranked; see what its mask leaves out"
    tail = "the gradient's error cannot be estimated, so nothing is ranked; sweep shows what thresholds cost"
    if sample.advantages is None:
        return f"the dump has no advantages or rewards: {tail}"
    if sample.clusters < _FEWEST_CLUSTERS:
        return f"{sample.clusters} prompts are too few: {tail}"
    if not update:
        needed = "what is best depends on the sequences of one update"
        return f"the dump names no steps, and {needed}: say {option('batch', int)}"
    return ""


@dataclass(frozen=True)
class _Measured:
    """Candidates that are not out of the question and what is yours, with the inner products of their gradients."""

    reference: Reference
    usable: dict[str, Candidate]
    yours: dict[str, Candidate]
    refused: dict[str, str]
    products: dict[str, Products]
    beside: dict[str, Products]
    in_time: dict[str, Products]  # of batches in the order of the steps; empty where these have none


def _measured(
    sample: RunSample, corrections: Sequence[Correction], limits: Limits, yours: Sequence[Correction] = ()
) -> _Measured:
    """Apply corrections, and hold the gradients of batches against those of the reference."""
    made = _Measured(reference_of(sample), {}, {}, {}, {}, {}, {})
    surrogate, unbiased = Surrogate(sample), correct(made.reference.correction, sample)
    orders = (_batches(sample), _batches(sample, in_time=True)) if sample.is_in_time else (_batches(sample),)
    layouts = [surrogate.layout(batch) for batch in orders]
    standards = [Standard.of(own, made.reference.counts) for own in surrogate.gradients(unbiased, layouts)]

    def measure(applied: CorrectedSample, over: Sequence[SampleLayout] = layouts) -> list[Products]:
        return [own.against(found) for own, found in zip(standards, surrogate.gradients(applied, over), strict=False)]

    for each in corrections:
        if _lacks(each, sample):
            continue
        own, applied = candidate(each, sample)
        why = limits.refuse(each, own.rejected_tokens, own.ess) if each.name != "none" else ""
        if why:
            made.refused[each.name] = why
            continue
        made.usable[each.name] = own
        found = measure(applied)
        made.products[each.name] = found[0]
        if sample.is_in_time:
            made.in_time[each.name] = found[1]
    for each in yours:
        if not _lacks(each, sample):
            name = f"yours: {each.name}"
            made.yours[name], applied = candidate(each, sample)
            (made.beside[name],) = measure(applied, layouts[:1])
    return made


def _lacks(correction: Correction, sample: RunSample) -> str:
    """Which column of the dump a correction needs in vain."""
    lacking = sample.batch.lacking(correction.columns)
    return f"needs {' and '.join(lacking)}" if lacking else ""


def _batches(sample: RunSample, in_time: bool = False) -> Ints:
    """The batch of each sequence [S]: whole prompts, about as many in each, in the order of their hashes or steps."""
    count = min(BATCHES, sample.clusters // 4)
    if not in_time:
        return sample.cluster * count // sample.clusters
    place = np.empty(sample.clusters, np.int64)
    step_of = np.zeros(sample.clusters, np.int64)
    step_of[sample.cluster] = sample.step
    place[np.argsort(step_of, kind="stable")] = np.arange(sample.clusters)
    return (place * count // sample.clusters)[sample.cluster]
