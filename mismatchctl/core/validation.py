"""Pydantic models without NaN and infinity. Optional fields with such a value become null."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from mismatchctl.errors import suggestion

if TYPE_CHECKING:
    import polars as pl
    from pydantic import ValidationError

_EXPECTED_VALUES = {
    "float": "takes a number", "finite": "takes a finite number", "int": "takes a whole number",
    "bool": "takes true or false", "string": "takes text", "tuple": "takes a list", "list": "takes a list",
    "model": "takes keys and values", "dict": "takes keys and values", "missing": "is missing",
}  # fmt: skip
"""Maps the start of a pydantic error type, such as `float` in `float_parsing`, to what the field expects."""
_SIZE_LIMITS = {
    "string_too_short": "must not be empty", "string_too_long": "may have {max_length} characters at most",
    "too_long": "takes a list of {max_length} values",
}  # fmt: skip


def explain_error(error: ValidationError, model: type[BaseModel], most: int | None = None) -> str:
    """Describe the first `most` validation errors (default: all) in one line."""
    return "; ".join(_explain_problem(problem, model) for problem in error.errors()[:most])


def _explain_problem(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    place, key = format_field_path(problem), str((problem["loc"] or ("",))[-1])
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key {place!r}{suggestion(key, find_owner(model, problem['loc'][:-1]).model_fields)}"
    if problem["type"] == "value_error":
        return f"{place}: {describe_expected(problem)}" if place else describe_expected(problem)
    found = "" if problem["type"] == "missing" else f", found {_format_value(problem['input'])}"
    return f"{place or 'the value'} {describe_expected(problem)}{found}"


def format_field_path(problem: Mapping[str, Any]) -> str:
    return ".".join(str(part) for part in problem["loc"] if part != "[key]")


def describe_expected(problem: Mapping[str, Any]) -> str:
    kind = str(problem["type"])
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind in _SIZE_LIMITS:
        return _SIZE_LIMITS[kind].format(**problem["ctx"])
    return _EXPECTED_VALUES.get(kind.partition("_")[0]) or f"must {str(problem['msg']).removeprefix('Input should ')}"


def find_owner(model: type[BaseModel], place: Sequence[str | int]) -> type[BaseModel]:
    for part in place:
        field = model.model_fields.get(str(part))
        model = next(_nested_models(field.annotation), model) if field is not None else model
    return model


def _nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if hasattr(annotation, "model_fields"):
        yield annotation
    for inner in get_args(annotation):
        yield from _nested_models(inner)


def _format_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} values"
    return "keys and values" if isinstance(value, Mapping) else repr(value)


OVERFLOW_STATUS = "overflow: not a finite number"
LARGEST_SUM = 1e300
"""Value stored for a sum that overflowed. A few more operations with it do not overflow."""


def cap_sum(value: float) -> float:
    """Limit a sum to +-LARGEST_SUM. NaN, which an overflow can also give, becomes LARGEST_SUM."""
    return LARGEST_SUM if math.isnan(value) else float(min(max(value, -LARGEST_SUM), LARGEST_SUM))


def cap_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(np.where(np.isnan(values), LARGEST_SUM, values), -LARGEST_SUM, LARGEST_SUM)


_POWERS = np.array([float(10**power) for power in range(23)])  # powers of ten that a double represents exactly


def round_significant(values: NDArray[np.float64], digits: int) -> NDArray[np.float64]:
    """Round finite values to `digits` significant digits (at most 15), exactly as text formatting does."""
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


CappedSum = Annotated[float, BeforeValidator(cap_sum)]
"""A required number, usually a sum. If it overflowed, it is replaced by LARGEST_SUM or -LARGEST_SUM."""


def replace_nonfinite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: replace_nonfinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [replace_nonfinite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def replace_nonfinite_in_table(table: pl.LazyFrame) -> pl.LazyFrame:
    import polars as pl
    from polars import selectors

    return table.with_columns(pl.when(selectors.float().is_finite()).then(selectors.float()).name.keep())


class FiniteModel(BaseModel):
    """A pydantic model. NaN or infinity in an optional field becomes null. `status` explains a null in `value`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _absent_where_not_finite(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        gone = [name for name, value in data.items() if _is_nonfinite(value) and _is_optional(cls, name)]
        if not gone:
            return data
        known = data | dict.fromkeys(gone)
        if "status" in cls.model_fields and data.get("status", "ok") == "ok" and "value" in gone:
            known["status"] = OVERFLOW_STATUS
        return known


def _is_nonfinite(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_is_nonfinite(part) for part in value)
    return isinstance(value, float) and not math.isfinite(value)


def _is_optional(model: type[BaseModel], name: str) -> bool:
    field = model.model_fields.get(name)
    return field is not None and type(None) in getattr(field.annotation, "__args__", ())
