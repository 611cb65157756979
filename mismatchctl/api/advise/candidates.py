"""Candidate corrections for the advice, and their costs and gradient errors on a sample of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.scan import DumpReading, ReadOptions, UnitBatches, apply_trims
from mismatchctl.core.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.ratios import compute_ratios
from mismatchctl.corrections.application import adjacent_segments, apply_correction
from mismatchctl.corrections.labels import short_number
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import format_rule_name, named_correction, parse_correction
from mismatchctl.corrections.tensors import normalize_weights
from mismatchctl.data.blocks import TOKEN_IDS_COLUMN, Rows
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks.registry import load_framework, load_presets
from mismatchctl.measure.metrics.metric import khat, khat_limit, tail_length
from mismatchctl.measure.reduction import split_runs
from mismatchctl.measure.sums import cluster_hashes, hash_values, mix_hashes

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_TOKENS = 1 << 21
"""Maximum number of tokens per run. From a larger run, only the prompts with the smallest hashes are used."""
MIN_SEQUENCES = 640
"""A sample keeps at least this number of sequences, even above MAX_TOKENS. With fewer, advice is less reliable."""
_PROMPT_HASH = "\0prompt"  # name of a temporary column, which contains the hash of each sequence's prompt


@dataclass(frozen=True)
class RunSample:
    """A sample of one run: S sequences with T valid tokens, sorted by the hash of (step, prompt)."""

    batch: TokenBatch
    token_ids: Ints | None  # id of each token [T]
    advantages: Float64s | None  # of the dump [T], or reward minus mean reward of the prompt's other responses
    cluster: Ints  # for each sequence, the index of its pair (step, prompt). The pairs are ordered by hash [S].
    step: Ints  # for each sequence, the index of its step [S]
    steps: tuple[Any, ...] = ()  # labels of the steps, or () if the dump lacks steps
    dump_sequences: int = 0  # number of sequences of the run, inside and outside of the sample

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def per_step(self) -> int | None:
        return max(round(self.dump_sequences / len(self.steps)), 1) if self.steps else None

    @property
    def clusters(self) -> int:
        return int(self.cluster[-1]) + 1 if len(self.cluster) else 0


def read_samples(paths: Sequence[DumpSource], **options: Unpack[ReadOptions]) -> dict[str, RunSample]:
    reading = DumpReading.open(paths, (), (), extra=("micro_batch",), watched=(TOKEN_IDS_COLUMN,), **options)
    found: dict[str, PromptSample] = {}
    for samples, _ in reading.parts(_sample_runs):
        for name, sample in samples:
            found.setdefault(name, PromptSample()).merge(sample)
    reading.require_tokens()
    return {run: _build_sample(found.pop(run)) for run in [*found]}


def _sample_runs(batches: UnitBatches, run: str) -> list[tuple[str, PromptSample]]:
    seen: list[Rows] = []
    found: dict[str, PromptSample] = {}
    for batch in batches.read(seen.append):
        for name, part in split_runs(_add_ids_and_hashes(batch, seen.pop()), run):
            found.setdefault(name, PromptSample()).add(part)
        seen.clear()
    return list(found.items())


def _add_ids_and_hashes(batch: TokenBatch, rows: Rows) -> TokenBatch:
    ids = rows.extra_columns.get(TOKEN_IDS_COLUMN)
    ids = None if ids is None or ids.ndim != 1 else ids[rows.mask]
    if ids is None or len(ids) != batch.tokens or np.isnan(ids.astype(np.float64)).any():
        extra = {}
    else:
        extra = {TOKEN_IDS_COLUMN: ids.astype(np.int64)}
    return replace(batch, extra_columns=extra, columns={**batch.columns, _PROMPT_HASH: cluster_hashes(batch)})


class PromptSample:
    """A sample of prompts with all their responses. Hashes select the prompts, regardless of the reading order."""

    def __init__(self) -> None:
        self.parts: list[TokenBatch] = []
        self.seen = 0
        self._cut: int | None = None

    def add(self, batch: TokenBatch) -> None:
        self.seen += len(batch)
        self.parts.append(batch if self._cut is None else self._below(batch, self._cut))
        self.shrink(slack=2)

    def merge(self, other: PromptSample) -> None:
        """Add another sample. Keep only prompts that neither sample has dropped (see `shrink`)."""
        self.seen += other.seen - sum(map(len, other.parts))
        if other._cut is not None and (self._cut is None or other._cut < self._cut):
            self._cut = other._cut
            self.parts = [self._below(part, other._cut) for part in self.parts]
        for batch in other.parts:
            self.add(batch)

    def shrink(self, slack: int = 1) -> None:
        """If the sample exceeds `slack` times MAX_TOKENS and MIN_SEQUENCES, keep prompts with the smallest hashes."""
        tokens, sequences = sum(part.tokens for part in self.parts), sum(map(len, self.parts))
        if tokens <= slack * MAX_TOKENS or sequences <= slack * MIN_SEQUENCES:
            return
        joined = _concatenate(self.parts)
        hashes, prompt, responses = np.unique(joined.columns[_PROMPT_HASH], return_inverse=True, return_counts=True)
        fits = np.cumsum(np.bincount(prompt, joined.segments.lengths)) <= MAX_TOKENS
        beyond = hashes[~fits & (np.cumsum(responses) - responses >= MIN_SEQUENCES)]
        if len(beyond):
            self._cut = int(beyond[0])
            joined = self._below(joined, self._cut)
        self.parts = [joined]

    @staticmethod
    def _below(batch: TokenBatch, cut: int) -> TokenBatch:
        return batch.take(np.flatnonzero(batch.columns[_PROMPT_HASH] < cut))


def _concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    def joined(name: str, fill: Callable[[TokenBatch], NDArray[Any]] | None = None) -> NDArray[Any] | None:
        arrays = [getattr(batch, name) for batch in batches]
        if all(array is None for array in arrays):
            return None
        arrays = [fill(own) if fill and array is None else array for array, own in zip(arrays, batches, strict=True)]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    lengths = np.concatenate([batch.segments.lengths for batch in batches])
    columns = {
        name: np.concatenate([batch.columns.get(name, np.full(len(batch), None, object)) for batch in batches])
        for name in dict.fromkeys(name for batch in batches for name in batch.columns)
    }
    extra = [name for name in batches[0].extra_columns if all(name in batch.extra_columns for batch in batches)]
    return TokenBatch(
        Segments.from_lengths(lengths),
        np.concatenate([batch.rollout for batch in batches]),
        np.concatenate([batch.train for batch in batches]),
        current=joined("current"),
        position=joined("position", lambda batch: batch.positions),
        advantages=joined("advantages"),
        columns=columns,
        rows=np.arange(len(lengths)),
        extra_columns={name: np.concatenate([batch.extra_columns[name] for batch in batches]) for name in extra},
        impossible=joined("impossible", lambda batch: np.zeros(len(batch), np.int64)),
        impossible_near=joined("impossible_near", _near_nothing_impossible),
    )


def _near_nothing_impossible(batch: TokenBatch) -> Ints:
    near = np.zeros((batch.tokens, 3), np.int64)
    near[adjacent_segments(batch).offsets[:-1], 0] = 1
    return near


def _build_sample(found: PromptSample) -> RunSample:
    """Order the sequences by hash, so that the result does not depend on the reading order."""
    found.shrink()
    joined = _concatenate(found.parts)
    found.parts.clear()  # free memory before the next copy
    named = joined.columns.get("step")
    steps = np.zeros(len(joined)) if named is None else named
    labels, step = np.unique(steps.astype(str) if steps.dtype == object else steps, return_inverse=True)
    mixed = mix_hashes(joined.columns[_PROMPT_HASH], hash_values(step))
    content = joined.segments.sum(joined.rollout)
    order = np.lexsort((content, joined.segments.lengths, mixed))
    batch = joined.take(order)
    _, cluster = np.unique(mixed[order], return_inverse=True)
    known = () if named is None else tuple(labels.tolist())
    ids, advantages = batch.extra_columns.get(TOKEN_IDS_COLUMN), _read_advantages(batch, cluster)
    return RunSample(batch, ids, advantages, cluster, step[order], known, found.seen)


def _read_advantages(batch: TokenBatch, cluster: Ints) -> Float64s | None:
    """Return the advantages of the dump, or compute them from rewards. Without usable rewards, return `None`."""
    if batch.advantages is not None:
        return batch.advantages.astype(np.float64)
    reward = batch.columns.get("reward")
    if reward is None or reward.dtype.kind != "f" or not np.isfinite(reward).all():
        return None
    count = np.bincount(cluster)[cluster]
    others = (np.bincount(cluster, reward)[cluster] - reward) / np.maximum(count - 1, 1)
    each = np.where(count > 1, reward - others, 0.0)
    return batch.segments.spread(each) if each.any() else None


NO_CORRECTION = Correction(name="none")
_TRUNCATION_BOUNDS = (1.2, 1.5, 2.0, 3.0, 5.0)
_TOKEN_INTERVALS = ((0.5, 1.5), (0.5, 2.0), (0.5, 5.0))
_SEQUENCE_BOUNDS = (2.0, 5.0, 10.0)
_GEOMETRIC_BOUNDS = (1.0005, 1.001, 1.002, 1.005, 1.01, 1.02, 1.05)


def default_candidates() -> list[Correction]:
    """Return the corrections to rank by default: every type of correction, at thresholds that frameworks use."""
    names = [format_rule_name("token_truncate", bound) for bound in _TRUNCATION_BOUNDS]
    names += [format_rule_name(rule, *ends) for ends in _TOKEN_INTERVALS for rule in ("token_clip", "icepop")]
    names.append("token_mask_0.5_2")
    rules = ("seq_truncate", "seq_mis", "seq_reject")
    names += [format_rule_name(rule, bound) for bound in _SEQUENCE_BOUNDS for rule in rules]
    geometric = [format_rule_name("geo", bound) for bound in _GEOMETRIC_BOUNDS]
    names += [name for geo in geometric for name in (geo, f"{geo}_token_truncate_2")]
    return [NO_CORRECTION, *filter(None, map(named_correction, [*names, "veto_1e-4_token_truncate_2"]))]


def framework_candidates(framework: str) -> list[Correction]:
    """Return the presets of a framework and the default candidates, but only those that the framework supports."""
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
    """Put "no correction" first, and remove corrections that only differ in their names."""
    found: dict[str, Correction] = {}
    for correction in (NO_CORRECTION, *corrections):
        found.setdefault(correction.model_copy(update={"name": "", "about": ""}).model_dump_json(), correction)
    return list(found.values())


@dataclass(frozen=True)
class CorrectedSample:
    """The result of applying a correction to a sample."""

    weights: Float64s  # final weight of each token, 0 if the token is rejected [T]
    kept: Float64s  # for each sequence, the number of tokens that contribute to the loss [S]
    counted: Float64s  # for each sequence, the number of tokens in the denominator of the loss [S]

    @property
    def loss_scale(self) -> float:
        return float(self.weights.sum()) / max(float(self.counted.sum()), 1.0)


@dataclass(frozen=True)
class Candidate:
    """A correction and its costs, such as the share of rejected tokens."""

    correction: Correction
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    loss_scale: float


def apply_to_sample(correction: Correction, sample: RunSample) -> CorrectedSample:
    batch, rule, groups = apply_trims(sample.batch, [correction]), correction.weight, [np.arange(len(sample))]
    own = apply_correction(correction, compute_ratios(batch, correction.sources), batch)
    if rule is not None and rule.normalize != "none":  # normalize within steps or micro-batches
        scope, given = hash_values(sample.step), batch.columns.get("micro_batch")
        if rule.normalize_over == "micro_batch" and given is not None:
            scope = mix_hashes(hash_values(given), scope)
        groups = [np.flatnonzero(scope == value) for value in np.unique(scope)]
    weights = np.where(own.kept.expand(), normalize_weights(correction, own, groups), 0.0)
    return CorrectedSample(weights, own.kept.counts, own.counted.counts)


def evaluate_candidate(correction: Correction, sample: RunSample) -> tuple[Candidate, CorrectedSample]:
    applied = apply_to_sample(correction, sample)
    filled, tokens = sample.batch.segments.nonempty, sample.batch.tokens
    gone = float(((applied.kept == 0) & filled).sum() / max(int(filled.sum()), 1))
    total, squares = float(applied.weights.sum()), float(applied.weights @ applied.weights)
    ess = total**2 / squares / tokens if squares > 0 and math.isfinite(squares) else 0.0
    rejected = 1 - float(applied.kept.sum()) / tokens
    return Candidate(correction, rejected, gone, ess, applied.loss_scale), applied


MAX_REJECTION = 0.9
"""Maximum share of rejected tokens. A correction that rejects all tokens would win, because its variance is 0."""


@dataclass(frozen=True)
class Limits:
    """Limits that the user sets. A correction that breaks a limit is not ranked."""

    max_rejection: float = 1.0
    min_ess: float = 0.0
    no_rejection: bool = False

    def refuse(self, correction: Correction, rejected: float, ess: float) -> str:
        """Return the reason why a candidate is excluded, or "" if it is allowed."""
        if rejected > min(self.max_rejection, MAX_REJECTION):
            return f"rejects {rejected:.1%} of the tokens"
        if ess < self.min_ess:
            return f"leaves an ESS of {short_number(ess)}"
        return "rejects" if self.no_rejection and correction.gates else ""


_SEQUENCE_REFERENCE, _TOKEN_REFERENCE = (
    parse_correction({"name": name, "weight": {"level": level, "truncate": bound}})
    for name, level, bound in (("seq_truncate_10", "sequence", 10.0), ("token_truncate_5", "token", 5.0))
)
CONVERGENCE_RANGE = (0.5, 1.5)
"""If the mean of the truncated sequence weights is not in this range, the bias is estimated with token weights."""


@dataclass(frozen=True)
class BiasReference:
    """The correction whose gradient counts as true. The bias of another gradient is its distance from this gradient."""

    correction: Correction
    sequence_mean: float  # mean over tokens of the sequence weights truncated at 10
    k_hat: float | None  # tail index of the sequence weights
    is_heavy: bool  # k-hat exceeds its limit, so the sample may lack rare but large weights
    is_per_token: bool

    @property
    def lower_bound(self) -> bool:
        """Return True if this reference may be biased too. An estimated bias is then only a lower bound."""
        return self.is_heavy or self.is_per_token


def choose_reference(sample: RunSample) -> BiasReference:
    """Return truncated sequence weights as the reference if their mean is near 1, else truncated token weights."""
    k_hat = sequence_k_hat(sample)
    is_heavy = k_hat is not None and k_hat > khat_limit(len(sample))
    mean = float(apply_to_sample(_SEQUENCE_REFERENCE, sample).weights.mean())
    converges = CONVERGENCE_RANGE[0] < mean < CONVERGENCE_RANGE[1]
    return BiasReference(_SEQUENCE_REFERENCE if converges else _TOKEN_REFERENCE, mean, k_hat, is_heavy, not converges)


def sequence_k_hat(sample: RunSample) -> float | None:
    batch = sample.batch
    sums = batch.segments.sum(batch.train.astype(np.float64) - batch.rollout)[batch.segments.nonempty]
    found = khat(np.sort(sums)[-tail_length(len(sums)) - 1 :], len(sums)) if len(sums) else math.nan
    return found if math.isfinite(found) else None


MAX_CONTEXTS, MAX_CHOICES = 256, 128
"""Rows (previous tokens) and columns (tokens) of the Surrogate's table, if a cell per pair of ids takes more cells."""

