"""The kernel for accelerators: blocks are copied to a device, and stay there until they are sums.

Ratios, rules and their columns are those of the plain kernel, on values that are on the device (`tensors`); what is
counted by bin is counted here. Sums are float64 and taken in one order, so that every run gives the same ones.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.measure import bins
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.kernel import BREAKDOWNS, BUCKETS, JOINT, Kernel, PairTables, Places, RunTables
from mismatchctl.measure.kernels.plain import climb, token_sums, truncate
from mismatchctl.measure.kernels.tensors import DeviceSegments, as_array, segment_reduce, tensor_of, to_device, to_host
from mismatchctl.measure.layers import BIN_OF_SURPRISAL, BINS, CAPS, FIRST
from mismatchctl.ratios import Ratios

BLOCK_TOKENS = 1 << 20
"""Tokens per block: enough to occupy a device, of whose memory a thread then takes about 150 MB; 350 MB with current
log-probs."""


def accelerators() -> tuple[str, ...]:
    """The CUDA devices that this process may use, as torch names them."""
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def kernel_on(devices: Sequence[str]) -> Kernel:
    """The kernel that works on devices, of which each thread takes one."""
    blocks = partial(_blocks, devices=tuple(devices))
    title = f"{_models(devices)} with torch {torch.__version__}"
    correct = partial(correction_columns, whole=True)
    return Kernel(Ratios, reduce_tokens, beyond, truncate, climb, correct, blocks, title)


def _models(devices: Sequence[str]) -> str:
    models = Counter(torch.cuda.get_device_name(name) if name.startswith("cuda") else name for name in devices)
    return ", ".join(model if count == 1 else f"{count} x {model}" for model, count in models.items())


class _Thread(threading.local):
    """What a thread keeps: which of the devices is its own, and its streams there, for copies and for arithmetic."""

    _turns = itertools.count()

    def __init__(self) -> None:
        self.turn = next(self._turns)
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
        """None where the device has none."""
        if device.type != "cuda":
            return None, None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


_THREAD = _Thread()


def _blocks(batch: TokenBatch, devices: Sequence[str]) -> Iterator[tuple[int, TokenBatch]]:
    """Blocks on this thread's device; each is copied while the one before it is worked on, on this thread's stream."""
    device = torch.device(devices[_THREAD.turn % len(devices)])
    copies, arithmetic = _THREAD.streams(device)
    with torch.cuda.stream(arithmetic):
        coming = _copies(batch, device, copies)
        ahead = next(coming, None)
        while ahead is not None:
            (start, block, copied), ahead = ahead, next(coming, None)
            if copied is not None:
                copied.wait()
            yield start, block


def _copies(
    batch: TokenBatch, device: torch.device, stream: torch.cuda.Stream | None
) -> Iterator[tuple[int, TokenBatch, torch.cuda.Event | None]]:
    """Blocks whose values per token are being copied to a device, and the event that says when they are there."""
    user = None if stream is None else torch.cuda.current_stream(device)

    def copy(values: NDArray[Any]) -> NDArray[Any]:
        tensor = to_device(values, device)
        if user is not None:
            tensor.record_stream(user)  # or its memory might be lent again while it is still being read
        return as_array(tensor)

    for start, block in batch.blocks(BLOCK_TOKENS):
        with torch.cuda.stream(stream):
            copied = replace(
                block,
                segments=DeviceSegments(block.segments.offsets, device),
                rollout=copy(block.rollout),
                train=copy(block.train),
                current=None if block.current is None else copy(block.current),
                position=None if block.position is None else copy(block.position),
                advantages=None if block.advantages is None else copy(block.advantages),
            )
        yield start, copied, None if stream is None else stream.record_event()


def reduce_tokens(
    ratios: Ratios,
    position: Ints | None,
    places: Places,
    pair: PairTables,
    run: RunTables | None = None,
) -> tuple[Float64s, Float64s]:
    """As the interface says."""
    spread = ratios.segments.spread
    at = tensor_of(ratios.segments.places if position is None else position)
    _tally_pair(pair, ratios, tensor_of(spread(places.rows)), tensor_of(spread(pair.cells[places.rows])))
    if run is not None:
        _tally_run(run, ratios, at, tensor_of(spread(places.buckets)))
        _tally_layers(run.layers, ratios, tensor_of(spread(places.clusters)))
    neighbours = map(as_array, _neighbours(ratios, at))
    return token_sums(ratios, [ratios.segments.sum(values) for values in neighbours])


def _neighbours(ratios: Ratios, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token whether it and the one before it are adjacent, the product and the sum of their log ratios."""
    x = tensor_of(ratios.log_ratio)
    before = torch.roll(x, 1)
    adjacent = tensor_of(ratios.segments.places > 0) & (places - torch.roll(places, 1) == 1)
    return adjacent, torch.where(adjacent, x * before, 0.0), torch.where(adjacent, x + before, 0.0)


