"""Numba decorators for compiled loops, and the compiled loops that read Parquet files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import float32, float64, int32, int64, njit, types, uint32
from numba.extending import intrinsic

LoopT = TypeVar("LoopT", bound=Callable[..., Any])
BARE_OPTIONS: dict[str, Any] = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Numba options that omit reference counting and the wrappers for Python and C from the machine code."""


def compile_loop(loop: LoopT, *, fastmath: frozenset[str] = frozenset()) -> LoopT:
    """Compile a loop that releases the GIL. `fastmath` contains the inexact optimizations that LLVM may use."""
    return cast(LoopT, njit(nogil=True, error_model="numpy", fastmath=set(fastmath), **BARE_OPTIONS)(loop))


compile_terms = partial(compile_loop, fastmath=frozenset({"contract"}))
"""Compile a loop, and allow LLVM to use fused multiply-add instructions."""
compile_sums = partial(compile_loop, fastmath=frozenset({"reassoc", "contract", "nsz"}))
"""Compile a loop, and allow LLVM to change the order of additions."""


def _make_bitcast(source: Any, target: Any) -> Any:
    """Build a function that reinterprets the bits of a value as another type."""

    @intrinsic
    def cast(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(target))

        return target(source), generate

    return cast


def _make_row_adder() -> Any:
    """Build a function that adds several numbers to adjacent table cells with one vector instruction."""

    @intrinsic
    def add(typing: Any, table: Any, start: Any, values: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            added = ir.Constant(ir.VectorType(ir.DoubleType(), values.count), ir.Undefined)
            for place in range(values.count):
                value = builder.extract_value(given[2], place)
                added = builder.insert_element(added, value, ir.Constant(ir.IntType(32), place))
            row = builder.gep(context.make_array(table)(context, builder, given[0]).data, [given[1]])
            row = builder.bitcast(row, added.type.as_pointer())
            builder.store(builder.fadd(builder.load(row, align=8), added), row, align=8)
            return context.get_dummy_value()

        return types.void(table, types.intp, values), generate

    return add


def _make_extreme(name: str) -> Any:
    """Build a function for the minimum or maximum of two floats that LLVM can vectorize."""

    @intrinsic
    def extreme(typing: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kind = given[0].type
            function = builder.module.declare_intrinsic(name, [kind], ir.FunctionType(kind, [kind, kind]))
            return builder.call(function, given, fastmath=("nnan", "nsz"))

        return first(first, second), generate

    return extreme


max_float, min_float = _make_extreme("llvm.maxnum"), _make_extreme("llvm.minnum")
add_to_row = _make_row_adder()
double_to_bits, bits_to_double = _make_bitcast(float64, int64), _make_bitcast(int64, float64)
float_to_bits = _make_bitcast(float32, int32)


@compile_loop
def find_zeros(body: Any, at: int, stop: int, count: int, out: Any) -> int:
    """Write indices of zeros in `count` Parquet levels (body[at:stop]) to `out`. Return their number (error: -1)."""
    done = found = 0
    while done < count:
        header: Any = int64(0)
        shift, more = 0, True
        while more:
            if at >= stop or shift > 28:
                return -1
            byte = int64(body[at])
            header |= (byte & 127) << shift
            at, shift, more = at + 1, shift + 7, byte > 127
        length, left = header >> 1, count - done
        covered = length
        if header & 1:
            if not 0 < length <= stop - at or 8 * length - left > 7:
                return -1
            covered = min(8 * length, left)
            for group in range(length):
                gone = ~int64(body[at + group]) & 255
                place = 8 * group
                while gone and place < covered:
                    if gone & 1:
                        if found == len(out):
                            return -1
                        out[found] = done + place
                        found += 1
                    gone, place = gone >> 1, place + 1
            at += length
        else:
            if not 0 < length <= left or at >= stop or body[at] > 1:
                return -1
            if body[at] == 0:
                if length > len(out) - found:
                    return -1
                for place in range(length):
                    out[found + place] = done + place
                found += length
            at += 1
        done += covered
    return found if at == stop else -1


@compile_loop
def _find_levels_end(body: Any, at: int) -> int:
    """Return the index after the Parquet levels whose size is stored at `at`, or -1 if the page is too short."""
    if at < 0 or at + 4 > len(body):
        return -1
    end = at + 4
    for place in range(4):
        end += int64(body[at + place]) << (8 * place)
    return end if end <= len(body) else -1


@compile_loop
def find_list_offsets(body: Any, count: int, state: Any, offsets: Any, empty: Any) -> int:
    """Find the lists in a Parquet page, and write the index of each list's first value to `offsets`.

    The page has `count` levels: one per value or empty list. Return the position of its values, or -1 if the page is
    bad or an array is too small. Update `state`: numbers of lists and values, 1 if the next page may continue a list.
    """
    middle = _find_levels_end(body, 0)
    end = _find_levels_end(body, middle)
    if end < 0:
        return -1
    firsts = offsets[state[0] :]
    made, without = find_zeros(body, 4, middle, count, firsts), find_zeros(body, middle + 4, end, count, empty)
    if made < 0 or without < 0 or not (state[2] or (made > 0 and firsts[0] == 0)):
        return -1
    passed = 0
    for i in range(made):
        first = firsts[i]
        firsts[i] = state[1] + first - passed
        if passed < without and empty[passed] == first:  # an empty list takes up exactly one level
            if (firsts[i + 1] if i + 1 < made else count) != first + 1:
                return -1
            passed += 1
    if passed < without:
        return -1
    state[0] += made
    state[1] += count - without
    state[2] = without == 0 or empty[without - 1] < count - 1
    return end


@compile_loop
def join_split_bytes(body: Any, start: int, count: int, out: Any) -> None:
    """Decode BYTE_STREAM_SPLIT: the first bytes of all four-byte values, then all second bytes, and so on."""
    a, b = body[start : start + count], body[start + count : start + 2 * count]
    c, d = body[start + 2 * count : start + 3 * count], body[start + 3 * count : start + 4 * count]
    for i in range(count):
        out[i] = uint32(a[i]) | uint32(b[i]) << uint32(8) | uint32(c[i]) << uint32(16) | uint32(d[i]) << uint32(24)
