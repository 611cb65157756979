"""Recommend a correction for each run: rank candidates, explain each, and estimate how long the advice holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatchctl.api.advise.advice import (
    MIN_LOSS_SCALE,
    Advice,
    ExpectedRejection,
    Outlook,
    RankedCorrection,
    RunAdvice,
    candidate_label,
)
from mismatchctl.api.advise.candidates import (
    CONVERGENCE_RANGE,
    BiasReference,
    Candidate,
    CorrectedSample,
    Limits,
    apply_to_sample,
    choose_reference,
    default_candidates,
    effective_sample_size,
    evaluate_candidate,
    framework_candidates,
    sequence_k_hat,
    unique_candidates,
)
from mismatchctl.api.advise.gradient import (
    RELIABLE_SEQUENCES,
    SIGNIFICANT_STANDARD_ERRORS,
    CandidateRanking,
    GradientMoments,
    GradientProducts,
    GradientReference,
    SampleLayout,
    Surrogate,
    choose_correction,
    required_standard_errors,
    split_stability,
    time_stability,
)
from mismatchctl.api.advise.sample import MIN_SEQUENCES, RunSample, read_samples
from mismatchctl.api.diagnose import diagnose
from mismatchctl.api.predict import Prediction, predict_at_step, predict_batch_rejection, read_sample
from mismatchctl.api.predict_length import predict_at_length
from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.labels import correction_label
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.corrections.presets import classify_severity, parse_correction
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError, DataError, option
from mismatchctl.frameworks.adapter import Framework
from mismatchctl.frameworks.registry import load_framework
from mismatchctl.results.summary import LOSS_SCALE_RANGE, MANY_REJECTED, find_fixable, is_uncorrectable

VALIDATED_RESPONSE_TOKENS = 128
"""Longest response length at which the advice was validated on many mismatches (docs/methods/advice.md)."""


def describe_candidate(
    name: str, own: Candidate, choice: CandidateRanking, sample: RunSample, framework: Framework | None
) -> RankedCorrection:
    """Return the row of a candidate."""
    found, (gain, gain_se) = choice.moments[name], choice.gain(name)
    reward, length = _selection_differences(own, sample)
    return RankedCorrection(
        name=name,
        label=correction_label(own.correction),
        correction=own.correction.to_mapping(),
        bias2=found.bias2,
        bias2_se=found.bias2_se,
        variance=choice.variance(name),
        mse=choice.mse[name],
        gain=gain,
        gain_se=gain_se,
        loss_scale=own.loss_scale,
        rejected_tokens=own.rejected_tokens,
        rejected_sequences=own.rejected_sequences,
        ess=own.ess,
        ties=choice.ties(name),
        why=_explain_rank(name, own.loss_scale, choice),
        kept_reward_difference=reward,
        kept_length_difference=length,
        config=_framework_config(own.correction, framework),
        outcome="" if framework is None else framework.published_outcome(own.correction),
    )


def _explain_rank(name: str, loss_scale: float, choice: CandidateRanking) -> str:
    own, first, none = (choice.moments[each] for each in (name, choice.first, "none"))
    if loss_scale < MIN_LOSS_SCALE:
        return f"multiplies the loss by {loss_scale:.3g}, which mostly lowers the learning rate"
    if name == choice.first:
        return (
            "no candidate is significantly better"
            if name == "none"
            else f"less {_compare_errors(none, own)} than no correction"
        )
    if choice.ties(name):
        return "not significantly worse than the first"
    if name != "none" and name not in choice.better:
        return "not significantly better than no correction"
    return "less error" if choice.mse[name] < choice.mse[choice.first] else f"more {_compare_errors(own, first)}"


def _compare_errors(own: GradientMoments, other: GradientMoments) -> str:
    """Name the parts of the error that are larger than for another candidate."""
    pairs = (("bias", max(own.bias2, 0.0), other.bias2), ("variance", own.variance, other.variance))
    return " and ".join(word for word, value, less in pairs if value > less) or "error"


def _selection_differences(own: Candidate, sample: RunSample) -> tuple[float | None, float | None]:
    """Return mean reward and mean length of rejected minus kept sequences, if there are both kinds."""
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
    """Return messages about the limits of the advice."""
    first = candidate_label(choice.first)
    notes = [
        "errors are estimated from a surrogate gradient of one update, after the best scalar for each correction. "
        "They cannot show a collapse"
    ]
    if sample.token_ids is None:
        notes.append(
            "the dump has no token_ids, so ranks of probabilities replace them and the advice is less reliable"
        )
    if len(sample) < MIN_SEQUENCES:
        failed = f" and failed below {RELIABLE_SEQUENCES}" if len(sample) < RELIABLE_SEQUENCES else ""
        notes.append(
            f"{len(sample)} sequences: in cases with a known truth the advice was less reliable below {MIN_SEQUENCES}"
            f"{failed}. A difference needs {required_standard_errors(len(sample)):.2g} standard errors instead of "
            f"{SIGNIFICANT_STANDARD_ERRORS:.2g}"
        )
    mean = sample.batch.tokens / max(len(sample), 1)
    if mean > VALIDATED_RESPONSE_TOKENS:
        notes.append(
            f"responses have {mean:,.0f} tokens on average. The advice was validated on responses of up to "
            f"{VALIDATED_RESPONSE_TOKENS} tokens"
        )
    if reference.is_heavy:
        notes.append(f"sequence weights have a k-hat of {reference.k_hat:.2f}, so their mean does not converge")
    if reference.lower_bound:
        notes.append(f"biases are lower bounds: {_explain_reference(reference)}")
    surest = next((name for name in choice.order if name in choice.better), None)
    if surest is not None and choice.first not in (surest, "none"):
        (gain, error), (less, _) = (choice.gain(name) for name in (choice.first, surest))
        notes.append(
            f"{first} is expected to remove {gain:.0%} of the error (standard error {error:.0%}), which is not "
            f"significant. {surest} removes {less:.0%}, which is"
        )
    if not sample.is_complete:
        notes.append(
            f"{len(sample):,} of {sample.dump_sequences:,} sequences were used (whole prompts, chosen by a hash)"
        )
    if refused:
        shown = ", ".join(f"{name} ({why})" for name, why in list(refused.items())[:3])
        more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
        notes.append(f"excluded: {shown}{more}")
    return notes


def _explain_reference(reference: BiasReference) -> str:
    """Explain which bias the reference omits."""
    name, mean = reference.correction.name, f"{reference.sequence_mean:.2f}"
    if not reference.is_per_token:
        return f"{name} is the reference (mean weight {mean}), but this sample does not contain the tail of its weights"
    low, high = CONVERGENCE_RANGE
    return (
        f"sequence weights have a mean of {mean}, outside {low:g} to {high:g}, so the reference is {name}, which "
        "ignores the effect of earlier tokens on a token"
    )


_HORIZON_FRACTIONS = (0.0, 0.25, 0.5, 1.0)
"""Fractions of the horizon at which the ranking is repeated."""
_MIN_GROWTH = 1.1
"""Growth of K3 from which a trend may change the advice."""


def estimate_outlook(
    sample: RunSample,
    first: Candidate,
    choice: CandidateRanking,
    limits: Limits,
    again: Callable[[RunSample], CandidateRanking],
) -> Outlook | None:
    """Extrapolate K3 to twice the span of the dump, if it grows.

    Args:
        sample: sample of one run.
        first: the advised correction.
        choice: the ranking.
        limits: limits on candidates.
        again: ranks the same candidates on another sample.
    """
    if not sample.has_ordered_steps:
        return None
    labels = [float(label) for label in sample.steps]
    span = labels[-1] - labels[0]
    series = _k3_per_step(sample)
    mean = float((series * _tokens_per_step(sample)).sum() / sample.batch.tokens)
    factors = [_k3_growth_factor(labels, series, mean, part * span) for part in _HORIZON_FRACTIONS]
    last = factors[-1]
    if last is None or last < _MIN_GROWTH:
        return None
    limit = _find_exceeded_limit(sample, first, limits, labels, span)
    end = math.inf if limit is None else limit[0]
    reached = [
        (part * span, factor)
        for part, factor in zip(_HORIZON_FRACTIONS, factors, strict=True)
        if factor is not None and factor >= _MIN_GROWTH and part * span < end
    ]

    def instead_at(factor: float) -> str | None:
        then = again(_scale_log_ratios(sample, math.sqrt(factor)))
        return None if then.ties(choice.first) else then.first

    # If the advice is valid at the end, it is not checked in between.
    at_last = instead_at(reached[-1][1]) if reached else None
    for ahead, factor in reached if at_last else ():
        instead = at_last if ahead == reached[-1][0] else instead_at(factor)
        if instead:
            return _describe_outlook(
                span, last, ahead, instead, f"{candidate_label(instead)} is better (K3 x {_format_factor(factor)})"
            )
    if limit is not None:
        return _describe_outlook(span, last, limit[0], None, limit[1])
    growth = f"in {span:g} steps K3 is {_format_factor(last)} times as large"
    return Outlook(steps=span, k3_factor=last, text=f"if K3 keeps growing, {growth}, and the advice still holds")


def _format_factor(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def _describe_outlook(span: float, factor: float, ahead: float, instead: str | None, what: str) -> Outlook:
    when = f"in {ahead:.3g} steps" if ahead else "already at the last steps"
    return Outlook(
        steps=span, k3_factor=factor, outgrown_in=ahead, instead=instead, text=f"if K3 keeps growing, {when} {what}"
    )


def _find_exceeded_limit(
    sample: RunSample, first: Candidate, limits: Limits, labels: list[float], span: float
) -> tuple[float, str] | None:
    """Return the first later step when the advised correction exceeds a limit, with a message."""
    applied, segments = apply_to_sample(first.correction, sample), sample.batch.segments
    tokens = _tokens_per_step(sample)
    sums = [np.bincount(sample.step, own, len(labels)) for own in (
        first.kept, segments.sum(applied.weights), segments.sum(np.square(applied.weights))
    )]  # fmt: skip
    rejected = 1 - sums[0] / np.maximum(tokens, 1)
    ess = np.array([effective_sample_size(*of_step) for of_step in zip(*sums[1:], tokens, strict=True)])
    most, least = min(limits.max_rejection, MANY_REJECTED), limits.min_ess
    passed = (
        ("rejected_tokens", rejected, 1, most, f"it rejects more than {most:.0%} of the tokens"),
        ("ess", ess, -1, least, f"its ESS falls below {least:.2g}"),
    )
    found = []
    for quantity, values, side, bound, words in passed:
        for ahead in np.unique(np.linspace(1, max(span, 1), 20).round()):
            seen = predict_at_step(quantity, labels, values.tolist(), float(ahead), is_fraction=True)
            if seen.status == "ok" and seen.value is not None and side * (seen.value - bound) > 0:
                found.append((float(ahead), words))
                break
    return min(found) if found else None


def _tokens_per_step(sample: RunSample) -> Float64s:
    return np.asarray(np.bincount(sample.step, sample.batch.segments.lengths, len(sample.steps)), np.float64)


def _k3_per_step(sample: RunSample) -> Float64s:
    sums = sample.batch.segments.sum(compute_ratios(sample.batch, {"train/rollout"})["train/rollout"].k3)
    return np.asarray(np.bincount(sample.step, sums, len(sample.steps)) / np.maximum(_tokens_per_step(sample), 1))


def _k3_growth_factor(labels: list[float], series: Float64s, mean: float, ahead: float) -> float | None:
    """Return the extrapolated K3 relative to the sample, if there is a trend."""
    seen = predict_at_step("k3", labels, series.tolist(), ahead)
    return seen.value / mean if seen.status == "ok" and seen.value is not None and mean > 0 else None


def _scale_log_ratios(sample: RunSample, factor: float) -> RunSample:
    """Return the sample with scaled log ratios, as a model of a larger mismatch."""
    batch = sample.batch
    rollout = batch.train - factor * (batch.train.astype(np.float64) - batch.rollout)
    return replace(sample, batch=replace(batch, rollout=rollout.astype(batch.rollout.dtype)))


_DEFAULT_CORRECTION = Correction(name="token_truncate_2", weight=Weight(truncate=2.0))
MAX_BATCHES = 64
MAX_ADVISED = 5
_MIN_CLUSTERS = 16
_TOO_LARGE = "the advantages or log ratios are too large, the gradient error overflows"


def rank_corrections(
    sample: RunSample,
    corrections: Sequence[Correction],
    batch: int | None,
    limits: Limits,
    framework: Framework | None,
    yours: Sequence[Correction] = (),
) -> RunAdvice:
    """Rank corrections by the error of the gradient of one update.

    Args:
        sample: sample of one run.
        corrections: the candidates.
        batch: sequences of one update. None: the dump's sequences per step.
        limits: limits on candidates.
        framework: framework for config keys.
        yours: corrections to measure without limits and without ranking them.
    """
    update = batch or sample.per_step or 0
    known: dict[str, Any] = {
        "batch": update,
        "sequences": len(sample),
        "prompts": sample.clusters,
        "framework": framework.title if framework is not None else "",
    }
    if sample.batch.tokens:
        known["severity"] = classify_severity(evaluate_candidate(_DEFAULT_CORRECTION, sample)[0].ess)
    why = _reason_not_rankable(sample, update)
    if why:
        notes = [why, *(_loss_scale_notes(sample, yours) if sample.batch.tokens else ())]
        return RunAdvice.model_validate(known | {"k_hat": sequence_k_hat(sample), "notes": notes})
    critical = required_standard_errors(len(sample))
    with np.errstate(all="ignore"):  # overflows cannot be ranked
        measured = _measure_candidates(sample, corrections, limits, yours)
        scale = len(sample) / len(measured.products["none"]) / update
        shrinking = measured.shrinking
        choice = choose_correction(measured.products, scale, critical, shrinking=shrinking, unranked=measured.unranked)
    known["k_hat"] = measured.reference.k_hat
    if not all(math.isfinite(error) for error in choice.mse.values()):
        return RunAdvice.model_validate(known | {"notes": [_TOO_LARGE]})
    refused = {
        each.name: why for each in (*corrections, *yours) if (why := _missing_column(each, sample))
    } | measured.refused

    candidates = measured.usable | measured.yours

    def again(other: RunSample) -> CandidateRanking:
        then = _measure_candidates(
            replace(other, steps=()), [own.correction for own in measured.usable.values()], Limits()
        )
        return choose_correction(then.products, scale, critical, shrinking=then.shrinking)

    default = next((name for name, own in measured.usable.items() if _is_default(own.correction)), None)
    return RunAdvice.model_validate(
        {
            **known,
            "basis": "gradient" if sample.token_ids is not None else "probabilities",
            "advice": [
                describe_candidate(name, measured.usable[name], choice, sample, framework)
                for name in choice.order[:MAX_ADVISED]
            ],
            "default": (
                None
                if default is None
                else describe_candidate(default, measured.usable[default], choice, sample, framework)
            ),
            "yours": [describe_candidate(name, own, choice, sample, framework) for name, own in measured.yours.items()],
            "reference": measured.reference.correction.name,
            "sequence_mean": measured.reference.sequence_mean,
            "lower_bound": measured.reference.lower_bound,
            "stable": split_stability(measured.products, scale, critical, shrinking),
            "stable_later": (
                time_stability(measured.in_time, scale, critical, shrinking) if measured.in_time else None
            ),
            "outlook": estimate_outlook(sample, measured.usable[choice.first], choice, limits, again),
            "notes": advice_notes(sample, measured.reference, choice, refused),
            "front": {
                name: (max(found.bias2, 0.0), choice.variance(name), candidates[name].rejected_tokens)
                for name, found in choice.moments.items()
            },
        }
    )


def _is_default(correction: Correction) -> bool:
    """Return True for token weights up to 2, which documents recommend by default."""
    return not correction.gates and correction.weight == _DEFAULT_CORRECTION.weight


def _loss_scale_notes(sample: RunSample, yours: Sequence[Correction]) -> Iterator[str]:
    """Yield a message for each correction that changes the effective learning rate."""
    low, high = LOSS_SCALE_RANGE
    for correction in yours:
        if not _missing_column(correction, sample):
            scale = apply_to_sample(correction, sample).loss_scale
            if not low <= scale <= high:
                yield f"{correction.name} multiplies the loss by {scale:.3g}"


def _reason_not_rankable(sample: RunSample, update: int) -> str:
    """Return the reason why a ranking is not possible, "" if it is."""
    if not sample.batch.tokens:
        return "the run has no valid tokens. Check its mask"
    if sample.advantages is None:
        return "the dump has no advantages or rewards. Add one of these columns, or use sweep to compare thresholds"
    if sample.clusters < _MIN_CLUSTERS:
        return f"{sample.clusters} prompts are too few, at least {_MIN_CLUSTERS} are needed"
    if not update:
        return f"the dump has no steps, so the size of an update is unknown. Pass {option('batch', int)}"
    return ""


@dataclass(frozen=True)
class _MeasuredCandidates:
    """Candidates within the limits and the user's corrections, with the inner products of their gradients."""

    reference: BiasReference
    usable: dict[str, Candidate]
    yours: dict[str, Candidate]
    refused: dict[str, str]
    products: dict[str, GradientProducts]
    unranked: dict[str, GradientProducts]
    in_time: dict[str, GradientProducts]  # for time-ordered batches, empty without ordered steps

    @property
    def shrinking(self) -> frozenset[str]:
        """Names of the corrections that mostly lower the learning rate."""
        return frozenset(name for name, own in (self.usable | self.yours).items() if own.is_shrinking)


