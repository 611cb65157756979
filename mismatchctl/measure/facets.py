"""Facets: columns for optional data such as weight versions, reference KL, experts and recorded distributions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.core.losses import KL_KINDS, LOW_VAR_BOUND
from mismatchctl.core.ratios import INTERVALS, TAUS, Ratios, compute_k3

ROLLOUT_TOP_COLUMN = "rollout_top_log_probs"
OTHER_TOP_COLUMNS = ("train_top_log_probs", "reference_top_log_probs")
"""Compared with the rollout: the trainer, else the scorer, which has the trainer's weights."""
DISTRIBUTION_NAMES = ("top", "top_kl", "top_tv", "top_tv_most", "top_mass_rollout", "top_mass_train", "top_agrees")
MIN_REST = 1e-6
"""Minimum probability of the remaining tokens, since float32 sums to 1 no more exactly."""
MIN_TOP_LOG_PROB = -700.0
"""Smaller log-probs count as this value, whose exp is still above 0."""
MAX_ROUNDED_LOG_PROB = 1e-3
"""Largest log-prob that counts as rounding. With a larger one, the position has no valid distribution."""


def distribution_columns(block: TokenBatch) -> dict[str, Float64s]:
    """Count tokens with two distributions, and sum `compare_distributions` over them, per sequence [S] each."""
    rollout, train = block.extra_columns.get(ROLLOUT_TOP_COLUMN), find_other_top(block.extra_columns)
    if rollout is None or train is None or rollout.shape != train.shape:
        return {name: np.zeros(len(block)) for name in DISTRIBUTION_NAMES}
    known: NDArray[Any] = np.all(
        (rollout <= MAX_ROUNDED_LOG_PROB) & (train <= MAX_ROUNDED_LOG_PROB), axis=1
    )  # False for NaN
    values = {"top": np.ones(len(known)), **compare_distributions(rollout, train)}
    segments = block.segments
    return {name: segments.sum(segments.from_host(np.where(known, values[name], 0.0))) for name in DISTRIBUTION_NAMES}


