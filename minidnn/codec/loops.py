"""Compiled inner loops of the zero-value codec (numba): `pack`, `unpack`, `checksum`.

Importing this module compiles them, or loads numba's cache; `zvc` imports it when it first packs, or in `warm_up()`, so
that minidnn itself never waits for numba. The loops hold no lock (`nogil`) and start no thread.

The step for one group of 32 values exists twice: for processors with AVX-512 VBMI2, which move the kept lanes of a
vector together in one instruction, and branch-free for all others. Both touch at most 32 packed values from `used` on.
Indices are unsigned on purpose: numba tests signed ones for wrap-around at each value, at half the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numba.core.cgutils
import numba.core.registry
import numba.extending
import numpy as np
from llvmlite import ir

from minidnn.compiled import compiled

F = TypeVar("F", bound=Callable[..., Any])

# numba's annotations differ between its versions; here they would only describe how code is built, not what it does.
njit: Any = numba.njit
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
cgutils: Any = numba.core.cgutils
_target: Any = numba.core.registry.cpu_target.target_context

_U32, _U64 = types.uint32, types.uint64
_WORDS = (types.uint32, types.uint16)  # element kinds
_ODD = np.uint64(0x9E3779B97F4A7C15)


def _array(element: Any, readonly: bool = False) -> Any:
    return types.Array(element, 1, "C", readonly=readonly)  # a signature that only reads takes writable arrays too


def _compiled(*signatures: Any) -> Callable[[F], F]:
    """Compile now, for these argument types only."""

    def compile_now(function: F) -> F:
        return compiled(function, signatures, nogil=True)

    return compile_now


# --- one group, as LLVM IR ----------------------------------------------------------------------------------------


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any, lanes: int) -> Any:
    """A pointer to `lanes` neighbouring values of a 1-D array."""
    data = context.make_array(kind)(context, builder, array).data
    vector = ir.VectorType(context.get_data_type(kind.dtype), lanes)
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _move_lanes(builder: Any, direction: str, vector: Any, keep: Any) -> Any:
    """AVX-512's compress (kept lanes together, at the front) or expand (back to their places); other lanes become 0."""
    name = f"llvm.x86.avx512.mask.{direction}.v{vector.type.count}i{vector.type.element.width}"
    function_type = ir.FunctionType(vector.type, [vector.type, vector.type, keep.type])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, [vector, ir.Constant(vector.type, None), keep])


