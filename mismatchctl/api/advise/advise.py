"""Recommend a correction for each run: rank candidate corrections and explain each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.api.advise import candidates
from mismatchctl.api.advise.advice import MIN_LOSS_SCALE, Advice, RankedCorrection, RunAdvice, candidate_label
from mismatchctl.api.advise.candidates import (
    BiasReference,
    Candidate,
    CandidateRanking,
    GradientMoments,
    GradientProducts,
    Limits,
    RunSample,
)
from mismatchctl.api.diagnose import diagnose
from mismatchctl.api.scan import ReadOptions
from mismatchctl.corrections.labels import correction_label, short_number
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.corrections.presets import classify_severity
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.results.summary import (
    LOSS_SCALE_RANGE,
    MIN_HEADLINE_SHARE,
    find_fixable,
    find_growth,
    is_uncorrectable,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

VALIDATED_RESPONSE_TOKENS = 128
"""Longest responses, in tokens, on which the advice was validated (docs/methods/advice.md)."""


def _explain_rank(name: str, loss_scale: float, choice: CandidateRanking) -> str:
    own, first, none = (choice.moments[each] for each in (name, choice.first, "none"))
    if loss_scale < MIN_LOSS_SCALE:
        return f"multiplies the loss by {short_number(loss_scale)}, which mostly lowers the learning rate"
    if name == choice.first:
        return (
            "no candidate is significantly better"
            if name == "none"
            else f"less {_compare_errors(none, own)} than no correction"
        )
    if choice.ties(name):
        return "not significantly worse than the first correction"
    if name != "none" and name not in choice.better:
        return "not significantly better than no correction"
    return "less error" if choice.mse[name] < choice.mse[choice.first] else f"more {_compare_errors(own, first)}"


def _compare_errors(own: GradientMoments, other: GradientMoments) -> str:
    """Name the parts of the error that are larger in `own` than in `other`, such as "bias and variance"."""
    pairs = (("bias", max(own.bias2, 0.0), other.bias2), ("variance", own.variance, other.variance))
    return " and ".join(word for word, value, less in pairs if value > less) or "error"


def _framework_config(correction: Correction, framework: Framework | None) -> dict[str, object] | None:
    if framework is None:
        return None
    try:
        native, lost = framework.native(correction)
    except ConfigError:
        return None
    return None if lost else dict(native)


def advice_notes(
    sample: RunSample, reference: BiasReference, choice: CandidateRanking, refused: Mapping[str, str]
) -> list[str]:
    first = candidate_label(choice.first)
    notes = [
        "the errors are estimates for the gradient of one update, with the best step size for each correction. They "
        "cannot predict a collapse of the training"
    ]
    if sample.token_ids is None:
        notes.append("the dump lacks token_ids, so only probabilities tell tokens apart. The advice is less reliable")
    if len(sample) < candidates.MIN_SEQUENCES:
        failed = (
            f" and wrong below {candidates.RELIABLE_SEQUENCES}" if len(sample) < candidates.RELIABLE_SEQUENCES else ""
        )
        notes.append(
            f"the dump has {len(sample)} sequences. In tests with a known answer, the advice was less reliable below "
            f"{candidates.MIN_SEQUENCES} sequences{failed}. A significant difference needs "
            f"{candidates.required_standard_errors(len(sample)):.2g} standard errors instead of "
            f"{candidates.SIGNIFICANT_STANDARD_ERRORS:.2g}"
        )
    mean = sample.batch.tokens / max(len(sample), 1)
    if mean > VALIDATED_RESPONSE_TOKENS:
        notes.append(
            f"the responses have {mean:,.0f} tokens on average. The advice was only tested on responses of up to "
            f"{VALIDATED_RESPONSE_TOKENS} tokens"
        )
    if reference.is_heavy:
        notes.append(f"a few sequences dominate the mean of the sequence weights (Pareto k-hat {reference.k_hat:.2f})")
    if reference.lower_bound:
        notes.append(f"the true biases may be larger, because {_explain_reference(reference)}")
    surest = next((name for name in choice.order if name in choice.better), None)
    if surest is not None and choice.first not in (surest, "none"):
        (gain, error), (less, _) = (choice.gain(name) for name in (choice.first, surest))
        notes.append(
            f"{first} is expected to remove {gain:.0%} of the error, but this is not significant (standard error "
            f"{error:.0%}). {surest} removes {less:.0%}, and this is significant"
        )
    if len(sample) < sample.dump_sequences:
        notes.append(
            f"{len(sample):,} of {sample.dump_sequences:,} sequences were used (all sequences of randomly "
            "chosen prompts)"
        )
    if refused:
        shown = ", ".join(f"{name} ({why})" for name, why in list(refused.items())[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        notes.append(f"excluded: {shown}{more}")
    return notes


def _explain_reference(reference: BiasReference) -> str:
    name, mean = reference.correction.name, f"{reference.sequence_mean:.2f}"
    if not reference.is_per_token:
        return f"the bias is measured against {name}, and the dump may lack its rare large weights (mean weight {mean})"
    low, high = candidates.CONVERGENCE_RANGE
    return (
        f"the mean sequence weight is {mean}, which is outside {low:g} to {high:g}. Therefore, the bias is measured "
        f"against {name}, a weight per token, which ignores the ratios of earlier tokens"
    )


_DEFAULT = Correction(name="token_truncate_2", weight=Weight(truncate=2.0))
_YOURS = "yours: "  # prefix of the names of the corrections that the user has now, to tell them from candidates
MAX_BATCHES = 64
MAX_ADVISED = 5
_MIN_CLUSTERS = 16
_TOO_LARGE = "the gradient error overflows, because the advantages or log ratios are too large"


def rank_corrections(
    sample: RunSample,
    corrections: Sequence[Correction],
    batch: int | None,
    limits: Limits,
    framework: Framework | None,
    yours: Sequence[Correction] = (),
) -> RunAdvice:
    """Rank `corrections` by gradient error. Also measure `yours`, the corrections in use, without ranking them."""
    update = batch or sample.per_step or 0
    known: dict[str, Any] = {
        "batch": update,
        "sequences": len(sample),
        "prompts": sample.clusters,
        "framework": framework.title if framework is not None else "",
        "warnings": framework.warnings if framework is not None else [],
    }
    if sample.batch.tokens:
        known["severity"] = classify_severity(candidates.evaluate_candidate(_DEFAULT, sample)[0].ess)
    why = _reason_not_rankable(sample, update)
    if why:
        notes = [why, *(_loss_scale_notes(sample, yours) if sample.batch.tokens else ())]
        return RunAdvice.model_validate(known | {"k_hat": candidates.sequence_k_hat(sample), "notes": notes})
    critical = candidates.required_standard_errors(len(sample))
    with np.errstate(all="ignore"):  # the check of `choice.mse` below finds overflows
        reference = candidates.choose_reference(sample)
        measured, products, refused = measure_candidates(sample, reference, corrections, limits, yours)
        own = [name for name in measured if name.startswith(_YOURS)]
        scale = len(sample) / len(products["none"]) / update
        shrinking = {name for name, one in measured.items() if one.loss_scale < MIN_LOSS_SCALE}
        choice = candidates.choose_correction(products, scale, critical, shrinking=shrinking, unranked=own)
    known["k_hat"] = reference.k_hat
    if not all(math.isfinite(error) for error in choice.mse.values()):
        return RunAdvice.model_validate(known | {"notes": [_TOO_LARGE]})
    lacking = {each.name: why for each in (*corrections, *yours) if (why := _missing_column(each, sample))}
    # the documentation of frameworks recommends token weights truncated at 2
    plain = (name for name, one in measured.items() if name not in own and not one.correction.gates)
    default = next((name for name in plain if measured[name].correction.weight == _DEFAULT.weight), None)

    def describe(name: str) -> RankedCorrection:
        own, found, (gain, gain_se) = measured[name], choice.moments[name], choice.gain(name)
        return RankedCorrection(
            name=name, label=correction_label(own.correction), correction=own.correction.to_mapping(),
            bias2=found.bias2, bias2_se=found.bias2_se, variance=choice.variance(name), mse=choice.mse[name],
            gain=gain, gain_se=gain_se, loss_scale=own.loss_scale, rejected_tokens=own.rejected_tokens,
            rejected_sequences=own.rejected_sequences, ess=own.ess, ties=choice.ties(name),
            why=_explain_rank(name, own.loss_scale, choice), config=_framework_config(own.correction, framework),
            outcome="" if framework is None else framework.published_outcome(own.correction),
        )  # fmt: skip

    return RunAdvice.model_validate(
        {
            **known,
            "basis": "gradient" if sample.token_ids is not None else "probabilities",
            "advice": [describe(name) for name in choice.order[:MAX_ADVISED]],
            "default": None if default is None else describe(default),
            "yours": [describe(name) for name in own],
            "reference": reference.correction.name,
            "sequence_mean": reference.sequence_mean,
            "lower_bound": reference.lower_bound,
            "notes": advice_notes(sample, reference, choice, lacking | refused),
            "front": {
                name: (max(found.bias2, 0.0), choice.variance(name), measured[name].rejected_tokens)
                for name, found in choice.moments.items()
            },
        }
    )


def _loss_scale_notes(sample: RunSample, yours: Sequence[Correction]) -> Iterator[str]:
    low, high = LOSS_SCALE_RANGE
    for correction in yours:
        if not _missing_column(correction, sample):
            scale = candidates.apply_to_sample(correction, sample).loss_scale
            if not low <= scale <= high:
                yield f"{correction.name} multiplies the loss by {short_number(scale)}"


def _reason_not_rankable(sample: RunSample, update: int) -> str:
    if not sample.batch.tokens:
        return "the run does not contain valid tokens. Check response_mask"
    if sample.advantages is None:
        return "the dump lacks advantages and rewards. Add one of these columns, or use sweep to compare thresholds"
    if sample.clusters < _MIN_CLUSTERS:
        return f"{sample.clusters} prompts are too few. At least {_MIN_CLUSTERS} prompts are needed"
    if not update:
        return f"the dump lacks steps, so the size of an update is unknown. Pass {option('batch', int)}"
    return ""


def measure_candidates(
    sample: RunSample,
    reference: BiasReference,
    corrections: Sequence[Correction],
    limits: Limits,
    yours: Sequence[Correction] = (),
) -> tuple[dict[str, Candidate], dict[str, GradientProducts], dict[str, str]]:
    """Return three dicts by correction name: candidates, their gradient products, and reasons for exclusions."""
    surrogate = candidates.Surrogate(sample, sample.cluster * min(MAX_BATCHES, sample.clusters // 4) // sample.clusters)
    unbiased = candidates.GradientReference.of(
        surrogate.gradients(candidates.apply_to_sample(reference.correction, sample))
    )
    measured, products, refused = dict[str, Candidate](), dict[str, GradientProducts](), dict[str, str]()
    named = [*((each.name, each) for each in corrections), *((f"{_YOURS}{each.name}", each) for each in yours)]
    for name, each in named:
        if _missing_column(each, sample):
            continue
        own, applied = candidates.evaluate_candidate(each, sample)
        is_limited = name != "none" and not name.startswith(_YOURS)
        if is_limited and (why := limits.refuse(each, own.rejected_tokens, own.ess)):
            refused[name] = why
            continue
        measured[name] = own
        products[name] = unbiased.inner_products(surrogate.gradients(applied))
    return measured, products, refused


def _missing_column(correction: Correction, sample: RunSample) -> str:
    lacking = sample.batch.missing_columns(correction.needed_columns)
    return f"needs the column {' and '.join(lacking)}" if lacking else ""


def advise(
    paths: Sequence[DumpSource],
    *,
    framework: str = "",
    corrections: Sequence[Correction] = (),
    yours: Sequence[Correction] = (),
    batch: int | None = None,
    limits: Limits | None = None,
    **options: Unpack[ReadOptions],
) -> Advice:
    """Recommend corrections for each run. See `mm.advise`."""
    known = load_framework(framework) if framework else None
    tried = candidates.unique_candidates(
        corrections or (candidates.framework_candidates(framework) if framework else candidates.default_candidates())
    )
    findings = diagnose(paths, rename=options.get("rename")).runs
    try:
        samples = candidates.read_samples(paths, **options)
    except DataError as error:
        fixes = {run: find_fixable(found) for run, found in findings.items()}
        if not all(finding is not None and is_uncorrectable(finding) for finding in fixes.values()):
            raise
        return Advice({run: RunAdvice(fix_first=finding, notes=[str(error)]) for run, finding in fixes.items()})
    result = {}
    for run, found in findings.items():
        # the diagnosis can be wrong, so the ranking does not depend on it
        advice = rank_corrections(samples.pop(run), tried, batch, limits or Limits(), known, yours)
        result[run] = advice.model_copy(
            update={"fix_first": find_fixable(found, MIN_HEADLINE_SHARE), "growth": find_growth(found)}
        )
    return Advice(result)