def _measure_candidates(
    sample: RunSample, corrections: Sequence[Correction], limits: Limits, yours: Sequence[Correction] = ()
) -> _MeasuredCandidates:
    """Apply corrections and compare their gradients with the reference gradients."""
    measured = _MeasuredCandidates(choose_reference(sample), {}, {}, {}, {}, {}, {})
    surrogate, unbiased = Surrogate(sample), apply_to_sample(measured.reference.correction, sample)
    orders = (
        (_assign_batches(sample), _assign_batches(sample, in_time=True))
        if sample.has_ordered_steps
        else (_assign_batches(sample),)
    )
    layouts = [surrogate.layout(batch) for batch in orders]
    standards = [GradientReference.of(own) for own in surrogate.gradients(unbiased.relative(), layouts)]

    def measure(applied: CorrectedSample, over: Sequence[SampleLayout] = layouts) -> list[GradientProducts]:
        return [
            own.inner_products(found)
            for own, found in zip(standards, surrogate.gradients(applied.relative(), over), strict=False)
        ]

    for each in corrections:
        if _missing_column(each, sample):
            continue
        own, applied = evaluate_candidate(each, sample)
        why = limits.refuse(each, own.rejected_tokens, own.ess) if each.name != "none" else ""
        if why:
            measured.refused[each.name] = why
            continue
        measured.usable[each.name] = own
        found = measure(applied)
        measured.products[each.name] = found[0]
        if sample.has_ordered_steps:
            measured.in_time[each.name] = found[1]
    for each in yours:
        if not _missing_column(each, sample):
            name = f"yours: {each.name}"
            measured.yours[name], applied = evaluate_candidate(each, sample)
            (measured.unranked[name],) = measure(applied, layouts[:1])
    return measured