def _mask(_typing: Any, values: Any, _start: Any) -> Any:
    """The mask of the 32 values from `start`: bit j is set where any bit of value j is. Fast on any processor."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        vector = builder.load(_pointer(context, builder, kind, args[0], args[1], 32), align=kind.dtype.bitwidth // 8)
        return builder.bitcast(builder.icmp_unsigned("!=", vector, ir.Constant(vector.type, None)), ir.IntType(32))

    return _U32(values, _U64), build


def _fetch(_typing: Any, array: Any, _index: Any) -> Any:
    """Ask for the cache line of array[index], which may lie behind the array's end, before it is needed."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flag, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], function_type)
        address = builder.bitcast(_pointer(context, builder, signature.args[0], args[0], args[1], 1), byte)
        builder.call(function, [address, flag(0), flag(3), flag(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return types.void(array, _U64), build


def _avx512(direction: str) -> Any:
    """The step for one group in vectors of 64 bytes: "compress" is values -> packed, "expand" packed -> values.

    Whole vectors are read and written; what compress writes behind the kept values, the next group overwrites.
    """

    def step(_typing: Any, values: Any, _start: Any, _mask: Any, packed: Any, _used: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values_kind, _, _, packed_kind, _ = signature.args
            values, start, mask, packed, used = args
            width = values_kind.dtype.bitwidth
            lanes, align = 512 // width, width // 8
            for shift in range(0, 32, lanes):
                bits = builder.trunc(builder.lshr(mask, mask.type(shift)), ir.IntType(lanes)) if lanes < 32 else mask
                keep = builder.bitcast(bits, ir.VectorType(ir.IntType(1), lanes))
                source = _pointer(context, builder, values_kind, values, start, lanes)
                target = _pointer(context, builder, packed_kind, packed, used, lanes)
                if direction == "expand":
                    source, target = target, source
                builder.store(_move_lanes(builder, direction, builder.load(source, align=align), keep), target, align)
                start = builder.add(start, start.type(lanes))
                used = builder.add(used, builder.zext(builder.ctpop(bits), used.type))
            return used

        return _U64(values, _U64, _U32, packed, _U64), build

    return intrinsic(step)


# --- one group, without AVX-512 -----------------------------------------------------------------------------------


def _compress_scalar(values: Any, start: Any, mask: Any, packed: Any, used: Any) -> Any:
    for j in range(_U64(32)):
        packed[used] = values[start + j]  # a zero is overwritten by the value that comes next
        used += _U64((mask >> _U32(j)) & _U32(1))
    return used


def _expand_scalar(values: Any, start: Any, mask: Any, packed: Any, used: Any) -> Any:
    for j in range(_U64(32)):
        bit = (mask >> _U32(j)) & _U32(1)
        values[start + j] = packed[used] * bit  # a product: a choice would become a branch that is guessed wrongly
        used += _U64(bit)
    return used


HAS_AVX512 = "+avx512vbmi2" in _target.codegen().magic_tuple()[2].split(",")  # what numba aims at
_mask_of = intrinsic(_mask)
_prefetch = intrinsic(_fetch)
_compress = _avx512("compress") if HAS_AVX512 else njit(_compress_scalar)
_expand = _avx512("expand") if HAS_AVX512 else njit(_expand_scalar)


# --- the loops ----------------------------------------------------------------------------------------------------

_PROGRESS = types.UniTuple(types.intp, 2)
_AHEAD = np.uint64(512)  # values between use and prefetch; at a pace that follows the data, hardware does not see it


@_compiled(*[_PROGRESS(_array(word, True), _array(_U32), types.intp, _array(word)) for word in _WORDS])
def pack(values: Any, masks: Any, group: Any, chunk: Any) -> Any:
    """Pack values[32 * group:] into `chunk`, their masks into `masks`, to the last mask or until `chunk` is full.

    A group that is not all zero begins only where 32 places are left, so that nothing is counted before it is packed.
    Returns (the group that comes next, values written to `chunk`).
    """
    g, end, used, room = _U64(group), _U64(masks.size), _U64(0), _U64(chunk.size)
    while g < end:
        _prefetch(values, _U64(32) * g + _AHEAD)
        mask = _mask_of(values, _U64(32) * g)
        if mask != 0:
            if used + _U64(32) > room:
                break
            used = _compress(values, _U64(32) * g, mask, chunk, used)
        masks[g] = mask
        g += _U64(1)
    return types.intp(g), types.intp(used)


@_compiled(*[_PROGRESS(_array(word), _array(_U32, True), types.intp, _array(word, True)) for word in _WORDS])
def unpack(values: Any, masks: Any, group: Any, chunk: Any) -> Any:
    """The reverse of `pack`, with the same rule for where a chunk ends: damaged masks never lead out of the arrays."""
    g, end, used, room = _U64(group), _U64(masks.size), _U64(0), _U64(chunk.size)
    while g < end:
        mask = masks[g]
        if mask == 0:
            for j in range(_U64(32)):
                values[_U64(32) * g + j] = 0
        else:
            if used + _U64(32) > room:
                break
            _prefetch(chunk, used + _AHEAD)
            _prefetch(chunk, used + _AHEAD + _U64(16))  # 32-bit groups span two cache lines
            used = _expand(values, _U64(32) * g, mask, chunk, used)
        g += _U64(1)
    return types.intp(g), types.intp(used)


@_compiled(_U64(_array(_U64, True), _array(types.uint8, True), _U64))
def checksum(lines: Any, rest: Any, start: Any) -> Any:
    """64 bits over `lines` of 8 words each and the bytes behind them, continuing from `start`.

    Each word is xored into its lane, which is then rotated and multiplied by an odd number. Every one of these steps is
    reversible, so a change within one word always changes the result.
    """
    lanes = np.empty(8, np.uint64)
    for k in range(8):
        lanes[k] = start + _U64(k)
    for i in range(_U64(0), _U64(lines.size), _U64(8)):
        for k in range(_U64(8)):
            word = lanes[k] ^ lines[i + k]
            lanes[k] = ((word << _U64(29)) | (word >> _U64(35))) * _ODD
    result = start
    for k in range(8):
        result = (result ^ lanes[k]) * _ODD
        result ^= result >> _U64(32)
    for byte in rest:
        result = (result ^ _U64(byte)) * _ODD
        result ^= result >> _U64(32)
    return result