_SMALLEST_ALTERNATIVE = 1e-9
_PROJECTION_CAUTION = 0.5
"""`estimate_projection` subtracts this number of standard errors, because too large a value favors a correction."""
_MIN_PROJECTION = 0.1
"""Minimum of `estimate_projection`. Gradients are divided by this estimate, so they grow 10 times at most."""
PROBABILITY_BINS = 8
"""Number of bins of train log-probs. If the dump lacks token ids, the bin of a token replaces its id."""


@dataclass(frozen=True)
class GradientMoments:
    """Bias and variance of the gradients with one correction, compared with a reference correction without bias."""

    bias2: float  # unbiased estimate of the squared bias, which may be slightly negative
    variance: float  # trace of the covariance of the gradient of one batch
    bias2_se: float  # jackknife standard error of `bias2`
    errors: Float64s  # for each batch, the squared distance of its gradient from the mean reference gradient [batches]


@dataclass(frozen=True)
class GradientProducts:
    """Inner products between the gradients of every two batches. Each matrix has the shape [batches, batches]."""

    own: Float64s  # correction gradient times correction gradient
    across: Float64s  # correction gradient times reference gradient
    apart: Float64s  # difference times difference, where each difference is correction minus reference gradient
    reference: Float64s  # reference gradient times reference gradient

    def __len__(self) -> int:
        return len(self.own)

    def scaled(self, factor: float) -> GradientProducts:
        """Return the GradientProducts of a correction whose gradients are `factor` times as large."""
        # computed from `apart`, which is exact even if the differences are small
        mixed = self.across - self.reference
        apart = factor**2 * self.apart + factor * (factor - 1) * (mixed + mixed.T) + (factor - 1) ** 2 * self.reference
        return GradientProducts(factor**2 * self.own, factor * self.across, apart, self.reference)

    def estimate_projection(self) -> float:
        """Estimate how long the mean gradient is in the direction of the mean reference gradient (1: equally long).

        A noisy estimate is shrunk towards 1, and half of its standard error is subtracted. Too large an estimate would
        make the correction look better than it is.
        """
        length, length_without = _squared_norm_of_mean(self.reference)
        along, along_without = _squared_norm_of_mean((self.across + self.across.T) / 2)
        sure_length = max(length, _jackknife_error(length_without))
        if not sure_length > 0:
            return 1.0
        noise = _jackknife_error(along_without - length_without) / sure_length
        spread = float(np.trace(self.apart) / np.trace(self.reference))
        trust = spread / (spread + noise**2) if spread > 0 else 0.0
        change = trust * (along - length) / sure_length - _PROJECTION_CAUTION * math.sqrt(trust) * noise
        return max(1 + change, _MIN_PROJECTION)

    def moments(self) -> GradientMoments:
        bias2, without = _squared_norm_of_mean(self.apart)
        count, total = len(self), self.own.sum()
        variance = float((np.trace(self.own) - total / count) / (count - 1))
        errors = np.diag(self.own) - 2 * self.across.mean(axis=1) + self.reference.mean()
        return GradientMoments(bias2, variance, _jackknife_error(without), errors)


