"""The inner loops of the model: matrix products, attention over one block of keys, and what is done to one row.

All are called from compiled code with ``(array, offset)`` pairs. Rows have lengths that are multiples of sixteen,
padded with zeros. Weights lie in panels of `PANEL` columns: ``[columns / 64][inputs][64]`` in float32,
``[columns / 64][inputs / 4][64][4]`` in int8.

It promises the bits of `lanes.py`: a row's result depends on that row alone, not on its neighbours in a tile and not on
the processor. int8 products are summed exactly in 32 bits; full 8-bit activations are safe without VNNI, because
``|w| * (x * sign(w))`` cannot overflow 16-bit pair sums when both stay within ±127.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from storyteller.lanes import (
    AVX2,
    F32,
    I32,
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    UNSIGNED,
    VF,
    VI,
    VNNI_256,
    VNNI_512,
    Emit,
    Pointer,
    cgutils,
    lanes,
)

PANEL = 64
"""Output columns whose weights lie together."""
SPAN = 64
"""Inputs of one row that share a scale as int8: one scale a row made the packaged model 4 percent worse, this 0.8."""


def _products_int8(e: Emit, acc: Any, a: Any, w: Any) -> Any:
    """acc + the sums of four products: `a` one 32-bit word of four activations, `w` sixteen words of weights."""
    b = e.builder
    if VNNI_512:
        return _vpdpbusd(e, acc, e.splat(a), w)
    if VNNI_256:
        return _by_halves(e, acc, w, lambda x, y: _vpdpbusd(e, x, e.splat(a, 8), y))
    if AVX2:
        return _by_halves(e, acc, w, lambda x, y: b.add(x, _pairs_avx2(e, e.splat(a, 8), y)))
    wide = ir.VectorType(I32, 4 * LANES)
    bytes_ = ir.VectorType(ir.IntType(8), 4 * LANES)
    product = b.mul(b.sext(b.bitcast(e.splat(a), bytes_), wide), b.sext(b.bitcast(w, bytes_), wide))
    for start in range(4):
        lanes = ir.Constant(VI, [4 * lane + start for lane in range(LANES)])
        acc = b.add(acc, b.shuffle_vector(product, product, lanes))
    return acc


def _vpdpbusd(e: Emit, acc: Any, a: Any, w: Any) -> Any:
    lanes = acc.type.count
    bytes_ = ir.VectorType(ir.IntType(8), 4 * lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return e.call(name, acc.type, acc, e.builder.bitcast(a, bytes_), e.builder.bitcast(w, bytes_))


def _by_halves(e: Emit, acc: Any, w: Any, step: Callable[[Any, Any], Any]) -> Any:
    b, half = e.builder, ir.VectorType(I32, 8)
    low, high = (ir.Constant(half, list(range(start, start + 8))) for start in (0, 8))
    parts = [step(b.shuffle_vector(acc, acc, lanes), b.shuffle_vector(w, w, lanes)) for lanes in (low, high)]
    return b.shuffle_vector(*parts, ir.Constant(VI, list(range(LANES))))


def _pairs_avx2(e: Emit, a: Any, w: Any) -> Any:
    b, i8, i16 = e.builder, ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)
    w, a = b.bitcast(w, i8), b.bitcast(a, i8)
    signed = e.call("llvm.x86.avx2.psign.b", i8, a, w)
    size = e.call("llvm.abs.v32i8", i8, w, ir.Constant(ir.IntType(1), 0))
    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", i16, size, signed)
    return e.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), pairs, ir.Constant(i16, [1] * 16))


def _tile(e: Emit, sums: list[list[Any]], depth: Any, a: Pointer, lda: Any, w: Pointer, ahead: Any, word: Any) -> None:
    """Adds to `sums` the products of as many rows and columns along `depth` steps of one `word` of activations each.

    `ahead` is where the next panel lies, as seen from `w`.
    """
    b, bytes_a_word = e.builder, 4 if word is I32 else 1
    step, columns = LANES * bytes_a_word, len(sums[0])
    with cgutils.for_range(b, depth) as loop:
        panel = b.mul(loop.index, e.index(PANEL * bytes_a_word))
        factors = [e.load(w, b.add(panel, e.index(n * step)), VI if word is I32 else VF) for n in range(columns)]
        for line in range(columns if len(sums) > 2 else 0):  # one pass is a plain stream: that was slower
            e.prefetch(w, b.add(b.add(panel, ahead), e.index(line * step)))
        for r, row in enumerate(sums):
            here = e.load(a, b.add(b.mul(lda, e.index(r)), b.mul(loop.index, e.index(bytes_a_word))), word)
            for acc, factor in zip(row, factors, strict=True):
                if word is I32:
                    b.store(_products_int8(e, b.load(acc), here, factor), acc)
                else:
                    b.store(e.fma(e.splat(here), factor, b.load(acc)), acc)


def _linear_int8(rows: int, columns: int) -> Any:
    """y[r, n] (+)= x[r]·w[n] for one tile: w is int8 with a scale a column, x with a scale for each `SPAN` inputs.

    `column` is where the columns' numbers lie: scales, biases, and for each span what 128 in all its inputs adds up to.
    """

    def linear_int8(
        e: Emit, a: Pointer, lda: Any, row_scale: Pointer, spans: Any, w: Pointer, depth: Any,
        column: Pointer, width: Any, y: Pointer, ldy: Any, add: Any,
    ) -> None:  # fmt: skip
        b, vectors, steps = e.builder, columns // LANES, e.index(SPAN // 4)
        sums = [[e.variable(ir.Constant(VI, [0] * LANES)) for _ in range(vectors)] for _ in range(rows)]
        totals = [[e.variable(e.const(0.0)) for _ in range(vectors)] for _ in range(rows)]
        for row in totals:
            for total in row:
                b.store(e.const(0.0), total)
        with cgutils.for_range(b, spans) as loop:
            first = b.mul(loop.index, steps)
            left = b.sub(depth, first)
            count = b.select(b.icmp_signed("<", left, steps), left, steps)
            lost = b.mul(width, b.add(loop.index, e.index(2)))
            for n in range(vectors):
                start = e.load(column, b.add(lost, e.index(n * LANES)), VI)
                for row in sums:
                    b.store(start if UNSIGNED else ir.Constant(VI, [0] * LANES), row[n])
            here = b.gep(a, [b.mul(first, e.index(4))])
            weights = b.gep(w, [b.mul(first, e.index(4 * PANEL))])
            _tile(e, sums, count, here, lda, weights, b.mul(depth, e.index(4 * PANEL)), I32)
            for r in range(rows):
                scale = e.splat(e.load(row_scale, b.add(b.mul(spans, e.index(r)), loop.index), F32))
                for acc, total in zip(sums[r], totals[r], strict=True):
                    b.store(e.fma(b.sitofp(b.load(acc), VF), scale, b.load(total)), total)
        added = e.splat(b.icmp_signed("!=", add, e.index(0)))
        for n in range(vectors):
            place = e.index(n * LANES)
            scale, bias = e.load(column, place), e.load(column, b.add(width, place))
            for r in range(rows):
                where = b.add(b.mul(ldy, e.index(r)), place)
                old = b.select(added, e.load(y, where), e.const(0.0))
                e.store(b.fadd(old, e.fma(b.load(totals[r][n]), scale, bias)), y, where)

    return lanes()(linear_int8)


def _linear_f32(rows: int, columns: int) -> Any:
    """y[r, n] (+)= x[r]·w[n] for one tile in float32, each sum in the order of the inputs."""

    def linear_f32(
        e: Emit, a: Pointer, lda: Any, w: Pointer, depth: Any, bias: Pointer, y: Pointer, ldy: Any, add: Any
    ) -> None:
        b = e.builder
        sums = [[e.variable(e.const(0.0)) for _ in range(columns // LANES)] for _ in range(rows)]
        for row in sums:
            for acc in row:
                b.store(e.const(0.0), acc)
        _tile(e, sums, depth, a, lda, w, b.mul(depth, e.index(PANEL)), F32)
        added = e.splat(b.icmp_signed("!=", add, e.index(0)))
        for n in range(columns // LANES):
            place = e.index(n * LANES)
            for r in range(rows):
                where = b.add(b.mul(ldy, e.index(r)), place)
                old = b.select(added, e.load(y, where), e.const(0.0))
                e.store(b.fadd(old, b.fadd(b.load(sums[r][n]), e.load(bias, place))), y, where)

    return lanes()(linear_f32)


linear_int8_many, linear_int8_one = _linear_int8(TILE_ROWS, TILE_COLUMNS), _linear_int8(1, TILE_COLUMNS)
linear_int8_two = _linear_int8(2, TILE_COLUMNS)
linear_f32_many, linear_f32_one = _linear_f32(TILE_ROWS, TILE_COLUMNS), _linear_f32(1, TILE_COLUMNS)
linear_f32_two = _linear_f32(2, TILE_COLUMNS)


def _score(e: Emit, q: Pointer, k: Pointer, dim: Any, out: Pointer, soon: Pointer) -> None:
    """out[t] = q·k[:, t] for the sixteen tokens of one block; `k` is [dim][16], dim a multiple of four.

    `soon` is the block that is wanted next.
    """
    b = e.builder
    sums = [e.variable(e.const(0.0)) for _ in range(4)]
    with cgutils.for_range(b, b.udiv(dim, e.index(4))) as loop:
        for i, acc in enumerate(sums):
            d = b.add(b.mul(loop.index, e.index(4)), e.index(i))
            e.prefetch(soon, b.mul(d, e.index(LANES)))
            keys = e.wide(k, b.mul(d, e.index(LANES)))
            b.store(e.fma(e.splat(e.load(q, d, F32)), keys, b.load(acc)), acc)
    first, second, third, fourth = (b.load(acc) for acc in sums)
    e.store(b.fadd(b.fadd(first, second), b.fadd(third, fourth)), out, e.index(0))


def _weigh(e: Emit, p: Pointer, count: Any, v: Pointer, dim: Any, out: Pointer, soon: Pointer) -> None:
    """out += p[t] * v[t] over the first `count` tokens of one block; `v` is [16][dim], `soon` is wanted next."""
    b = e.builder

    def columns(start: Any, width: int) -> None:
        places = [b.add(start, e.index(n * LANES)) for n in range(width)]
        sums = [e.variable(e.load(out, place)) for place in places]
        with cgutils.for_range(b, count) as loop:
            weight, row = e.splat(e.load(p, loop.index, F32)), b.mul(loop.index, dim)
            for acc, place in zip(sums, places, strict=True):
                e.prefetch(soon, b.add(row, place))
                b.store(e.fma(weight, e.wide(v, b.add(row, place)), b.load(acc)), acc)
        for acc, place in zip(sums, places, strict=True):
            e.store(b.load(acc), out, place)

    fours = b.udiv(dim, e.index(4 * LANES))
    with cgutils.for_range(b, fours) as loop:
        columns(b.mul(loop.index, e.index(4 * LANES)), 4)
    done = b.mul(fours, e.index(4))
    with cgutils.for_range(b, b.sub(b.udiv(dim, e.index(LANES)), done)) as loop:
        columns(b.mul(b.add(done, loop.index), e.index(LANES)), 1)


score, weigh = lanes()(_score), lanes()(_weigh)


@lanes()
def fetch(e: Emit, x: Pointer, size: Any, y: Pointer) -> None:
    """y = x, widened to float32."""
    _each(e, size, lambda i: e.store(e.wide(x, i), y, i))


@lanes()
def keep(e: Emit, x: Pointer, size: Any, memory: Pointer) -> None:
    """memory = x, rounded to bfloat16 where the memory is."""
    _each(e, size, lambda i: e.store(e.narrow(e.load(x, i), memory), memory, i))


@lanes()
def keep_key(e: Emit, x: Pointer, size: Any, memory: Pointer) -> None:
    """Writes a row as one column of [size][16], rounded to bfloat16 where the memory is."""

    def step(i: Any) -> None:
        values = e.narrow(e.load(x, i), memory)
        for lane in range(LANES):
            place = e.builder.mul(e.builder.add(i, e.index(lane)), e.index(LANES))
            e.store(e.builder.extract_element(values, I32(lane)), memory, place)

    _each(e, size, step)


def _each(e: Emit, size: Any, step: Callable[[Any], None]) -> None:
    """Runs `step` at each sixteenth place of a row."""
    with cgutils.for_range(e.builder, e.builder.udiv(size, e.index(LANES))) as loop:
        step(e.builder.mul(loop.index, e.index(LANES)))


@lanes(types.float32)
def largest(e: Emit, x: Pointer, size: Any) -> Any:
    """The largest number of a row; what is no number is passed over."""
    found = e.variable(e.const(float("-inf")))
    _each(e, size, lambda i: e.builder.store(e.larger(e.load(x, i), e.builder.load(found)), found))
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

    _each(e, size, step)
    return e.halve(e.builder.load(found), e.larger)


@lanes(types.float32)
def total(e: Emit, x: Pointer, size: Any) -> Any:
    """The sum of a row."""
    found = e.variable(e.const(0.0))
    _each(e, size, lambda i: e.builder.store(e.builder.fadd(e.builder.load(found), e.load(x, i)), found))
    return e.halve(e.builder.load(found), e.builder.fadd)


@lanes(types.float32)
def total_squares(e: Emit, x: Pointer, size: Any, mean: Any) -> Any:
    """The sum of (x - mean)² over a row."""
    b, found, middle = e.builder, e.variable(e.const(0.0)), e.splat(mean)

    def step(i: Any) -> None:
        value = b.fsub(e.load(x, i), middle)
        b.store(e.fma(value, value, b.load(found)), found)

    _each(e, size, step)
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

    _each(e, size, step)
    return e.halve(b.load(found), b.fadd)


@lanes()
def normalise(
    e: Emit, x: Pointer, size: Any, mean: Any, scale: Any, weight: Pointer, bias: Pointer, y: Pointer
) -> None:
    """y = (x - mean) * scale * weight + bias."""
    b, middle, factor = e.builder, e.splat(mean), e.splat(scale)

    def step(i: Any) -> None:
        value = b.fmul(b.fsub(e.load(x, i), middle), factor)
        e.store(e.fma(value, e.load(weight, i), e.load(bias, i)), y, i)

    _each(e, size, step)


@lanes()
def to_int8(e: Emit, x: Pointer, size: Any, factor: Any, y: Pointer) -> None:
    """y = x * factor, rounded to the nearest and kept within ±127 (128 added where the processor wants it)."""
    b, scale, bytes_ = e.builder, e.splat(factor), ir.VectorType(ir.IntType(8), LANES)

    def step(i: Any) -> None:
        value = e.larger(b.fmul(e.load(x, i), scale), e.const(-127.0))
        value = b.select(b.fcmp_ordered(">", value, e.const(127.0)), e.const(127.0), value)
        whole = b.fptosi(e.call("llvm.rint.v16f32", VF, value), VI)
        narrow = b.trunc(whole, bytes_)
        e.store(b.xor(narrow, ir.Constant(bytes_, [-128] * LANES)) if UNSIGNED else narrow, y, i)

    _each(e, size, step)


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
        _each(e, size, lambda i: e.store(curve(e, e.load(x, i)), x, i))

    def gate(e: Emit, x: Pointer, size: Any) -> None:
        """x[:size] = curve(x[:size]) * x[size:]"""
        b = e.builder
        _each(e, size, lambda i: e.store(b.fmul(curve(e, e.load(x, i)), e.load(x, b.add(size, i))), x, i))

    return lanes()(gate if gated else alone)


gelu_tanh, gelu, silu, relu = (_activation(curve, False) for curve in (_gelu_tanh, _gelu, _silu, _relu))
gated_gelu_tanh, gated_gelu, gated_silu, gated_relu = (
    _activation(curve, True) for curve in (_gelu_tanh, _gelu, _silu, _relu)
)
CURVES = ("gelu_tanh", "gelu", "silu", "relu")
"""Names of the activations; their places are the numbers above."""