def find_other_top(tokens: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    """Return the log-probs that the rollout is compared with, given per-token columns by name."""
    return next((tokens[name] for name in OTHER_TOP_COLUMNS if name in tokens), None)


def compare_distributions(rollout: NDArray[Any], train: NDArray[Any]) -> dict[str, Float64s]:
    """Compute divergences [T] of rollout and trainer from the log-probs of k tokens at each position [T, k]."""
    a, b = (np.clip(side.astype(np.float64), MIN_TOP_LOG_PROB, MAX_ROUNDED_LOG_PROB) for side in (rollout, train))
    p, q = np.where(rollout == -np.inf, 0.0, np.exp(a)), np.exp(b)
    mass_p, mass_q = p.sum(axis=1), q.sum(axis=1)
    rest_p, rest_q = (np.maximum(1 - mass, MIN_REST) for mass in (mass_p, mass_q))
    apart = np.abs(p - q).sum(axis=1)
    return {
        "top_kl": (p * (a - b)).sum(axis=1) + rest_p * np.log(rest_p / rest_q),
        "top_tv": (apart + np.abs(rest_p - rest_q)) / 2,
        "top_tv_most": (apart + rest_p + rest_q) / 2,
        "top_mass_rollout": mass_p,
        "top_mass_train": mass_q,
        "top_agrees": (np.argmax(a, axis=1) == np.argmax(b, axis=1)).astype(np.float64),
    }


Columns = dict[str, Float64s]


@dataclass(frozen=True)
class Facet:
    """Optional metrics that need certain columns."""

    name: str  # of its metrics
    needs: frozenset[str]  # required columns of the schema
    names: tuple[str, ...]  # of its sums, in order
    columns: Callable[[TokenBatch, Ratios], Columns]  # computes its sums
    either: tuple[str, ...] = ()  # one of these columns is also required, unless empty

    def is_available(self, has: Collection[str]) -> bool:
        return self.needs <= set(has) and (not self.either or any(name in has for name in self.either))


BEYOND_NAMES = tuple(f"beyond@{tau:g}" for tau in TAUS)
SPREAD_NAMES = ("in_band", "means_in_band", "length^1.5", *BEYOND_NAMES)


def spread_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Count tokens and sequences with a ratio close to 1, tokens with a ratio far from 1, and sum lengths^1.5."""
    lengths = block.segments.lengths.astype(np.float64)
    low, high = INTERVALS[:, 0]
    mean = ratios.log_ratio_sum / np.maximum(lengths, 1)
    near = (mean >= low) & (mean <= high) & (lengths > 0)
    outside, *beyond = ratios.outside_counts
    return dict(zip(SPREAD_NAMES, (lengths - outside, near.astype(np.float64), lengths**1.5, *beyond), strict=True))


VERSION_NAMES = ("behind", "aged", "stale", "mixed", "versioned")


def version_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Sum the age of tokens. Count tokens with known and positive ages, sequences with several and any versions."""
    segments = Segments(block.segments.offsets)  # versions stay on the host
    unknown = np.full(len(block), np.nan)

    def of_tokens(column: str) -> Float64s:
        if column in block.extra_columns:
            return block.extra_columns[column].astype(np.float64)
        of_sequences = block.columns.get(column, unknown)
        return segments.spread(unknown if of_sequences.dtype == object else of_sequences).astype(np.float64)

    versions = of_tokens("rollout_version")
    behind, told = of_tokens("train_version") - versions, np.isfinite(versions)
    aged = np.isfinite(behind)
    newest, oldest = segments.max(np.where(told, versions, -np.inf)), segments.min(np.where(told, versions, np.inf))
    sums = [segments.sum(values) for values in (np.where(aged, behind, 0.0), aged, aged & (behind > 0))]
    flags = [values.astype(np.float64) for values in (newest > oldest, newest >= oldest)]
    return dict(zip(VERSION_NAMES, (*sums, *flags), strict=True))


REWARD_NAMES = ("reward", "rewarded")


def reward_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Sum the rewards of sequences with tokens, and count those with a reward."""
    rewards = block.columns.get("reward", np.full(len(block), np.nan))
    numbers = np.full(len(block), np.nan) if rewards.dtype == object else rewards.astype(np.float64)
    known = np.isfinite(numbers) & (block.segments.lengths > 0)
    return dict(zip(REWARD_NAMES, (np.where(known, numbers, 0.0), known.astype(np.float64)), strict=True))


KL_NAMES = (
    "kl_tokens", "kl_sequences",
    *(f"kl_{kind}{weight}{mean}" for kind in KL_KINDS for weight in ("", "_unbiased") for mean in ("", "_mean")),
)  # fmt: skip


def kl_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Estimate the KL of the current policy (without it, the trainer's recomputation) to the reference policy."""
    policy, reference = block.train if block.current is None else block.current, block.log_probs("ref")
    known = np.zeros(len(block)) if reference is None else block.has_log_probs("ref").astype(np.float64)
    lengths = block.segments.lengths * known
    columns = {"kl_tokens": lengths, "kl_sequences": (lengths > 0).astype(np.float64)}
    if reference is None:
        return columns | {name: np.zeros(len(block)) for name in KL_NAMES[2:]}
    scored = block.segments.spread(known > 0)
    log_ratio = np.where(scored, policy.astype(np.float64) - reference.astype(np.float64), 0.0)
    importance = np.exp(policy.astype(np.float64) - block.train.astype(np.float64))
    for kind in KL_KINDS:
        found = _estimate(log_ratio, kind, None), _estimate(log_ratio, kind, importance)
        for name, values in zip((f"kl_{kind}", f"kl_{kind}_unbiased"), found, strict=True):
            columns[name] = block.segments.sum(values)
            columns[f"{name}_mean"] = columns[name] / np.maximum(lengths, 1)
    return columns


def _estimate(log_ratio: Float64s, kind: str, importance: Float64s | None) -> Float64s:
    """Compute `kl_estimate` with full precision. Weights apply before the bound of low_var."""
    x = log_ratio
    with np.errstate(over="ignore", invalid="ignore"):  # a mean that is not finite has a status
        exact = x if kind == "k1" else x * x / 2 if kind == "k2" else compute_k3(-x)
        weighted = exact if importance is None else importance * exact
    return np.clip(weighted, -LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var" else weighted


LAYER_WIDTHS = (1, 2, 4, 6, 8, 10)
"""Possible numbers of experts per layer. The width is the largest at which no layer repeats an expert."""
WIDTH_NAMES = ("repeats", "rerouted", "rerouted_k3", "rerouted_sequences")
ROUTING_NAMES = (
    "routed",
    "routed_k3",
    "routed_sequences",
    *(f"{name}@{k}" for name in WIDTH_NAMES for k in LAYER_WIDTHS),
)


def routing_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Count tokens with known experts and their K3, and by width the tokens that do not fit and rerouted tokens.

    A token is rerouted if the sets of experts differ in a layer.
    """
    rollout, train = (block.extra_columns.get(f"{side}_experts") for side in ("rollout", "train"))
    lost = rollout is None or train is None or rollout.shape != train.shape
    if rollout is None or train is None or lost:
        return {name: np.zeros(len(block)) for name in ROUTING_NAMES}
    segments = block.segments

    def total(flags: Bools, values: Float64s | None = None) -> Float64s:
        there = segments.from_host(flags)
        return segments.sum(there if values is None else np.where(there, values, 0.0))

    known = ~(np.isnan(rollout).any(axis=1) | np.isnan(train).any(axis=1))
    columns = {"routed": total(known), "routed_k3": total(known, ratios.k3)}
    columns["routed_sequences"] = (columns["routed"] > 0).astype(np.float64)
    for width in LAYER_WIDTHS:
        fits, same = _compare_routing(rollout, train, width)
        rerouted = total(known & ~same)
        columns[f"repeats@{width}"] = total(known & ~fits)
        columns[f"rerouted@{width}"] = rerouted
        columns[f"rerouted_k3@{width}"] = total(known & ~same, ratios.k3)
        columns[f"rerouted_sequences@{width}"] = (rerouted > 0).astype(np.float64)
    return columns


def _compare_routing(rollout: NDArray[Any], train: NDArray[Any], width: int) -> tuple[Bools, Bools]:
    """Return for this layer width whether no layer repeats an expert, and whether the sides agree [T] each."""
    tokens, chosen = rollout.shape
    if chosen % width:
        never = np.zeros(tokens, np.bool_)
        return never, never
    layers = tokens, chosen // width  # explicit, since numpy cannot infer it without tokens
    a, b = (np.sort(side.reshape(*layers, width), axis=2) for side in (rollout, train))
    return (np.diff(a, axis=2) != 0).all(axis=(1, 2)), (a == b).all(axis=(1, 2))


SPREAD, VERSIONS, REWARD, KL, ROUTING = "spread", "versions", "reward", "kl", "routing"
TOP_DISTRIBUTIONS = "distributions"
FACETS = (
    Facet(SPREAD, frozenset(), SPREAD_NAMES, spread_columns),
    Facet(VERSIONS, frozenset({"rollout_version"}), VERSION_NAMES, version_columns),
    Facet(REWARD, frozenset({"reward"}), REWARD_NAMES, reward_columns),
    Facet(KL, frozenset({"ref_log_probs"}), KL_NAMES, kl_columns),
    Facet(ROUTING, frozenset({"rollout_experts", "train_experts"}), ROUTING_NAMES, routing_columns),
    Facet(
        TOP_DISTRIBUTIONS,
        frozenset({ROLLOUT_TOP_COLUMN}),
        DISTRIBUTION_NAMES,
        lambda block, ratios: distribution_columns(block),
        either=OTHER_TOP_COLUMNS,
    ),
)
"""All facets. A dump has the facets whose columns it contains."""
