"""Candidates for the advice: corrections, the user's limits, costs on a sample, and the unbiased reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.api.advise.sample import RunSample
from mismatchctl.api.scan import apply_trims
from mismatchctl.core.batch import Float64s
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.application import apply_correction
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import format_rule_name, named_correction, parse_correction
from mismatchctl.corrections.tensors import normalize_weights
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_framework, load_presets
from mismatchctl.measure.cluster_table import hash_values, mix_hashes
from mismatchctl.measure.metrics.metric import khat, khat_limit, tail_length

NO_CORRECTION = Correction(name="none")
_TRUNCATION_BOUNDS = (1.2, 1.5, 2.0, 3.0, 5.0)
_TOKEN_INTERVALS = ((0.5, 1.5), (0.5, 2.0), (0.5, 5.0))
_SEQUENCE_BOUNDS = (2.0, 5.0, 10.0)
_GEOMETRIC_BOUNDS = (1.0005, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05)


def default_candidates() -> list[Correction]:
    """Return each kind of correction at the thresholds that frameworks use."""
    names = [format_rule_name("token_truncate", bound) for bound in _TRUNCATION_BOUNDS]
    names += [format_rule_name(rule, *ends) for ends in _TOKEN_INTERVALS for rule in ("token_clip", "icepop")]
    names.append("token_mask_0.5_2")
    rules = ("seq_truncate", "seq_mis", "seq_reject")
    names += [format_rule_name(rule, bound) for bound in _SEQUENCE_BOUNDS for rule in rules]
    geometric = [format_rule_name("geo", bound) for bound in _GEOMETRIC_BOUNDS]
    names += [name for geo in geometric for name in (geo, f"{geo}_token_truncate_2")]
    return [NO_CORRECTION, *filter(None, map(named_correction, [*names, "veto_1e-4_token_truncate_2"]))]


def framework_candidates(framework: str) -> list[Correction]:
    """Return the default candidates that a framework supports, and the presets of the framework."""
    chosen = load_framework(framework)
    own = [known.correction for known in load_presets().values() if known.framework == framework.partition("@")[0]]
    found = [NO_CORRECTION]
    for correction in (*own, *default_candidates()[1:]):
        try:
            native, lost = chosen.native(correction)
        except ConfigError:
            continue
        if not lost and not any(trap.level == "error" for trap in chosen.lint(native)):
            found.append(correction)
    return unique_candidates(found)


def unique_candidates(corrections: Sequence[Correction]) -> list[Correction]:
    """Remove equal corrections with different names, and put "no correction" first."""
    found: dict[str, Correction] = {}
    for correction in (NO_CORRECTION, *corrections):
        found.setdefault(correction.model_copy(update={"name": "", "about": ""}).model_dump_json(), correction)
    return list(found.values())


@dataclass(frozen=True)
class CorrectedSample:
    """A correction applied to a sample."""

    weights: Float64s  # final weights [T], 0 for rejected tokens
    kept: Float64s  # tokens of each sequence that contribute to the loss [S]
    counted: Float64s  # tokens of each sequence in the denominator of the loss [S]

    @property
    def loss_scale(self) -> float:
        """Return the factor by which the correction scales the loss."""
        return float(self.weights.sum()) / max(float(self.counted.sum()), 1.0)


@dataclass(frozen=True)
class Candidate:
    """A correction and its costs on a sample."""

    correction: Correction
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    loss_scale: float


def apply_to_sample(correction: Correction, sample: RunSample) -> CorrectedSample:
    """Apply a correction as a trainer does: bound and normalize the weights, then apply the gates in order."""
    batch, rule, groups = apply_trims(sample.batch, [correction]), correction.weight, [np.arange(len(sample))]
    own = apply_correction(correction, compute_ratios(batch, correction.sources), batch)
    if rule is not None and rule.normalize != "none":  # over the step or the micro-batch
        scope, given = hash_values(sample.step), batch.columns.get("micro_batch")
        if rule.normalize_over == "micro_batch" and given is not None:
            scope = mix_hashes(hash_values(given), scope)
        groups = [np.flatnonzero(scope == value) for value in np.unique(scope)]
    weights = np.where(own.kept.expand(), normalize_weights(correction, own, groups), 0.0)
    return CorrectedSample(weights, own.kept.counts, own.counted.counts)


def evaluate_candidate(correction: Correction, sample: RunSample) -> tuple[Candidate, CorrectedSample]:
    """Apply a correction to a sample and return its costs and weights."""
    applied = apply_to_sample(correction, sample)
    filled, tokens = sample.batch.segments.nonempty, sample.batch.tokens
    gone = float(((applied.kept == 0) & filled).sum() / max(int(filled.sum()), 1))
    total, squares = float(applied.weights.sum()), float(applied.weights @ applied.weights)
    ess = total**2 / squares / tokens if squares > 0 and math.isfinite(squares) else 0.0
    rejected = 1 - float(applied.kept.sum()) / tokens
    return Candidate(correction, rejected, gone, ess, applied.loss_scale), applied


MAX_REJECTION = 0.9
"""Maximum rejection of an advised correction, because a correction that rejects everything would have no variance."""


@dataclass(frozen=True)
class Limits:
    """Constraints on candidates."""

    max_rejection: float = 1.0
    min_ess: float = 0.0
    no_rejection: bool = False

    def refuse(self, correction: Correction, rejected: float, ess: float) -> str:
        """Return the reason why a candidate is excluded, or "" if it is allowed."""
        if rejected > min(self.max_rejection, MAX_REJECTION):
            return f"rejects {rejected:.1%} of the tokens"
        if ess < self.min_ess:
            return f"leaves an ESS of {ess:.2g}"
        return "rejects" if self.no_rejection and correction.gates else ""


_SEQUENCE_REFERENCE, _TOKEN_REFERENCE = (
    parse_correction({"name": name, "weight": {"level": level, "truncate": bound}})
    for name, level, bound in (("seq_truncate_10", "sequence", 10.0), ("token_truncate_5", "token", 5.0))
)
CONVERGENCE_RANGE = (0.5, 1.5)
"""Range of the mean truncated sequence weight. Outside this range, token weights are the reference."""


@dataclass(frozen=True)
class BiasReference:
    """The correction that is treated as unbiased."""

    correction: Correction
    sequence_mean: float  # mean over tokens of the sequence weights truncated at 10
    k_hat: float | None  # tail index of the sequence weights
    is_heavy: bool  # the tail of the sequence weights is not in the sample, because k-hat exceeds its limit
    is_per_token: bool

    @property
    def lower_bound(self) -> bool:
        """Return True if the reference omits bias that the sample cannot show."""
        return self.is_heavy or self.is_per_token


def choose_reference(sample: RunSample) -> BiasReference:
    """Choose the least biased correction whose estimate converges.

    Sequence weights truncated at 10 have a finite variance at any length. Their mean shows how much of the weights the
    truncation removes. If this mean is outside `CONVERGENCE_RANGE`, the reference uses token weights. If k-hat exceeds
    its limit, the sample lacks the important part of the tail, so a mean near 1 does not prove that little is missing.
    """
    k_hat = sequence_k_hat(sample)
    is_heavy = k_hat is not None and k_hat > khat_limit(len(sample))
    mean = float(apply_to_sample(_SEQUENCE_REFERENCE, sample).weights.mean())
    converges = CONVERGENCE_RANGE[0] < mean < CONVERGENCE_RANGE[1]
    return BiasReference(_SEQUENCE_REFERENCE if converges else _TOKEN_REFERENCE, mean, k_hat, is_heavy, not converges)


def sequence_k_hat(sample: RunSample) -> float | None:
    """Return the Pareto k-hat of the sequence weights, if defined."""
    batch = sample.batch
    sums = batch.segments.sum(batch.train.astype(np.float64) - batch.rollout)[batch.segments.nonempty]
    found = khat(np.sort(sums)[-tail_length(len(sums)) - 1 :], len(sums)) if len(sums) else math.nan
    return found if math.isfinite(found) else None
