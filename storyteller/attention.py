"""Attention over one block of sixteen keys and values, and how they lie in memory.

For one layer and one key head a block is keys, then values, each `half` numbers of the memory:

* float32: keys ``[dim][16]``, values ``[16][dim]``;
* int8, in bytes: keys ``[dim / 4][16][4]`` and their sixteen scales, values ``[4][dim][4]`` (four tokens side by side)
  and theirs. A scale belongs to one token and head. Queries and weights are rounded too, a query with one scale a
  head, the weights of a block against their largest, so that all products are made of bytes.

All are called from compiled code with ``(array, offset)`` pairs; dims are multiples of sixteen. While one half of a
block is read, the line behind it is asked for: after keys the values of the same block, after those the next head's
keys. So each arrives a whole pass before it is wanted. It promises the bits of `lanes.py`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from storyteller.lanes import F32, I32, LANES, UNSIGNED, VB, VF, VI, Emit, Pointer, cgutils, lanes
from storyteller.tiles import products_int8
from storyteller.vectors import each

SCALES = 4 * LANES
"""Bytes of the scales behind a block's keys, and behind its values."""


@lanes()
def score_f32(e: Emit, q: Pointer, k: Pointer, dim: Any, out: Pointer) -> None:
    """out[t] = q·k[t] for the sixteen tokens of one block."""
    b = e.builder
    sums = [e.variable(e.const(0.0)) for _ in range(4)]
    behind = b.mul(dim, e.index(LANES))
    with cgutils.for_range(b, b.udiv(dim, e.index(4))) as loop:
        first = b.mul(loop.index, e.index(4))
        for i, acc in enumerate(sums):
            d = b.add(first, e.index(i))
            line = b.mul(d, e.index(LANES))
            e.prefetch(k, b.add(behind, line))
            b.store(e.fma(e.splat(e.load(q, d, F32)), e.load(k, line), b.load(acc)), acc)
    one, two, three, four = (b.load(acc) for acc in sums)
    e.store(b.fadd(b.fadd(one, two), b.fadd(three, four)), out, e.index(0))


@lanes()
def score_int8(e: Emit, q: Pointer, q_total: Any, q_scale: Any, k: Pointer, dim: Any, out: Pointer) -> None:
    """The same of signed bytes; `q_total` is their sum."""
    b = e.builder
    size = b.mul(dim, e.index(LANES))
    behind = b.add(size, e.index(SCALES))
    zero = ir.Constant(VI, [0] * LANES)
    lost = e.splat(b.mul(b.trunc(q_total, I32), I32(-128))) if UNSIGNED else zero  # by the 128 that is in every key
    sums = [e.variable(start) for start in (lost, zero, zero, zero)]
    with cgutils.for_range(b, b.udiv(dim, e.index(LANES))) as loop:
        for i, acc in enumerate(sums):
            word = b.add(b.mul(loop.index, e.index(4)), e.index(i))
            line = b.mul(word, e.index(4 * LANES))
            e.prefetch(k, b.add(behind, line))
            query = e.splat(e.load(q, b.mul(word, e.index(4)), I32))
            b.store(products_int8(e, b.load(acc), e.load(k, line, VI), query), acc)
    e.prefetch(k, b.add(behind, size))
    one, two, three, four = (b.load(acc) for acc in sums)
    total = b.sitofp(b.add(b.add(one, two), b.add(three, four)), VF)
    e.store(b.fmul(total, b.fmul(e.load(k, size), e.splat(q_scale))), out, e.index(0))


@lanes()
def weigh_f32(e: Emit, p: Pointer, count: Any, v: Pointer, dim: Any, out: Pointer) -> None:
    """out += p[t] * v[t] over the first `count` tokens of one block."""
    b = e.builder
    behind = b.mul(dim, e.index(LANES))

    def column(place: Any) -> None:
        acc = e.variable(e.load(out, place))
        with cgutils.for_range(b, count) as loop:
            here = b.add(b.mul(loop.index, dim), place)
            e.prefetch(v, b.add(behind, here))
            b.store(e.fma(e.splat(e.load(p, loop.index, F32)), e.load(v, here), b.load(acc)), acc)
        e.store(b.load(acc), out, place)

    each(e, dim, column)


