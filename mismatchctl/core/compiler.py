"""Numba decorators of the compiled loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import float32, float64, int32, int64, njit, types
from numba.extending import intrinsic

LoopT = TypeVar("LoopT", bound=Callable[..., Any])
BARE_OPTIONS: dict[str, Any] = {"_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Numba features that are left out of the machine code: reference counting, and wrappers for Python and C."""


def compile_loop(loop: LoopT, *, fastmath: frozenset[str] = frozenset()) -> LoopT:
    """Compile a loop without the GIL and wrappers for Python. `fastmath` are permitted deviations from IEEE rules."""
    return cast(LoopT, njit(nogil=True, error_model="numpy", fastmath=set(fastmath), **BARE_OPTIONS)(loop))


compile_terms = partial(compile_loop, fastmath=frozenset({"contract"}))
"""Compile a loop in which products may be added without rounding in between."""
compile_sums = partial(compile_loop, fastmath=frozenset({"reassoc", "contract", "nsz"}))
"""Compile a loop in which sums may be split into several partial sums."""


def _make_bitcast(source: Any, target: Any) -> Any:
    """Build a function that reinterprets the bits of a value as another type."""

    @intrinsic
    def cast(typing: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.bitcast(values[0], context.get_value_type(target))

        return target(source), generate

    return cast


def _make_row_adder() -> Any:
    """Build a function that adds a tuple of doubles to contiguous table cells with one vector instruction."""

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
    """Build the minimum or maximum of two floats for vector code."""

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
