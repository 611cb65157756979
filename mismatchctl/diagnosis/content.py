"""Describe the rows of a run: repeated sequences, masked tokens, clipped values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Ints
from mismatchctl.data.blocks import Rows
from mismatchctl.measure.sums import Hashes, hash_content, hash_values, mix_hashes
from mismatchctl.results.model import Finding, RunContent

IDENTITY_COLUMNS = ("model", "engine")
_PROBES = 16
_MOST_ROWS = 1 << 20
_HASHED_AT_ONCE = 1 << 11
"""Number of sequences to hash in one numpy call, so that their log-probs fit in the CPU cache."""
_MOST_NAMES = 8
_VOCABULARY_BINS = 64

RECORDING_DOUBTS = frozenset({
    "clamped", "wrong_log_base", "probabilities_not_logs", "cumulative", "sequence_means", "constant_column",
    "unmasked_padding", "log_densities", "wrong_sign", "packed_columns", "length_mismatch",
})  # fmt: skip
"""Causes that mean that a column has the wrong content, such as probabilities instead of log-probs."""


@dataclass(frozen=True)
class SequenceHashes:
    """Hashes of a run's sequences. Equal hashes mean repeated sequences. A large run stores only its lowest hashes."""

    parts: tuple[tuple[Hashes, Ints, Ints, Ints], ...] = ()  # per sequence [S]: hash, number of valid tokens, file, row
    total: int = 0  # number of sequences with valid tokens
    tokens: int = 0
    responses: int = 0  # sum of the hashes of all responses' token ids, modulo 2^64
    identified: int = 0  # number of sequences with token ids
    models: frozenset[str] = field(default_factory=frozenset)
    engines: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, rows: Rows) -> SequenceHashes:
        index = None if rows.mask.all() else np.flatnonzero(rows.mask)
        offsets = rows.segments.offsets
        bounds = offsets if index is None else np.searchsorted(index, offsets)
        counts = np.diff(bounds)
        some = np.flatnonzero(counts)
        sizes = counts[some]

        def probe(piece: slice) -> tuple[Ints, Ints]:
            places = (sizes[piece, None] - 1) * np.arange(_PROBES) // (_PROBES - 1)
            tokens = bounds[some[piece], None] + places
            return places, tokens if index is None else index[tokens]

        pieces = [slice(start, start + _HASHED_AT_ONCE) for start in range(0, max(len(some), 1), _HASHED_AT_ONCE)]
        hashes = np.concatenate([_hash_sequences(rows, some[piece], sizes[piece], *probe(piece)) for piece in pieces])
        responses, identified = 0, 0
        if "token_ids" in rows.extra_columns:
            responses, identified = _hash_responses(rows, some, sizes, probe(slice(None))[1])
        own = hashes, sizes.astype(np.int64), rows.file[some], rows.rows[some]
        models, engines = (_read_names(rows, column) for column in IDENTITY_COLUMNS)
        return cls((own,), len(some), int(sizes.sum()), responses, identified, models, engines)

    def __add__(self, other: SequenceHashes) -> SequenceHashes:
        both = SequenceHashes(
            (*self.parts, *other.parts), self.total + other.total, self.tokens + other.tokens,
            (self.responses + other.responses) % (1 << 64), self.identified + other.identified,
            self.models | other.models, self.engines | other.engines,
        )  # fmt: skip
        held = sum(len(part[0]) for part in both.parts)
        return replace(both, parts=(both.lowest,)) if held > 2 * _MOST_ROWS else both

    @cached_property
    def lowest(self) -> tuple[Hashes, Ints, Ints, Ints]:
        hashes, sizes, file, row = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        order = np.lexsort((row, file, hashes))[:_MOST_ROWS]
        return hashes[order], sizes[order], file[order], row[order]


def _hash_sequences(rows: Rows, some: Ints, sizes: Ints, places: Ints, tokens: Ints) -> Hashes:
    """Hash each sequence by its number of valid tokens and by the log-probs of 16 of them.

    A sampler may repeat a short sequence of likely tokens by chance, so its hash also includes the ids of the row.
    """
    kind = np.result_type(rows.rollout, rows.train, np.float32)
    with np.errstate(invalid="ignore"):
        both = np.clip(np.stack([values.take(tokens) for values in (rows.rollout, rows.train)]), -1e4, 1e4, dtype=kind)
    both[np.isnan(both)] = 0.0
    # round to 1/128 nat, so that two copies with differently rounded log-probs have the same hash
    coarse, fresh = np.rint(both * 128), np.diff(places, axis=1, prepend=-1) > 0
    informative = ((np.abs(coarse[0]) > 1) & fresh).sum(axis=1) >= 6
    probed = np.where(informative[:, None], coarse, both).astype(np.float64) + 0.0
    salts = np.arange(2 * _PROBES, dtype=np.uint64).reshape(2, 1, _PROBES)  # one call is faster than one per token
    hashes = mix_hashes(probed.view(np.uint64), salts).sum(axis=(0, 2), dtype=np.uint64)
    hashes = mix_hashes(hashes, sizes.astype(np.uint64))
    surprise = -np.maximum(both[0], -50.0).mean(axis=1, dtype=np.float64) * sizes
    common = np.flatnonzero(surprise <= 14.0)  # in nats. Less probable sequences are never sampled twice
    del both, coarse, probed  # free memory before hashing the ids
    if len(common):
        hashes[common] = mix_hashes(hashes[common], _hash_ids(rows, some[common]))
    return hashes