@lanes()
def weigh_int8(e: Emit, p: Pointer, v: Pointer, dim: Any, out: Pointer) -> None:
    """The same over all sixteen tokens; a token without weight counts for nothing, whatever stands in its place."""
    b = e.builder
    size = b.mul(dim, e.index(LANES))
    behind = b.add(size, e.index(SCALES))
    weights = e.load(p, e.index(0))
    is_there = b.fcmp_ordered("!=", weights, e.const(0.0))
    weights = b.select(is_there, b.fmul(weights, e.load(v, size)), e.const(0.0))
    most = e.halve(weights, e.larger)
    none, top = ir.Constant(F32, 0.0), ir.Constant(F32, 127.0)
    is_weighty = b.fcmp_ordered(">", most, ir.Constant(F32, 2.0**-100))  # below, the division could overflow
    factor = b.select(is_weighty, b.fdiv(top, most), none)
    whole = e.call("llvm.rint.v16f32", VF, e.larger(b.fmul(weights, e.splat(factor)), e.const(0.0)))
    words = b.bitcast(b.trunc(b.fptosi(whole, VI), VB), ir.VectorType(I32, 4))
    rounded = [e.splat(b.extract_element(words, I32(group))) for group in range(4)]
    unit = e.splat(b.fdiv(most, top))

    def column(place: Any) -> None:
        acc = ir.Constant(VI, [0] * LANES)
        for group, word in enumerate(rounded):
            here = b.mul(b.add(b.mul(dim, e.index(group)), place), e.index(4))
            e.prefetch(v, b.add(behind, here))
            acc = products_int8(e, acc, word, e.load(v, here, VI))
        e.store(e.fma(b.sitofp(acc, VF), unit, e.load(out, place)), out, place)

    each(e, dim, column)
    e.prefetch(v, b.add(behind, size))


@lanes()
def keep_keys_f32(e: Emit, x: Pointer, dim: Any, memory: Pointer, slot: Any) -> None:
    """Writes one token's keys at its slot of a block; `memory` is where the block's keys begin."""
    b = e.builder
    with cgutils.for_range(b, dim) as loop:
        e.store(e.load(x, loop.index, F32), memory, b.add(b.mul(loop.index, e.index(LANES)), slot))


@lanes()
def keep_values_f32(e: Emit, x: Pointer, dim: Any, memory: Pointer, slot: Any) -> None:
    """The same of its values."""
    row = e.builder.mul(slot, dim)
    each(e, dim, lambda i: e.store(e.load(x, i), memory, e.builder.add(row, i)))


@lanes()
def keep_keys_int8(e: Emit, x: Pointer, factor: Any, dim: Any, memory: Pointer, slot: Any) -> None:
    """Writes one token's keys, as `vectors.to_int8` makes them, and their scale."""
    b = e.builder
    place = b.mul(slot, e.index(4))
    with cgutils.for_range(b, b.udiv(dim, e.index(4))) as loop:
        word = e.load(x, b.mul(loop.index, e.index(4)), I32)
        e.store(word, memory, b.add(b.mul(loop.index, e.index(4 * LANES)), place))
    e.store(factor, memory, b.add(b.mul(dim, e.index(LANES)), place))


@lanes()
def keep_values_int8(e: Emit, x: Pointer, factor: Any, dim: Any, memory: Pointer, slot: Any) -> None:
    """The same of its values, as signed bytes: one byte in each of the words that four tokens share."""
    b, four = e.builder, e.index(4)
    first = b.mul(b.udiv(slot, four), b.mul(dim, four))
    shift = b.mul(b.trunc(b.urem(slot, four), I32), I32(8))
    shifts, others = e.splat(shift), e.splat(b.xor(b.shl(I32(0xFF), shift), I32(-1)))

    def step(i: Any) -> None:
        place = b.add(first, b.mul(i, four))
        mine = b.shl(b.zext(e.load(x, i, VB), VI), shifts)
        e.store(b.or_(b.and_(e.load(memory, place, VI), others), mine), memory, place)

    each(e, dim, step)
    e.store(factor, memory, b.add(b.mul(dim, e.index(LANES)), b.mul(slot, four)))
