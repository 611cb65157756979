"""Compute the values per sequence that tests for causes need: sums about the size of the mismatch, and hashes.

A compiled loop computes the same terms for large dumps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Floats, Ints, Segments
from mismatchctl.core.machine_code import CompiledLoop, compiled_loops_in_use
from mismatchctl.measure.sums import HASH, Hashes, mix_hashes

scan_sequences = CompiledLoop("mismatchctl.measure.kernels.loops", "scan_sequences")
LEVEL_CAP = 1.0  # in a sequence's sum of |log ratio|, a token with a larger value counts as this value
_PIECE_TOKENS, _PIECE_SEQUENCES = 1 << 17, 1 << 11
"""Number of tokens, or of sequences to hash, per numpy call, so that temporary arrays fit in the CPU cache."""


class LevelTerms(NamedTuple):
    """Sums over the valid tokens of a sequence. Each field has one value per sequence [S]."""

    finite: Ints  # number of tokens with a finite log ratio
    identical: Ints  # number of tokens with equal log-probs on the two sides
    size: Float64s  # sum of min(|log ratio|, LEVEL_CAP)
    certain: Float64s  # sum of the trainer's probabilities of tokens with a finite log ratio


class ValidTokens(NamedTuple):
    """Sequence i has the valid tokens `tokens[bounds[i] : bounds[i + 1]]`. If `tokens` is `None`, all are valid."""

    tokens: Ints | None
    bounds: Ints

    @classmethod
    def of(cls, segments: Segments, valid: Bools) -> ValidTokens:
        if valid.all():
            return cls(None, segments.offsets)
        tokens = np.flatnonzero(valid)
        return cls(tokens, np.searchsorted(tokens, segments.offsets))

    @property
    def counts(self) -> Ints:
        return np.diff(self.bounds)

    def probe(self, sequences: Ints) -> tuple[Ints, Ints]:
        """Choose HASH.probes valid tokens per sequence. Return (places among valid tokens, token index) [S, probes]."""
        sizes = self.bounds[sequences + 1] - self.bounds[sequences]
        places = (sizes[:, None] - 1) * np.arange(HASH.probes) // (HASH.probes - 1)
        probes = self.bounds[sequences, None] + places
        return places, probes if self.tokens is None else self.tokens[probes]


class SequenceTerms(NamedTuple):
    """Terms of each sequence [S]. `contents` and `surprise` are 0 for sequences without valid tokens."""

    levels: LevelTerms
    rows: Hashes  # from `hash_rows`
    contents: Hashes  # from `hash_contents`
    surprise: Float64s  # estimate of -log p of the sequence, where p is its probability on the rollout side


def compute_sequence_terms(
    segments: Segments, rollout: Floats, train: Floats, valid: Bools, tokens: ValidTokens
) -> SequenceTerms:
    count = len(segments)
    if not compiled_loops_in_use():
        rows = hash_rows(segments, rollout, train)
        levels = measure_levels(segments, rollout, train, valid)
        return SequenceTerms(levels, rows, *hash_contents(count, rollout, train, tokens))
    kind = np.result_type(rollout, train, np.float32)
    sums, rows = np.empty((count, len(LevelTerms._fields))), np.empty(count, np.uint64)
    contents, surprise = np.zeros(count, np.uint64), np.zeros(count)
    scan_sequences(
        *(np.ascontiguousarray(values, kind) for values in (rollout, train)),
        np.ascontiguousarray(valid).view(np.uint8), segments.offsets, LEVEL_CAP,
        np.zeros(0, np.int64) if tokens.tokens is None else tokens.tokens, tokens.bounds,
        np.empty(2 * HASH.probes), sums, rows, contents, surprise,
    )  # fmt: skip
    return SequenceTerms(_split_sums(sums), rows, contents, surprise)


def measure_levels(segments: Segments, rollout: Floats, train: Floats, valid: Bools) -> LevelTerms:
    sums = np.empty((len(segments), len(LevelTerms._fields)))
    for start, stop in segments.blocks(_PIECE_TOKENS):
        tokens = slice(*segments.offsets[[start, stop]])
        own = Segments(segments.offsets[start : stop + 1] - tokens.start)
        sums[start:stop] = _sum_level_terms(own, rollout[tokens], train[tokens], valid[tokens]).T
    return _split_sums(sums)


def _split_sums(sums: Float64s) -> LevelTerms:
    return LevelTerms(*sums[:, :2].T.astype(np.int64), *sums[:, 2:].T)


def _sum_level_terms(segments: Segments, rollout: Floats, train: Floats, valid: Bools) -> Float64s:
    """Compute the four sums of LevelTerms for S sequences in numpy [4, S]."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(np.subtract(train, rollout, dtype=np.float64))
        prob = np.exp(np.minimum(train, 0.0, dtype=np.float64))
    finite = valid & np.isfinite(size)
    terms = (
        finite,
        valid & (rollout == train),
        np.where(finite, np.minimum(size, LEVEL_CAP), 0.0),
        np.where(finite, prob, 0.0),
    )
    return np.stack([segments.sum(values) for values in terms])