def _tally_pair(tables: PairTables, ratios: Ratios, row: Tensor, cell: Tensor) -> None:
    signed = _signed_bin(tensor_of(ratios.log_ratio))
    magnitude = (signed - bins.MAGNITUDES) ^ ((signed - bins.MAGNITUDES) >> 31)
    tokens = torch.bincount(row * bins.MAGNITUDES + magnitude, minlength=tables.tokens.size)
    tables.tokens += to_host(tokens.to(torch.int32)).reshape(tables.tokens.shape)
    counts, (k3,) = _by_bin(cell * bins.SIGNED + signed, tables.sums.size // 2, [ratios.k3])
    tables.sums += to_host(torch.stack([counts.to(torch.float64), k3], dim=1)).reshape(tables.sums.shape)


def _tally_run(tables: RunTables, ratios: Ratios, places: Tensor, bucket: Tensor) -> None:
    surprisal = tensor_of(-ratios.reference).clamp(min=0.0)
    summed = [ratios.absolute, ratios.k3, ratios.log_ratio, 1.0 - ratios.reference_prob]
    for name, values in (("position", places + 1), ("surprisal", surprisal)):
        kind, table = BREAKDOWNS[name], tables.breakdowns[name]
        where = bucket * kind.count + _octave_bin(kind, values)
        counts, sums = _by_bin(where, BUCKETS * kind.count, summed[: table.shape[-1] - 1])
        table += to_host(torch.stack([counts.to(torch.float64), *sums], dim=1)).reshape(table.shape)
    across, up = (
        (tensor_of(prob) * JOINT).to(torch.int64).clamp(max=JOINT - 1)
        for prob in (ratios.reference_prob, ratios.policy_prob)
    )
    tables.joint += to_host(torch.bincount(across * JOINT + up, minlength=JOINT * JOINT)).reshape(JOINT, JOINT)


def _signed_bin(values: Tensor) -> Tensor:
    """As bins.signed_bin."""
    bits = values.to(torch.float32).view(torch.int32)
    magnitude = ((bits & 0x7FFFFFFF) >> bins.SIGNED_SHIFT) - bins.FIRST_MAGNITUDE
    return (magnitude.clamp(0, bins.MAGNITUDES - 1) ^ (bits >> 31)) + bins.MAGNITUDES


def _octave_bin(kind: bins.OctaveBins, values: Tensor) -> Tensor:
    """As OctaveBins.of."""
    found = values.to(torch.float32).view(torch.int32) >> kind.shift
    return (found - kind.first).clamp(0, kind.count - 1)


def _by_bin(where: Tensor, number: int, columns: Sequence[Float64s]) -> tuple[Tensor, list[Tensor]]:
    """Tokens in each of a number of bins, and sums of columns over them; sorted first, so that they add in order."""
    counts = torch.bincount(where, minlength=number)
    order = torch.argsort(where, stable=True)
    return counts, [segment_reduce(tensor_of(column)[order], "sum", counts) for column in columns]


def _tally_layers(table: Float64s, ratios: Ratios, cluster: Tensor) -> None:
    """As layers.add_layers."""
    k3 = tensor_of(ratios.k3)
    surprisal = _octave_bin(BREAKDOWNS["surprisal"], tensor_of(-ratios.reference).clamp(min=0.0))
    place = torch.as_tensor(BIN_OF_SURPRISAL, device=k3.device)[surprisal]
    reached = (((k3.view(torch.int64) >> 52) - FIRST + 2) >> 1).clamp(0, len(CAPS))
    where = (cluster * BINS + place) * table.shape[2] + reached
    counts, (sums,) = _by_bin(where, table.size // 2, [ratios.k3])
    table += to_host(torch.stack([counts.to(torch.float64), sums], dim=1)).reshape(table.shape)


def beyond(ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
    """As the interface says; sequences are given in order."""
    chosen = np.zeros(len(ratios.segments), np.bool_)
    chosen[sequences] = True
    outside = (ratios.log_ratio <= low) | (ratios.log_ratio >= high)
    return np.flatnonzero(ratios.segments.spread(chosen) & outside)
