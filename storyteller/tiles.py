"""Matrix products, a tile of rows and columns at a time.

Called from compiled code with ``(array, offset)`` pairs. Rows have lengths that are multiples of sixteen, padded with
zeros. Weights lie in panels of `PANEL` columns: ``[columns / 64][inputs][64]`` in float32,
``[columns / 64][inputs / 4][64][4]`` in int8.

It promises the bits of `lanes.py`: a row's result depends on that row alone, not on its neighbours in a tile and not on
the processor. int8 products are summed exactly in 32 bits; full 8-bit activations are safe without VNNI, because
``|w| * (x * sign(w))`` cannot overflow 16-bit pair sums when both stay within ±127.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

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


def products_int8(e: Emit, acc: Any, a: Any, w: Any) -> Any:
    """acc + the sums of four products in each of sixteen words: activations (`vectors.to_int8`) times signed bytes."""
    b = e.builder
    if VNNI_512:
        return _vpdpbusd(e, acc, a, w)
    if VNNI_256:
        return _by_halves(e, acc, a, w, lambda x, y, z: _vpdpbusd(e, x, y, z))
    if AVX2:
        return _by_halves(e, acc, a, w, lambda x, y, z: b.add(x, _pairs_avx2(e, y, z)))
    wide = ir.VectorType(I32, 4 * LANES)
    bytes_ = ir.VectorType(ir.IntType(8), 4 * LANES)
    product = b.mul(b.sext(b.bitcast(a, bytes_), wide), b.sext(b.bitcast(w, bytes_), wide))
    for start in range(4):
        lanes = ir.Constant(VI, [4 * lane + start for lane in range(LANES)])
        acc = b.add(acc, b.shuffle_vector(product, product, lanes))
    return acc


def _vpdpbusd(e: Emit, acc: Any, a: Any, w: Any) -> Any:
    lanes = acc.type.count
    bytes_ = ir.VectorType(ir.IntType(8), 4 * lanes)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return e.call(name, acc.type, acc, e.builder.bitcast(a, bytes_), e.builder.bitcast(w, bytes_))


def _by_halves(e: Emit, acc: Any, a: Any, w: Any, step: Callable[[Any, Any, Any], Any]) -> Any:
    b, half = e.builder, ir.VectorType(I32, 8)
    low, high = (ir.Constant(half, list(range(start, start + 8))) for start in (0, 8))
    parts = [step(*(b.shuffle_vector(whole, whole, lanes) for whole in (acc, a, w))) for lanes in (low, high)]
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
                    b.store(products_int8(e, b.load(acc), e.splat(here), factor), acc)
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