def _hash_ids(rows: Rows, chosen: Ints) -> Hashes:
    """Hash the step, prompt id and sequence id of rows. Without a sequence id, hash file and row number instead."""
    ids = rows.columns.get("sequence_id")
    place = hash_content([rows.file[chosen].astype(np.float64), rows.rows[chosen].astype(np.float64)])
    if ids is None:
        return place
    found = hash_values(ids[chosen])
    for name in ("step", "prompt_id"):
        if name in rows.columns:
            found = mix_hashes(found, hash_values(rows.columns[name][chosen]))
    missing = np.array([value is None or value != value for value in ids[chosen].tolist()], np.bool_)
    return np.where(missing, place, found)


def _hash_responses(rows: Rows, some: Ints, sizes: Ints, tokens: Ints) -> tuple[int, int]:
    """Hash each response by its length and token ids. Return the sum of the hashes, and the number of responses."""
    ids = rows.extra_columns.get("token_ids")
    if ids is None or ids.ndim != 1 or not len(some):
        return 0, 0
    if ids.dtype.kind == "f" and not np.isfinite(ids).all():
        return 0, 0
    valid = ids if rows.mask.all() else ids * rows.mask
    sums = np.add.reduceat(valid, rows.segments.offsets[some], dtype=np.float64)
    hashes = hash_content([sizes.astype(np.float64), sums, *ids[tokens.T].astype(np.float64)])
    return int(hashes.sum(dtype=np.uint64)), len(some)


def _read_names(rows: Rows, column: str) -> frozenset[str]:
    values = set(rows.columns[column].tolist()) if column in rows.columns else set()
    names = sorted({str(value) for value in values if value is not None and value == value})
    return frozenset(names[: 2 * _MOST_NAMES])


def describe_content(
    known: SequenceHashes, sample: Rows | None, files: Mapping[int, str], findings: Sequence[Finding]
) -> RunContent:
    hashes, sizes, file, row = known.lowest
    again = np.zeros(len(hashes), bool)
    again[1:] = hashes[1:] == hashes[:-1]
    scale = known.total / max(len(hashes), 1)
    example = ""
    if again.any():
        second = int(np.flatnonzero(again)[0])
        first = int(np.searchsorted(hashes, hashes[second]))
        example = f"row {row[second]} of {files[file[second]]} repeats row {row[first]} of {files[file[first]]}"
    found = RunContent(
        sequences=known.total,
        tokens=known.tokens,
        repeated=round(float(again.sum()) * scale),
        repeated_tokens=round(float(sizes[again].sum()) * scale),
        example=example,
        doubts=sorted({
            finding.cause for finding in findings if finding.confidence == "high" and finding.cause in RECORDING_DOUBTS
        }),
        responses=f"{known.responses:016x}" if known.identified and known.identified == known.total else "",
        models=sorted(known.models)[:_MOST_NAMES],
        engines=sorted(known.engines)[:_MOST_NAMES],
    )  # fmt: skip
    return found if sample is None else found.model_copy(update=_describe_tokens(sample))


def _describe_tokens(rows: Rows) -> dict[str, float | int | list[int]]:
    rollout, train = (values.astype(np.float64) for values in (rows.rollout, rows.train))
    finite = np.isfinite(rollout) & np.isfinite(train)
    scored = finite & (rollout < 0) & (train < 0)
    valid, hidden = rows.mask & finite, scored & ~rows.mask
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.minimum(np.abs(train - rollout), 1e4)
    shown, masked = gap[valid], gap[hidden]
    found: dict[str, float | int | list[int]] = {"holes": _measure_holes(rows)}
    if len(shown):
        found["shown_abs_diff"] = float(np.minimum(shown, 1.0).mean())
        (r, t), largest = (rollout[valid], train[valid]), float(shown.max())
        ends = shown >= largest * (1 - 1e-4), (r == r.min()) & (t == t.min()) & (r == t)
        found["clipped"] = max(_share_unless_chance(ends[0]) if largest > 0 else 0.0, _share_unless_chance(ends[1]))
    if len(masked):
        found["hidden"] = len(masked) / (len(masked) + len(shown))
        found["hidden_abs_diff"] = float(np.minimum(masked, 1.0).mean())
        if len(shown):
            found["loud"] = float((masked > np.quantile(shown, 0.999)).mean())
    ids = rows.extra_columns.get("token_ids")
    if ids is not None and ids.ndim == 1 and len(own := ids[valid]) and np.isfinite(own).all():
        whole = own.astype(np.int64)
        found["id_p95"] = int(np.quantile(whole, 0.95))
        found["vocabulary"] = np.bincount(whole % _VOCABULARY_BINS, minlength=_VOCABULARY_BINS).tolist()
    return found


def _measure_holes(rows: Rows) -> float:
    """Return the share of masked tokens among the tokens between the first and the last valid token of each row."""
    index = np.flatnonzero(rows.mask)
    bounds = np.searchsorted(index, rows.segments.offsets)
    some = np.flatnonzero(np.diff(bounds))
    if not len(some):
        return 0.0
    span = index[bounds[some + 1] - 1] - index[bounds[some]] + 1
    return 1.0 - len(index) / float(span.sum())


def _share_unless_chance(at: NDArray[np.bool_]) -> float:
    count = int(at.sum())
    return count / len(at) if count >= max(10, 1e-3 * len(at)) else 0.0
