"""What is done to one row of numbers: sums, norms, rounding to int8, and the curves of the MLP.

All are called from compiled code with ``(array, offset)`` pairs. Rows have lengths that are multiples of sixteen,
padded with zeros. It promises the bits of `lanes.py`, and that what is no number stays in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numpy.typing import NDArray

from storyteller.lanes import F32, I64, LANES, UNSIGNED, VB, VF, VI, Emit, Pointer, cgutils, compiled, lanes


def each(e: Emit, size: Any, step: Callable[[Any], None]) -> None:
    """Runs `step` at each sixteenth place of a row."""
    with cgutils.for_range(e.builder, e.builder.udiv(size, e.index(LANES))) as loop:
        step(e.builder.mul(loop.index, e.index(LANES)))


@lanes()
def fetch(e: Emit, x: Pointer, size: Any, y: Pointer) -> None:
    """y = x, widened to float32."""
    each(e, size, lambda i: e.store(e.wide(x, i), y, i))


@lanes(types.float32)
def largest(e: Emit, x: Pointer, size: Any) -> Any:
    """The largest number of a row; what is no number is passed over."""
    found = e.variable(e.const(float("-inf")))
    each(e, size, lambda i: e.builder.store(e.larger(e.load(x, i), e.builder.load(found)), found))
    return e.halve(e.builder.load(found), e.larger)


@lanes()
def peaks(e: Emit, x: Pointer, size: Any, out: Pointer) -> None:
    """out[16 g + i] = the largest of x[256 g + 16 m + i] over m; the last group may be short."""
    b, group = e.builder, e.index(16 * LANES)
    with cgutils.for_range(b, b.udiv(b.add(size, e.index(16 * LANES - 1)), group)) as outer:
        start = b.mul(outer.index, group)
        left = b.udiv(b.sub(size, start), e.index(LANES))
        count = b.select(b.icmp_signed("<", left, e.index(16)), left, e.index(16))
        found = e.variable(e.const(float("-inf")))
        b.store(e.const(float("-inf")), found)
        with cgutils.for_range(b, count) as inner:
            value = e.load(x, b.add(start, b.mul(inner.index, e.index(LANES))))
            b.store(e.larger(value, b.load(found)), found)
        e.store(b.load(found), out, b.mul(outer.index, e.index(LANES)))


@lanes(types.float32)
def largest_size(e: Emit, x: Pointer, size: Any) -> Any:
    """The largest absolute value of a row."""
    found = e.variable(e.const(0.0))

    def step(i: Any) -> None:
        value = e.call("llvm.fabs.v16f32", VF, e.load(x, i))
        e.builder.store(e.larger(value, e.builder.load(found)), found)

    each(e, size, step)
    return e.halve(e.builder.load(found), e.larger)


@lanes(types.float32)
def total(e: Emit, x: Pointer, size: Any) -> Any:
    """The sum of a row."""
    found = e.variable(e.const(0.0))
    each(e, size, lambda i: e.builder.store(e.builder.fadd(e.builder.load(found), e.load(x, i)), found))
    return e.halve(e.builder.load(found), e.builder.fadd)


@lanes(types.float32)
def total_squares(e: Emit, x: Pointer, size: Any, mean: Any) -> Any:
    """The sum of (x - mean)² over a row."""
    b, found, middle = e.builder, e.variable(e.const(0.0)), e.splat(mean)

    def step(i: Any) -> None:
        value = b.fsub(e.load(x, i), middle)
        b.store(e.fma(value, value, b.load(found)), found)

    each(e, size, step)
    return e.halve(b.load(found), b.fadd)


@lanes(types.float32)
def exponentials(e: Emit, x: Pointer, size: Any, highest: Any, factor: Any) -> Any:
    """x = exp((x - highest) * factor), in place, 0 for what is no number; their sum."""
    b, found, most, scale = e.builder, e.variable(e.const(0.0)), e.splat(highest), e.splat(factor)

    def step(i: Any) -> None:
        number = e.larger(e.load(x, i), e.const(float("-inf")))
        value = e.exp(b.fmul(b.fsub(number, most), scale))
        e.store(value, x, i)
        b.store(b.fadd(b.load(found), value), found)

    each(e, size, step)
    return e.halve(b.load(found), b.fadd)


@lanes()
def scaled(e: Emit, x: Pointer, size: Any, factor: Any, y: Pointer) -> None:
    """y = x * factor."""
    each(e, size, lambda i: e.store(e.builder.fmul(e.load(x, i), e.splat(factor)), y, i))


@lanes()
def turn(e: Emit, x: Pointer, half: Any, cos: Pointer, sin: Pointer) -> None:
    """Turns x[i] and x[half + i] against each other by an angle each; `half` may be any number."""
    b = e.builder

    def step(i: Any, kind: Any) -> None:
        c, s = e.load(cos, i, kind), e.load(sin, i, kind)
        first, second = e.load(x, i, kind), e.load(x, b.add(half, i), kind)
        e.store(b.fsub(b.fmul(first, c), b.fmul(second, s)), x, i)
        e.store(b.fadd(b.fmul(second, c), b.fmul(first, s)), x, b.add(half, i))

    each(e, half, lambda i: step(i, VF))
    rest = b.urem(half, e.index(LANES))
    with cgutils.for_range(b, rest) as loop:
        step(b.add(b.sub(half, rest), loop.index), F32)


@lanes()
def normalise(
    e: Emit, x: Pointer, size: Any, mean: Any, scale: Any, weight: Pointer, bias: Pointer, y: Pointer
) -> None:
    """y = (x - mean) * scale * weight + bias."""
    b, middle, factor = e.builder, e.splat(mean), e.splat(scale)

    def step(i: Any) -> None:
        value = b.fmul(b.fsub(e.load(x, i), middle), factor)
        e.store(e.fma(value, e.load(weight, i), e.load(bias, i)), y, i)

    each(e, size, step)


@compiled
def factor_of(x: NDArray[np.float32], at: int, size: int) -> Any:
    """What a row is multiplied with to become bytes, and its scale: what the bytes are multiplied with."""
    most = largest_size(x, at, size)
    factor = np.float32(127.0) / most if most > 0 else np.float32(0.0)
    return factor, most / np.float32(127.0)


def _to_int8(flip: bool) -> Any:
    def to_int8(e: Emit, x: Pointer, size: Any, factor: Any, y: Pointer) -> None:
        """y = x * factor, rounded to the nearest and kept within ±127."""
        b, scale = e.builder, e.splat(factor)

        def step(i: Any) -> None:
            value = e.larger(b.fmul(e.load(x, i), scale), e.const(-127.0))
            value = b.select(b.fcmp_ordered(">", value, e.const(127.0)), e.const(127.0), value)
            whole = b.fptosi(e.call("llvm.rint.v16f32", VF, value), VI)
            narrow = b.trunc(whole, VB)
            e.store(b.xor(narrow, ir.Constant(VB, [-128] * LANES)) if flip else narrow, y, i)

        each(e, size, step)

    return lanes()(to_int8)


to_int8, to_signed_int8 = _to_int8(flip=UNSIGNED), _to_int8(flip=False)
"""As the first factor of a product, with 128 added where the processor wants it, and as the second."""


@lanes(types.int64)
def total_int8(e: Emit, x: Pointer, size: Any) -> Any:
    """The sum of a row of signed bytes."""
    b, found = e.builder, e.variable(ir.Constant(VI, [0] * LANES))
    each(e, size, lambda i: b.store(b.add(b.load(found), b.sext(e.load(x, i, VB), VI)), found))
    return b.sext(e.halve(b.load(found), b.add), I64)


GELU_TANH, GELU, SILU, RELU = range(4)


def _gelu_tanh(e: Emit, x: Any) -> Any:
    b = e.builder
    inner = b.fmul(x, e.fma(b.fmul(x, x), e.const(0.044715 * 1.5957691216057308), e.const(1.5957691216057308)))
    return b.fmul(x, e.sigmoid(inner))  # (1 + tanh u) / 2 is the sigmoid of 2u


def _gelu(e: Emit, x: Any) -> Any:
    """With the error function of Abramowitz and Stegun 7.1.26, good to 1.5e-7."""
    b = e.builder
    z = b.fmul(e.call("llvm.fabs.v16f32", VF, x), e.const(0.7071067811865476))
    t = b.fdiv(e.const(1.0), e.fma(z, e.const(0.3275911), e.const(1.0)))
    p = e.const(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = e.fma(p, t, e.const(c))
    tail = b.fmul(b.fmul(p, t), e.exp(b.fneg(b.fmul(z, z))))  # 1 - erf(z)
    half = b.fmul(tail, e.const(0.5))
    negative = b.fcmp_ordered("<", x, e.const(0.0))
    return b.fmul(x, b.select(negative, half, b.fsub(e.const(1.0), half)))


def _silu(e: Emit, x: Any) -> Any:
    return e.builder.fmul(x, e.sigmoid(x))


def _relu(e: Emit, x: Any) -> Any:
    return e.larger(x, e.const(0.0))


def _activation(curve: Callable[[Emit, Any], Any], gated: bool) -> Any:
    def alone(e: Emit, x: Pointer, size: Any) -> None:
        each(e, size, lambda i: e.store(curve(e, e.load(x, i)), x, i))

    def gate(e: Emit, x: Pointer, size: Any) -> None:
        """x[:size] = curve(x[:size]) * x[size:]"""
        b = e.builder
        each(e, size, lambda i: e.store(b.fmul(curve(e, e.load(x, i)), e.load(x, b.add(size, i))), x, i))

    return lanes()(gate if gated else alone)


gelu_tanh, gelu, silu, relu = (_activation(curve, False) for curve in (_gelu_tanh, _gelu, _silu, _relu))
gated_gelu_tanh, gated_gelu, gated_silu, gated_relu = (
    _activation(curve, True) for curve in (_gelu_tanh, _gelu, _silu, _relu)
)
CURVES = ("gelu_tanh", "gelu", "silu", "relu")
"""Names of the activations; their places are the numbers above."""