def hash_rows(segments: Segments, rollout: Floats, train: Floats) -> Hashes:
    """Hash each sequence by its length and by the log-probs of HASH.row_probes tokens, which may be masked."""
    hashes = segments.lengths.astype(np.uint64)
    some = np.flatnonzero(segments.nonempty)
    last, found = segments.lengths[some] - 1, hashes[some]
    tokens = segments.offsets[some, None] + last[:, None] * np.arange(HASH.row_probes) // (HASH.row_probes - 1)
    with np.errstate(invalid="ignore"):  # padding may contain signaling NaNs
        both = [(values.take(tokens.T) + 0.0).astype(np.float64) for values in (rollout, train)]
    for own, other in zip(*(values.view(np.uint64) for values in both), strict=True):
        found = mix_hashes(mix_hashes(found, own), other)
    hashes[some] = found
    return hashes


def hash_contents(count: int, rollout: Floats, train: Floats, tokens: ValidTokens) -> tuple[Hashes, Float64s]:
    """Hash each of `count` sequences by its number of valid tokens and by the log-probs of HASH.probes of them.

    Return the hashes, and the surprise of each sequence: the sum of -log p over its tokens, estimated from the probes.
    """
    hashes, surprise = np.zeros(count, np.uint64), np.zeros(count)
    counts = tokens.counts
    some, kind = np.flatnonzero(counts), np.result_type(rollout, train, np.float32)
    salts = np.arange(2 * HASH.probes, dtype=np.uint64).reshape(2, 1, HASH.probes)
    for start in range(0, len(some), _PIECE_SEQUENCES):
        piece = some[start : start + _PIECE_SEQUENCES]
        sizes, (places, index) = counts[piece], tokens.probe(piece)
        with np.errstate(invalid="ignore"):
            both = np.stack([values.take(index) for values in (rollout, train)])
            both = np.clip(both, -HASH.bound, HASH.bound, dtype=kind)
        both[np.isnan(both)] = 0.0
        coarse, fresh = np.rint(both * HASH.steps), np.diff(places, axis=1, prepend=-1) > 0
        informative = ((np.abs(coarse[0]) > 1) & fresh).sum(axis=1) >= HASH.informative
        probed = np.where(informative[:, None], coarse, both).astype(np.float64) + 0.0
        mixed = mix_hashes(probed.view(np.uint64), salts).sum(axis=(0, 2), dtype=np.uint64)
        hashes[piece] = mix_hashes(mixed, sizes.astype(np.uint64))
        surprise[piece] = -np.maximum(both[0], HASH.most_surprised).mean(axis=1, dtype=np.float64) * sizes
    return hashes, surprise