@dataclass(frozen=True)
class GradientReference:
    """Gradients of the reference correction (assumed unbiased), to compare with the gradients of other corrections."""

    gradients: Float64s  # one gradient per batch [batches, features]
    squares: Float64s  # inner products of every two of these gradients [batches, batches]

    @classmethod
    def of(cls, gradients: Float64s) -> GradientReference:
        return cls(gradients, gradients @ gradients.T)

    def inner_products(self, gradients: Float64s) -> GradientProducts:
        difference = gradients - self.gradients  # exact for small differences, unlike differences of products
        apart, across = difference @ difference.T, difference @ self.gradients.T
        own = apart + across + across.T + self.squares
        return GradientProducts(own, across + self.squares, apart, self.squares)


class Surrogate:
    """A simple policy, used because the dump does not contain the model. It computes a policy gradient per batch.

    The policy has one logit per pair (previous token, token). The gradient of a token's log-prob is 1 - p for its own
    logit (p: trainer probability), and p - 1 in total for the other logits of the same previous token.
    """

    def __init__(self, sample: RunSample, batch: Ints) -> None:
        """Divide the sample into batches. `batch` [S] contains the batch index of each sequence, in ascending order."""
        assert sample.advantages is not None
        segments, train = sample.batch.segments, sample.batch.train
        ids = sample.token_ids
        if ids is None:
            bounds = np.quantile(train, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
            ids = np.searchsorted(bounds, train).astype(np.int64)
        self._batch = batch
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(batch, segments.lengths))]).astype(np.int64).tolist()
        uncertainty = -np.expm1(np.minimum(train.astype(np.float64), 0.0))
        self._coefficient = sample.advantages * uncertainty
        self._contexts, self._choices, self.feature = _token_features(ids, segments)
        table = np.bincount(self.feature, uncertainty, self._contexts * self._choices)
        self._alternatives = table.reshape(self._contexts, self._choices) + 1e-12
        self._others = self._alternatives.sum(axis=1, keepdims=True) - self._alternatives

    def gradients(self, applied: CorrectedSample) -> Float64s:
        """Return the gradient of each batch, divided by the correction's loss scale [batches, features]."""
        scale = applied.loss_scale
        terms = applied.weights / (scale if scale > 0 else 1.0) * self._coefficient
        counted = np.maximum(np.bincount(self._batch, applied.counted), 1)
        found = np.empty((len(counted), self._contexts * self._choices))
        for row, (start, stop) in enumerate(pairwise(self._bounds)):
            flat = np.bincount(self.feature[start:stop], terms[start:stop], found.shape[1]) / counted[row]
            table = flat.reshape(self._contexts, self._choices)
            share = table / np.maximum(self._others, _SMALLEST_ALTERNATIVE)
            # spread the p - 1 of each token over the logits of the other tokens with the same previous token
            found[row] = (table - self._alternatives * (share.sum(axis=1, keepdims=True) - share)).ravel()
        return found