def _missing_column(correction: Correction, sample: RunSample) -> str:
    """Return a message about required columns that the dump lacks, or ""."""
    lacking = sample.batch.missing_columns(correction.needed_columns)
    return f"needs {' and '.join(lacking)}" if lacking else ""


def _assign_batches(sample: RunSample, in_time: bool = False) -> Ints:
    """Assign whole prompts to batches of about equal size [S], ordered by hash or by step."""
    count = min(MAX_BATCHES, sample.clusters // 4)
    if not in_time:
        return sample.cluster * count // sample.clusters
    place = np.empty(sample.clusters, np.int64)
    step_of = np.zeros(sample.clusters, np.int64)
    step_of[sample.cluster] = sample.step
    place[np.argsort(step_of, kind="stable")] = np.arange(sample.clusters)
    return (place * count // sample.clusters)[sample.cluster]


def advise(
    paths: Sequence[DumpSource],
    *,
    framework: str = "",
    corrections: Sequence[Correction] = (),
    yours: Sequence[Correction] = (),
    batch: int | None = None,
    limits: Limits | None = None,
    rename: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Advice:
    """Rank corrections by the error of the gradient of one update, by run, and name a bug to fix first.

    Args:
        paths: files, folders, globs. Each is a run unless a `run` column says otherwise.
        framework: framework whose corrections and syntax are used. Empty: all.
        corrections: the candidates. Empty: the framework's corrections over grids of thresholds.
        yours: corrections to compare with the ranking.
        batch: sequences of one update. None: the dump's sequences per step.
        limits: limits on candidates.
        rename: canonical column -> name in the files.
        progress: called with (tokens read, tokens expected).

    Raises:
        DataError: a dump cannot be read or used.
        ConfigError: the framework does not exist.
    """
    known = load_framework(framework) if framework else None
    candidates = unique_candidates(
        corrections or (framework_candidates(framework) if framework else default_candidates())
    )
    fixes = {run: find_fixable(found) for run, found in diagnose(paths, rename=rename).runs.items()}
    try:
        samples = read_samples(paths, rename, progress)
    except DataError as error:
        if not all(finding is not None and is_uncorrectable(finding) for finding in fixes.values()):
            raise
        return Advice({run: RunAdvice(fix_first=finding, notes=[str(error)]) for run, finding in fixes.items()})
    result = {}
    for run, finding in fixes.items():
        # a cause can be wrong, so the ranking never depends on it
        advice = rank_corrections(samples.pop(run), candidates, batch, limits or Limits(), known, yours)
        result[run] = advice.model_copy(update={"fix_first": finding})
    _add_predictions(result, paths, rename)
    return Advice(result)


def _add_predictions(
    result: Mapping[str, RunAdvice], paths: Sequence[DumpSource], rename: Mapping[str, str] | None
) -> None:
    """Predict the rejection of each advised correction in the next batch and at twice the length."""
    named = {own.name: own.correction for advice in result.values() for own in (*advice.advice, *advice.yours)}
    if not named:
        return
    corrections = [parse_correction({**mapping, "name": name}) for name, mapping in named.items()]
    whole = read_sample(paths, corrections, rename=rename)
    for run, advice in result.items():
        sample = whole.of_run(run)
        twice = 2 * round(float(sample.tokens.mean())) if len(sample) else 0
        for own in (*advice.advice, *advice.yours):
            place = list(named).index(own.name)
            own.next_batch = _expected_rejection(predict_batch_rejection(sample, place, advice.batch))
            own.twice_the_length = _expected_rejection(predict_at_length(sample, corrections[place], twice)[0])


def _expected_rejection(prediction: Prediction) -> ExpectedRejection:
    return ExpectedRejection(value=prediction.value, interval=prediction.interval, status=prediction.status)
