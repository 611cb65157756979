"""Corrections on log-probs in memory: padded arrays, nested tensors or lists of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Floats, Segments, TokenBatch
from mismatchctl.core.formatting import format_label
from mismatchctl.core.ratios import Ratios, compute_ratios
from mismatchctl.core.schema import MIN_LOG_PROB, POSITIVE_TOLERANCE
from mismatchctl.corrections.application import CorrectedBlock, apply_correction, normalization_divisor
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, kind_of

Values = Any
"""Array or tensor [B, T], nested tensor, or list of rows."""


@dataclass(frozen=True)
class TensorLayout:
    """Values per token as the caller gave them, split into one row per sequence."""

    rows: tuple[NDArray[Any], ...]  # values of each row
    original: Values  # the values as given, whose library, dtype and device `restore` uses
    padded: NDArray[Any] | None = None  # all rows [B, T] if they are padded

    @classmethod
    def from_values(cls, values: Values, name: str = "values") -> TensorLayout:
        if isinstance(values, (str, bytes, Mapping)) or not (hasattr(values, "__iter__") or hasattr(values, "shape")):
            raise ConfigError(f"{name}: expected an array or tensor [B, T], or a list of rows, found {kind_of(values)}")
        nested = getattr(values, "is_nested", False)
        shape = None if nested else getattr(values, "shape", None)  # lists have no shape
        whole = _to_numpy(values) if shape is not None and len(shape) == 2 else None
        single = shape is not None and len(shape) == 0
        rows = tuple(() if single else values.unbind() if nested else values if whole is None else whole)
        if any(isinstance(each, np.ma.MaskedArray) for each in (values, *rows)):
            unread = "the mask of a masked array is not read: pass the array's data, and the valid positions as mask"
            raise ConfigError(f"{name}: {unread}")
        made = tuple(map(_to_numpy, rows))
        if single or (made and made[0].ndim == 0):
            raise ConfigError(f"{name}: expected an array [B, T] or a list of rows, found a single row")
        for row in made:
            if row.ndim != 1 or row.dtype.kind not in "fiubO":
                what = f"shape {row.shape}" if row.ndim != 1 else f"{row.dtype}"
                raise ConfigError(f"{name}: expected a row of one number per position, found {what}")
        return cls(made, values, whole)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def flat(self) -> NDArray[Any]:
        return np.concatenate([np.zeros(0), *self.rows]) if self.padded is None else self.padded.reshape(-1)

    def restore(self, flat: NDArray[Any]) -> Values:
        """Convert one value per position to the layout, dtype and device of `original`. Booleans stay booleans."""
        nested = getattr(self.original, "is_nested", False)
        if not nested and len(getattr(self.original, "shape", ())) == 2:
            return _to_library(self.original, flat.reshape(tuple(self.original.shape)))
        parts = np.split(flat, np.cumsum(self.lengths)[:-1]) if self.rows else []
        library = _library_of(self.original)
        if library == "pandas":
            return type(self.original)(parts, index=self.original.index)
        if library == "polars":
            return type(self.original)(self.original.name, [part.tolist() for part in parts])
        if library == "pyarrow":
            import pyarrow as pa

            return pa.array([part.tolist() for part in parts])
        sample: Any = self.original.unbind()[0] if nested else self.original
        if not hasattr(sample, "dtype"):
            sample = self.original[0] if len(self.original) else []
        if not hasattr(sample, "dtype"):
            return [part.tolist() for part in parts]
        own = [_to_library(sample, part) for part in parts]
        if nested:
            import torch

            return torch.nested.nested_tensor(own, layout=self.original.layout)
        return own


def _library_of(values: Any) -> str:
    return type(values).__module__.partition(".")[0]


def _to_library(sample: Any, values: NDArray[Any]) -> Any:
    flags = values.dtype == np.bool_
    if _library_of(sample) != "torch":
        return values.astype(sample.dtype) if not flags and np.issubdtype(sample.dtype, np.floating) else values
    import torch

    made = torch.from_numpy(np.ascontiguousarray(values))
    own = sample.dtype if not flags and sample.is_floating_point() else made.dtype
    return made.to(device=sample.device, dtype=own)


def _to_numpy(row: Any) -> NDArray[Any]:
    if hasattr(row, "detach"):
        if row.is_meta:
            raise ConfigError("a tensor on the device 'meta' has no values; pass a tensor with values")
        row = row.detach().cpu()
        row = row.to_dense() if row.is_sparse else row
        row = (row.float() if row.is_floating_point() and row.element_size() < 4 else row).numpy()
    return np.asarray(row)


@dataclass(frozen=True)
class TensorBatch:
    """Log-probs of several sequences with their mask."""

    layout: TensorLayout
    mask: NDArray[np.bool_]
    batch: TokenBatch

    @classmethod
    def from_values(
        cls,
        rollout: Values,
        train: Values,
        mask: Values = None,
        current: Values = None,
        advantages: Values = None,
        age: Any = None,
    ) -> TensorBatch:
        layout = TensorLayout.from_values(train, "train")
        columns = {"rollout": rollout, "current": current, "advantages": advantages, "mask": mask}
        flat: dict[str, Any] = {"train": layout.flat()}
        for name, values in columns.items():
            if values is None and name != "rollout":
                continue
            own = TensorLayout.from_values(_expand_advantages(values, layout) if name == "advantages" else values, name)
            if own.lengths != layout.lengths:
                raise DataError(f"row lengths differ: {name} has {own.lengths[:3]}, train has {layout.lengths[:3]}")
            flat[name] = own.flat()
        valid = _valid_flags(flat["mask"]) if "mask" in flat else np.ones(len(flat["train"]), np.bool_)
        rows = Segments.from_lengths(layout.lengths)
        segments, places = (rows, None) if valid.all() else _valid_positions(rows, valid)
        flat.pop("mask", None)
        taken = {
            name: _to_floats(values if places is None else values.take(places), name) for name, values in flat.items()
        }
        for name in ("rollout", "train", "current"):
            if name in taken:
                _check_log_probs(taken[name], name)
        positions = None if places is None else places - segments.spread(rows.offsets[:-1])
        batch = TokenBatch(
            segments, taken["rollout"], taken["train"], taken.get("current"), positions,
            taken.get("advantages"), _version_columns(age, len(rows)), rows=np.arange(len(rows)),
        )  # fmt: skip
        return cls(layout, valid, batch)

    def restore(self, values: NDArray[Any]) -> Values:
        """Return the values of valid tokens in the layout of the caller, with 0 at masked positions."""
        if len(values) == len(self.mask):
            return self.layout.restore(values)
        full = np.zeros(len(self.mask), values.dtype)
        full[self.mask] = values
        return self.layout.restore(full)

    @property
    def ratios(self) -> Ratios:
        """Return the ratios of train to rollout probability. Tokens with train probability 0 are left out."""
        batch, possible = self.batch, self.batch.train > -np.inf
        if possible.all():
            return Ratios(batch.train, batch.rollout, batch.segments)
        segments, _ = _valid_positions(batch.segments, possible)
        return Ratios(batch.train[possible], batch.rollout[possible], segments)

    def apply(self, correction: Correction) -> CorrectedBlock:
        for column in self.batch.missing_columns(correction.needed_columns):
            what = {"current_log_probs": "current", "advantages": "advantages"}.get(column, "age")
            raise ConfigError(f"correction {correction.name} uses {column}; pass the argument {what}")
        return apply_correction(correction, compute_ratios(self.batch, correction.sources), self.batch)


def normalize_weights(correction: Correction, block: CorrectedBlock, groups: Sequence[NDArray[np.int64]]) -> Float64s:
    """Return bounded weights of valid tokens. If `normalize` is set, divide them by the mean of each group of rows."""
    weights, rule = block.token_weights(), correction.weight
    if rule is None or rule.normalize == "none":
        return weights
    segments = block.kept.segments
    for rows in groups:
        whole = len(rows) == len(segments)
        members, own = (slice(None), segments) if whole else (segments.token_indices(rows), segments.take(rows))
        if not own.tokens:
            continue
        values = weights[members]
        counted = own.nonempty if rule.normalize_empty == "skip" else slice(None)
        mean = values.mean() if rule.normalize == "token" else own.mean(values)[counted].mean()
        weights[members] = values / normalization_divisor(mean)
    return weights


def list_micro_batches(micro_batches: Any, rows: int) -> list[NDArray[np.int64]]:
    """Return row indices per micro-batch. `micro_batches`: rows per micro-batch, one name per row, or `None` (all)."""
    if micro_batches is None:
        return [np.arange(rows)]
    if isinstance(micro_batches, (int, np.integer)) and micro_batches > 0:
        return [np.arange(start, min(start + micro_batches, rows)) for start in range(0, rows, micro_batches)]
    names = _to_numpy(micro_batches)
    if names.shape != (rows,):
        raise ConfigError(
            "micro_batches: expected the number of rows per micro-batch (not the number of micro-batches), or one name "
            f"for each of the {rows} rows"
        )
    return [np.flatnonzero(names == name) for name in dict.fromkeys(names.tolist())]


def _version_columns(age: Any, rows: int) -> dict[str, NDArray[Any]]:
    if age is None:
        return {}
    ages = _to_floats(_to_numpy(age), "age")
    if ages.shape not in ((), (rows,)):
        raise DataError(f"age has the shape {ages.shape}, expected ({rows},) (one number per row)")
    return {"train_version": np.broadcast_to(ages, (rows,)), "rollout_version": np.zeros(rows)}


def _valid_positions(rows: Segments, valid: NDArray[np.bool_]) -> tuple[Segments, NDArray[np.int64]]:
    places = np.flatnonzero(valid)
    return Segments(np.searchsorted(places, rows.offsets)), places


def _valid_flags(mask: NDArray[Any]) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = mask != 0
    if mask.dtype != np.bool_ and not np.array_equal(valid, mask == 1):
        other = mask[valid & (mask != 1)].tolist()[0]
        found = "None" if other is None else format_label(other)
        raise DataError(f"mask must contain only 0 and 1 (or false and true), found {found}")
    return valid


def _check_log_probs(values: Floats, name: str) -> None:
    """Raise an error for values that are not log-probs. A train log-prob of -inf (probability 0) is allowed."""
    if name == "train":
        values = values[values != -np.inf]
    if len(values) == 0:
        return
    least, most = float(values.min()), float(values.max())
    if least >= MIN_LOG_PROB and most <= POSITIVE_TOLERANCE:
        return
    if not np.isfinite(values).all():
        raise DataError(f"{name} is NaN or infinite at a valid token", remedy="mask this token")
    worst = most if most > POSITIVE_TOLERANCE else least
    what = "log-probs must not be above 0" if worst > 0 else "no policy gives such a log-prob"
    raise DataError(
        f"{name} is {worst:.6g} at a valid token: {what}", remedy="pass log-probs, and mask all other values"
    )


def _to_floats(values: NDArray[Any], name: str) -> Floats:
    if values.dtype.kind == "f":
        return values
    try:
        return values.astype(np.float64, casting="unsafe" if values.dtype.kind == "O" else "same_kind")
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: expected numbers, found values of type {values.dtype}") from None


def _expand_advantages(values: Values, layout: TensorLayout) -> Values:
    shape = getattr(values, "shape", None)
    scalars = _to_numpy(values) if shape is not None and len(shape) == 1 else None
    if scalars is not None and scalars.dtype.kind == "O":  # each element is a row
        return values
    if isinstance(values, (list, tuple)) and len(values) and np.ndim(values[0]) == 0:
        scalars = np.asarray(values)
    if scalars is None:
        return values
    if len(scalars) != len(layout.rows):
        raise DataError(f"advantages has {len(scalars)} values, expected {len(layout.rows)} (one per row)")
    return [np.full(length, value) for length, value in zip(layout.lengths, scalars, strict=True)]