def _jackknife_error(without: Float64s) -> float:
    """Return the jackknife standard error. `without[i]` is the estimate without batch `i`."""
    return float(np.sqrt((len(without) - 1) * without.var()))


def _squared_norm_of_mean(products: Float64s) -> tuple[float, Float64s]:
    """Return an unbiased estimate of the squared length of the mean of vectors, from their inner `products`.

    Entry i of the second result is the estimate without vector i (jackknife).
    """
    count = len(products)
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    return float(off / (count * (count - 1))), without


def _token_features(ids: Ints, segments: Segments) -> tuple[int, int, NDArray[np.int32]]:
    """Return the number of rows (previous tokens) and columns (tokens) of a table, and the cell of each token [T]."""
    known, code = np.unique(ids, return_inverse=True)
    size = len(known)
    before = np.concatenate([[size], code[:-1]])
    before[segments.offsets[:-1][segments.nonempty]] = size
    contexts, choices = size + 1, size
    if contexts * choices > MAX_CONTEXTS * MAX_CHOICES:
        contexts, choices = MAX_CONTEXTS, MAX_CHOICES
        mixed = [part.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) for part in (before, code)]
        before, code = (
            (part >> np.uint64(64 - size.bit_length() + 1)).astype(np.int64)
            for part, size in zip(mixed, (contexts, choices), strict=True)
        )
    return contexts, choices, (before * choices + code).astype(np.int32)


