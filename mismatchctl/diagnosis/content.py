"""Describe the rows of a run: repeated sequences, masked tokens, clipped values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Ints
from mismatchctl.data.blocks import Rows
from mismatchctl.measure.sequence_terms import SequenceTerms, ValidTokens
from mismatchctl.measure.sums import Hashes, hash_content, hash_values, mix_hashes, sort_by_hash
from mismatchctl.results.model import Finding, RunContent

IDENTITY_COLUMNS = ("model", "engine")
_MOST_ROWS = 1 << 20
_HASHED_AT_ONCE = 1 << 14  # number of rows whose ids are hashed at a time, to save memory
_COMMON_SURPRISE = 14.0  # highest surprise (minus log-prob, in nats) of a sequence that may be sampled twice by chance
_MOST_NAMES = 8
_VOCABULARY_BINS = 64

RECORDING_DOUBTS = frozenset({
    "clamped", "wrong_log_base", "probabilities_not_logs", "cumulative", "sequence_means", "constant_column",
    "unmasked_padding", "log_densities", "wrong_sign", "packed_columns", "length_mismatch",
})  # fmt: skip
"""Causes that mean that a column has the wrong content, such as probabilities instead of log-probs."""


@dataclass(frozen=True)
class SequenceHashes:
    """Hashes of a run's sequences, to find repeated sequences. Large runs keep the lowest hashes as a sample."""

    parts: tuple[tuple[Hashes, Ints, Ints, Ints], ...] = ()  # per sequence [S]: hash, number of valid tokens, file, row
    total: int = 0  # number of sequences with valid tokens
    tokens: int = 0
    responses: int = 0  # sum of the hashes of all responses' token ids, modulo 2^64
    identified: int = 0  # number of sequences with token ids
    models: frozenset[str] = field(default_factory=frozenset)
    engines: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, rows: Rows, tokens: ValidTokens, terms: SequenceTerms) -> SequenceHashes:
        some = np.flatnonzero(tokens.counts)
        hashes, sizes = terms.contents[some], tokens.counts[some]
        # A sampler may repeat a short sequence of likely tokens by chance, so its hash also includes the row's ids.
        common = np.flatnonzero(terms.surprise[some] <= _COMMON_SURPRISE)
        for start in range(0, len(common), _HASHED_AT_ONCE):
            piece = common[start : start + _HASHED_AT_ONCE]
            hashes[piece] = mix_hashes(hashes[piece], _hash_ids(rows, some[piece]))
        responses, identified = 0, 0
        if "token_ids" in rows.extra_columns:
            responses, identified = _hash_responses(rows, some, sizes, tokens.probe(some)[1])
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
        order = sort_by_hash(hashes, file, row)[:_MOST_ROWS]
        return hashes[order], sizes[order], file[order], row[order]


def _hash_ids(rows: Rows, chosen: Ints) -> Hashes:
    """Hash the step, prompt id and sequence id of each row. Rows without a sequence id: hash file and row number."""
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
    """Hash the length, the sum of token ids and some token ids of each response. Return sum and count of hashes."""
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
    """Return the share of masked tokens in the ranges from each row's first to its last valid token."""
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
