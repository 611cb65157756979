"""Values per token on a device: torch tensors that numpy's functions understand.

What is done with tokens (ratios, rules, losses, their columns) is written once, in numpy. A `DeviceArray` answers
numpy's protocols for operators and functions (NEP 13 and NEP 18) with torch's, so that the same lines run on a device.
Values per sequence are numpy's own. Nothing is copied unasked: an array on the host and one on a device do not mix.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from torch import Tensor

from mismatchctl.batch import Float64s, Ints, Segments


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on a device, on the current stream, which the host does not wait for.

    It is made from page-locked memory, which torch lends again once the copy from it is done.
    """
    buffer = torch.empty(values.shape, dtype=_torch_dtype(values.dtype), pin_memory=device.type == "cuda")
    np.copyto(buffer.numpy(), values)
    return buffer.to(device, non_blocking=True)


def to_host(values: Tensor) -> NDArray[Any]:
    """A copy on the host, waited for."""
    copied: NDArray[Any] = values.cpu().numpy()
    return copied


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


class DeviceArray(NDArrayOperatorsMixin):
    """Values per token [T] on a device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[DeviceArray] | None = None, **options: Any
    ) -> Any:
        if method != "__call__" or options or ufunc not in _UFUNCS:
            return NotImplemented
        found = _UFUNCS[ufunc](*map(_operand, inputs))
        if out is None:
            return DeviceArray(found)
        out[0].tensor.copy_(found)
        return out[0]

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        if function not in _FUNCTIONS:
            return NotImplemented
        found = _FUNCTIONS[function](*map(_operand, inputs), **{name: _operand(own) for name, own in options.items()})
        return DeviceArray(found) if isinstance(found, Tensor) else found

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, tokens: Ints) -> NDArray[Any]:
        """The values of some tokens, on the host."""
        return to_host(self.tensor[to_device(tokens, self.tensor.device)])

    @property
    def dtype(self) -> np.dtype[Any]:
        """As numpy names it."""
        return np.dtype(torch.empty(0, dtype=self.tensor.dtype).numpy().dtype)

    def astype(self, dtype: Any) -> DeviceArray:
        """The values in another dtype of numpy's."""
        return DeviceArray(self.tensor.to(_torch_dtype(dtype)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The values on the host."""
        return to_host(self.tensor)

    def any(self) -> bool:
        """Whether one of them is true."""
        return bool(self.tensor.any())

    def sum(self) -> float:
        """Their sum, in their own dtype."""
        return float(self.tensor.sum())


def _operand(value: Any) -> Any:
    """What torch is given for an operand of numpy's."""
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("an array on the host met one on a device")
    return value.tensor if isinstance(value, DeviceArray) else value


def _where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """Two numbers make doubles, as numpy's do: torch's own would be of its default type."""
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        one = torch.as_tensor(one, dtype=torch.float64, device=condition.device)
    return torch.where(condition, one, other)


def _copy_where(into: Tensor, values: Tensor, where: Tensor) -> None:
    into.copy_(torch.where(where, values, into))


def _nonzero(values: Tensor) -> NDArray[Any]:
    """Where tokens are chosen, on the host."""
    return to_host(values.nonzero()[:, 0])


_UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul, np.power: operator.pow,
    np.negative: operator.neg, np.absolute: torch.abs, np.exp: torch.exp, np.expm1: torch.expm1, np.log1p: torch.log1p,
    np.divide: operator.truediv, np.log: torch.log, np.sign: torch.sign,
    np.isnan: torch.isnan, np.isfinite: torch.isfinite,
    np.minimum: lambda values, bound: torch.clamp(values, max=bound),
    np.maximum: lambda values, bound: torch.clamp(values, min=bound),
    np.less: operator.lt, np.less_equal: operator.le, np.greater: operator.gt, np.greater_equal: operator.ge,
    np.equal: operator.eq, np.not_equal: operator.ne,
    np.bitwise_and: operator.and_, np.bitwise_or: operator.or_, np.invert: torch.logical_not,
}  # fmt: skip
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.clip: torch.clamp,
    np.copyto: _copy_where,
    np.zeros_like: lambda values, dtype: torch.zeros_like(values, dtype=_torch_dtype(dtype)),
    np.diff: torch.diff,
    np.flatnonzero: _nonzero,
}


@dataclass(frozen=True)
class DeviceSegments(Segments):
    """Segments whose tokens are on a device: what is per token is a DeviceArray, what is per segment is numpy's."""

    device: torch.device

    @cached_property
    def _counts(self) -> Tensor:
        return to_device(self.lengths, self.device)

    @cached_property
    def places(self) -> Ints:
        """Place of each token in its segment, [T]."""
        return cast(Ints, DeviceArray(torch.arange(self.tokens, device=self.device)) - self.spread(self.offsets[:-1]))

    def from_host(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values per token [T] that were made by numpy, where the tokens are."""
        return as_array(to_device(values, self.device))

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeat each segment's value [S] over its tokens, [T]."""
        own = to_device(values, self.device)
        return as_array(torch.repeat_interleave(own, self._counts, output_size=self.tokens))

    def _reduce(self, ufunc: np.ufunc, values: NDArray[Any], empty: float, dtype: type | None) -> Float64s:
        return to_host(segment_reduce(tensor_of(values), _REDUCTIONS[ufunc], self._counts, empty))


_REDUCTIONS: dict[Any, str] = {np.add: "sum", np.minimum: "min", np.maximum: "max"}


def segment_reduce(values: Tensor, reduction: str, lengths: Tensor, empty: float = 0.0) -> Tensor:
    """Sum, min or max in float64 over adjacent stretches; the same in every run, unlike sums that threads race to."""
    doubles = values.to(torch.float64)
    reduced: Tensor = torch.segment_reduce(doubles, reduction, lengths=lengths, initial=empty, unsafe=True)  # type: ignore[no-untyped-call, unused-ignore]
    return reduced


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor for code that is written for numpy."""
    return cast("NDArray[Any]", DeviceArray(tensor))


def tensor_of(values: NDArray[Any]) -> Tensor:
    """The tensor behind values that are on a device."""
    tensor: Tensor = _operand(values)
    return tensor