def paired_difference(first: Float64s, second: Float64s) -> tuple[float, float]:
    """Return the mean of `first` - `second` over batches, and the standard error of this mean."""
    difference = first - second
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


SIGNIFICANT_STANDARD_ERRORS = 2.0
"""A difference between two gradient errors is significant above this number of standard errors."""
_CAUTION_FACTOR = 0.5
"""Candidates are ranked by error + this number * `critical` (at least 2) * standard error (docs/methods/advice.md)."""
RELIABLE_SEQUENCES = 320
"""With fewer sequences, the advice was wrong in simulations with a known best correction (docs/methods/advice.md)."""
_MIN_GAIN = 1e-3
"""A candidate is only better than no correction if it removes more than this share of the uncorrected error."""


@dataclass(frozen=True)
class CandidateRanking:
    """Candidates from best to worst (`order`). `mse` and `moments` also contain corrections without a rank.

    The order is by mean squared error plus a penalty for its uncertainty (_CAUTION_FACTOR). If no candidate is
    significantly better than no correction, "none" is first.
    """

    order: tuple[str, ...]
    better: frozenset[str]  # names of candidates with a significantly smaller error than no correction
    mse: Mapping[str, float]
    moments: Mapping[str, GradientMoments]
    scale: float  # converts the variance of a batch to the variance of an update
    critical: float  # differences above this number of standard errors are significant

    @property
    def first(self) -> str:
        return self.order[0]

    def gain(self, name: str) -> tuple[float, float]:
        """Return the share of the uncorrected error that the candidate removes, and the standard error of the share."""
        none = self.mse["none"]
        _, error = paired_difference(self.moments["none"].errors, self.moments[name].errors)
        scale = float(self.moments["none"].errors.mean())
        return (1 - self.mse[name] / none if none else 0.0), (error / scale if scale else 0.0)

    def variance(self, name: str) -> float:
        return self.moments[name].variance * self.scale

    def ties(self, name: str) -> bool:
        """Return True if a candidate is not significantly worse than the first candidate."""
        if name == self.first:
            return True
        difference, error = paired_difference(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= self.critical * error


def choose_correction(
    products: Mapping[str, GradientProducts],
    scale: float,
    critical: float = SIGNIFICANT_STANDARD_ERRORS,
    *,
    shrinking: Collection[str] = (),
    unranked: Collection[str] = (),
) -> CandidateRanking:
    """Rank candidates by the mean squared error of their gradient.

    First, all gradients are scaled to the same length, so that a smaller loss does not look like a smaller error.
    Candidates in `shrinking`, which make the loss much smaller, rank last. Corrections in `unranked` get no rank.
    """
    found = {name: own.scaled(1 / own.estimate_projection()).moments() for name, own in products.items()}
    ranked = [name for name in products if name not in unranked]
    mse = {name: max(own.bias2, 0.0) + own.variance * scale for name, own in found.items()}
    gains = {name: paired_difference(found["none"].errors, own.errors) for name, own in found.items()}
    least = _MIN_GAIN * float(found["none"].errors.mean())
    better = frozenset(
        name
        for name, (gain, error) in gains.items()
        if name not in shrinking and mse[name] < mse["none"] and gain > max(critical * error, least)
    )

    def rank(name: str) -> tuple[bool, bool, float]:
        stays = name == "none" and better.isdisjoint(ranked)
        return name in shrinking, not stays, mse[name] + _CAUTION_FACTOR * critical * gains[name][1] * scale

    return CandidateRanking(tuple(sorted(ranked, key=rank)), better, mse, found, scale, critical)


def required_standard_errors(sequences: int) -> float:
    """Return the number of standard errors above which a difference is significant: 2, or more in small samples."""
    return SIGNIFICANT_STANDARD_ERRORS * max(1.0, math.sqrt(MIN_SEQUENCES / max(sequences, 1)))
