"""One door for numbers: what is kept is finite when it is made, or absent with a status that says why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

if TYPE_CHECKING:
    import polars as pl

OVERFLOW = "overflow: not a finite number"
LARGEST = 1e300
"""What a sum that overflowed is kept as: finite, with room for the few operations that follow."""


def capped(value: float) -> float:
    """A sum as it is kept; one that overflowed, or came of two that did, is `LARGEST`."""
    return LARGEST if math.isnan(value) else float(min(max(value, -LARGEST), LARGEST))


def capped_all(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same of each value."""
    return np.clip(np.where(np.isnan(values), LARGEST, values), -LARGEST, LARGEST)


_POWERS = np.array([float(10**power) for power in range(23)])
"""Powers of ten that a double holds exactly."""


def rounded_all(values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    """Each finite value with so many significant digits, 15 at most: the double that is nearest to that decimal.

    A whole number times or over a power of ten, both exact, is rounded once. Values so near to halfway between two
    decimals that their product might fall on the wrong side, or too small or large for it, go through text.
    """
    size: NDArray[np.float64] = np.abs(values)
    with np.errstate(all="ignore"):
        power = digits - 1 - np.floor(np.log10(size))
        scale = _POWERS[np.clip(np.where(np.isfinite(power), np.abs(power), 0), 0, 22).astype(np.int64)]
        shifted = np.where(power < 0, size / scale, size * scale)
        whole = np.rint(shifted)
        rounded: NDArray[np.float64] = np.copysign(np.where(power < 0, whole * scale, whole / scale), values)
        clear = np.abs(np.abs(shifted - whole) - 0.5) > 1e-15 * 10.0 ** (digits + 1)
        sure = (np.abs(power) <= 22) & (whole >= 10.0 ** (digits - 1)) & (whole < 10.0**digits) & clear
    rounded[values == 0] = values[values == 0]
    unsure = ~sure & (values != 0)
    rounded[unsure] = [float(f"{value:.{digits}g}") for value in values[unsure].tolist()]
    return rounded


Sum = Annotated[float, BeforeValidator(capped)]
"""A number that is never absent and may have overflowed."""


def finite(data: Any) -> Any:
    """Data of dictionaries, lists and numbers, in which what is not finite is None."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def finite_table(table: pl.LazyFrame) -> pl.LazyFrame:
    """A table in which what is not finite is null."""
    import polars as pl
    from polars import selectors

    return table.with_columns(pl.when(selectors.float().is_finite()).then(selectors.float()).name.keep())


class FiniteModel(BaseModel):
    """Data without NaN and infinity: an optional number that is neither is None, and the status says so.

    A number that cannot be absent and is not finite is an error where it is made.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _absent_where_not_finite(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        gone = [name for name, value in data.items() if _not_finite(value) and _may_be_absent(cls, name)]
        if not gone:
            return data
        known = data | dict.fromkeys(gone)
        if "status" in cls.model_fields and data.get("status", "ok") == "ok" and "value" in gone:
            known["status"] = OVERFLOW
        return known


def _not_finite(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_not_finite(part) for part in value)
    return isinstance(value, float) and not math.isfinite(value)


def _may_be_absent(model: type[BaseModel], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and type(None) in getattr(field.annotation, "__args__", ())
