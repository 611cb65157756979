"""The kernel for GPUs. It copies blocks of tokens to the GPU, and computes the sums there with torch."""

from __future__ import annotations

import itertools
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from torch import Tensor

from mismatchctl.core.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.kernels.kernel import Kernel


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Start to copy values to a GPU, and do not wait. This needs page-locked memory, so copy the values there first."""
    buffer = torch.empty(values.shape, dtype=_torch_dtype(values.dtype), pin_memory=device.type == "cuda")
    np.copyto(buffer.numpy(), values)
    return buffer.to(device, non_blocking=True)


def to_host(values: Tensor) -> NDArray[Any]:
    copied: NDArray[Any] = values.cpu().numpy()
    return copied


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


class DeviceArray(NDArrayOperatorsMixin):
    """An array on a GPU with one value per token. The numpy functions that this package uses accept it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[DeviceArray] | None = None, **options: Any
    ) -> Any:
        if method != "__call__" or options or ufunc not in _UFUNCS:
            return NotImplemented
        found = _UFUNCS[ufunc](*map(_to_operand, inputs))
        if out is None:
            return DeviceArray(found)
        out[0].tensor.copy_(found)
        return out[0]

    def __array_function__(
        self, function: Callable[..., Any], types: Sequence[type], inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        if function not in _FUNCTIONS:
            return NotImplemented
        found = _FUNCTIONS[function](
            *map(_to_operand, inputs), **{name: _to_operand(own) for name, own in options.items()}
        )
        return DeviceArray(found) if isinstance(found, Tensor) else found

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, tokens: Ints | DeviceArray) -> NDArray[Any] | DeviceArray:
        """Select values by index. A numpy index gives a numpy array, and an index on the GPU gives a DeviceArray."""
        if isinstance(tokens, DeviceArray):
            return DeviceArray(self.tensor[tokens.tensor])
        return to_host(self.tensor[to_device(tokens, self.tensor.device)])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(torch.empty(0, dtype=self.tensor.dtype).numpy().dtype)

    def astype(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.tensor.to(_torch_dtype(dtype)))

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.tensor.view(_torch_dtype(dtype)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return to_host(self.tensor)

    def any(self) -> bool:
        return bool(self.tensor.any())

    def sum(self) -> float:
        return float(self.tensor.sum())


def _to_operand(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("cannot combine an array on the host with an array on a device")
    return value.tensor if isinstance(value, DeviceArray) else value


def _where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """Select values like `np.where`. If `one` and `other` are plain numbers, the result is float64."""
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        one = torch.as_tensor(one, dtype=torch.float64, device=condition.device)
    return torch.where(condition, one, other)


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
    np.bitwise_xor: operator.xor, np.right_shift: operator.rshift,
}  # fmt: skip
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: _where,
    np.clip: torch.clamp,
    np.copyto: lambda into, values, where: into.copy_(torch.where(where, values, into)),
    np.zeros_like: lambda values, dtype: torch.zeros_like(values, dtype=_torch_dtype(dtype)),
    np.diff: torch.diff,
    np.roll: torch.roll,
    np.flatnonzero: lambda values: to_host(values.nonzero()[:, 0]),
}


@dataclass(frozen=True)
class DeviceSegments(Segments):
    """Segments whose per-token arrays are on a GPU. Per-segment arrays are numpy arrays."""

    device: torch.device

    @cached_property
    def _counts(self) -> Tensor:
        return to_device(self.lengths, self.device)

    @cached_property
    def places(self) -> Ints:
        return cast(Ints, DeviceArray(torch.arange(self.tokens, device=self.device)) - self.spread(self.offsets[:-1]))

    def from_host(self, values: NDArray[Any]) -> NDArray[Any]:
        return to_device_array(to_device(values, self.device))

    def spread(self, values: NDArray[Any]) -> NDArray[Any]:
        own = to_device(values, self.device)
        return to_device_array(torch.repeat_interleave(own, self._counts, output_size=self.tokens))

    def _reduce(self, ufunc: np.ufunc, values: NDArray[Any], empty: float, dtype: type | None) -> Float64s:
        return to_host(reduce_segments(to_tensor(values), _REDUCTIONS[ufunc], self._counts, empty))


_REDUCTIONS: dict[Any, str] = {np.add: "sum", np.minimum: "min", np.maximum: "max"}


def reduce_segments(values: Tensor, reduction: str, lengths: Tensor, empty: float = 0.0) -> Tensor:
    """Return the sum, minimum or maximum of each segment in float64. Repeated calls give identical sums."""
    doubles = values.to(torch.float64)
    reduced: Tensor = torch.segment_reduce(doubles, reduction, lengths=lengths, initial=empty, unsafe=True)  # type: ignore[no-untyped-call, unused-ignore]
    return reduced


def to_device_array(tensor: Tensor) -> NDArray[Any]:
    return cast("NDArray[Any]", DeviceArray(tensor))


def to_tensor(values: NDArray[Any]) -> Tensor:
    tensor: Tensor = _to_operand(values)
    return tensor


BLOCK_TOKENS = 1 << 20
"""Tokens per block, enough to keep a GPU busy. A thread needs 220 MB of GPU memory, 360 MB with current log-probs."""


def accelerators() -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


class DeviceKernel(Kernel):
    """Computes sums over tokens on GPUs. Each thread uses one GPU."""

    evaluates_all_tokens = True

    def __init__(self, devices: Sequence[str]) -> None:
        named = (torch.cuda.get_device_name(name) if name.startswith("cuda") else name for name in devices)
        models = [model if count == 1 else f"{count} x {model}" for model, count in Counter(named).items()]
        self._devices, self.device = devices, f"{', '.join(models)} with torch {torch.__version__}"

    def split_blocks(self, batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
        device = torch.device(self._devices[_DEVICE_THREAD.turn % len(self._devices)])

        def copy(values: NDArray[Any] | None) -> Any:
            return None if values is None else to_device_array(to_device(values, device))

        names = ("rollout", "train", "current", "position", "advantages")
        # In its own stream, a thread can copy while other threads compute.
        with torch.cuda.stream(_DEVICE_THREAD.stream(device)):
            for start, block in batch.blocks(BLOCK_TOKENS):
                copied = {name: copy(getattr(block, name)) for name in names}
                yield start, replace(block, segments=DeviceSegments(block.segments.offsets, device), **copied)

    def add_by_bin(self, table: NDArray[Any], where: NDArray[Any], *columns: Float64s) -> None:
        """See `Kernel.add_by_bin`. Tokens are sorted by bin, so that repeated calls give identical sums."""
        bin_of = to_tensor(where)
        counts = torch.bincount(bin_of, minlength=len(table))
        order = torch.argsort(bin_of, stable=True) if columns else None
        sums = [reduce_segments(to_tensor(column)[order], "sum", counts) for column in columns]
        table += to_host(torch.stack([counts.to(torch.float64), *sums], dim=1)).astype(table.dtype)

    def find_outside(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """See `Kernel.find_outside`. `sequences` must be ascending."""
        chosen = np.zeros(len(ratios.segments), np.bool_)
        chosen[sequences] = True
        outside = (ratios.log_ratio <= low) | (ratios.log_ratio >= high)
        return np.flatnonzero(ratios.segments.spread(chosen) & outside)


class _DeviceThread(threading.local):
    """State of a thread: its CUDA streams, and `turn`, the number that selects its GPU."""

    _turns = itertools.count()

    def __init__(self) -> None:
        self.turn = next(self._turns)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams.get(device)


_DEVICE_THREAD = _DeviceThread()
