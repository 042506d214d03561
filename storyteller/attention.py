"""Attention over one block of sixteen keys and values, and how they lie in memory.

Keys and values are float32 or bfloat16 (in uint16). For one layer and one key head a block is keys, then values:

* float32: keys ``[dim][16]``, values ``[16][dim]``;
* bfloat16: keys ``[dim / 2][16][2]``, values ``[16][dim]``. Two neighbours are read as one 32-bit word, whose halves
  are two float32 numbers after a shift and a mask: cheaper than widening sixteen at a time.

All are called from compiled code with ``(array, offset)`` pairs; dims are multiples of sixteen. While a block is read
the next one, `soon`, is asked for. It promises the bits of `lanes.py`; both kinds of memory sum in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from storyteller.lanes import F32, I32, LANES, VF, VI, Emit, Pointer, cgutils, lanes
from storyteller.vectors import each


def _halves(e: Emit, memory: Pointer, place: Any) -> tuple[Any, Any]:
    """Thirty-two bfloat16 numbers as two float32 vectors: those at even places, those at odd places."""
    b = e.builder
    words = e.load(memory, place, VI)
    even = b.shl(words, ir.Constant(VI, [16] * LANES))
    return b.bitcast(even, VF), b.bitcast(b.and_(words, ir.Constant(VI, [-65536] * LANES)), VF)


@lanes()
def score(e: Emit, q: Pointer, k: Pointer, dim: Any, out: Pointer, soon: Pointer) -> None:
    """out[t] = q·k[t] for the sixteen tokens of one block."""
    b, narrow = e.builder, e.is_narrow(k)
    sums = [e.variable(e.const(0.0)) for _ in range(4)]
    with cgutils.for_range(b, b.udiv(dim, e.index(4))) as loop:
        first = b.mul(loop.index, e.index(4))
        places = [b.add(first, e.index(i)) for i in range(4)]
        lines = [b.mul(d, e.index(LANES)) for d in places]
        for line in lines[:: 2 if narrow else 1]:
            e.prefetch(soon, line)
        pairs = [half for line in lines[::2] for half in _halves(e, k, line)] if narrow else []
        keys = pairs or [e.load(k, line) for line in lines]
        for acc, d, key in zip(sums, places, keys, strict=True):
            b.store(e.fma(e.splat(e.load(q, d, F32)), key, b.load(acc)), acc)
    one, two, three, four = (b.load(acc) for acc in sums)
    e.store(b.fadd(b.fadd(one, two), b.fadd(three, four)), out, e.index(0))


@lanes()
def weigh(e: Emit, p: Pointer, count: Any, v: Pointer, dim: Any, out: Pointer, soon: Pointer) -> None:
    """out += p[t] * v[t] over the first `count` tokens of one block; see `finish` for the order of `out`."""
    b, narrow = e.builder, e.is_narrow(v)

    def columns(start: Any, vectors: int, paired: bool) -> None:
        places = [b.add(start, e.index(n * LANES)) for n in range(vectors)]
        sums = [e.variable(e.load(out, place)) for place in places]
        with cgutils.for_range(b, count) as loop:
            weight, row = e.splat(e.load(p, loop.index, F32)), b.mul(loop.index, dim)
            here = [b.add(row, place) for place in places]
            for place in here[:: 2 if paired else 1]:
                e.prefetch(soon, place)
            if paired:
                values = [half for place in here[::2] for half in _halves(e, v, place)]
            else:
                values = [e.wide(v, place) for place in here]
            for acc, value in zip(sums, values, strict=True):
                b.store(e.fma(weight, value, b.load(acc)), acc)
        for acc, place in zip(sums, places, strict=True):
            e.store(b.load(acc), out, place)

    _by_columns(e, dim, [(4, narrow), (2, narrow), (1, False)], columns)


def _by_columns(e: Emit, dim: Any, kinds: list[tuple[int, bool]], columns: Callable[[Any, int, bool], None]) -> None:
    """Runs `columns` over a row: as many of the widest kind as fit, then the next kind."""
    b, done = e.builder, e.index(0)
    for vectors, paired in kinds:
        width = e.index(vectors * LANES)
        times = b.udiv(b.sub(dim, done), width)
        start = done
        with cgutils.for_range(b, times) as loop:
            columns(b.add(start, b.mul(loop.index, width)), vectors, paired)
        done = b.add(start, b.mul(times, width))


@lanes()
def finish(e: Emit, out: Pointer, dim: Any, factor: Any, memory: Pointer) -> None:
    """out *= factor, and back in the order of dims: over bfloat16 `weigh` keeps even and odd places apart."""
    b, scale, narrow = e.builder, e.splat(factor), e.is_narrow(memory)

    def columns(start: Any, vectors: int, paired: bool) -> None:
        places = [b.add(start, e.index(n * LANES)) for n in range(vectors)]
        found = [b.fmul(e.load(out, place), scale) for place in places]
        if paired:
            orders = [[half + i // 2 + LANES * (i % 2) for i in range(LANES)] for half in (0, LANES // 2)]
            found = [b.shuffle_vector(*found, ir.Constant(VI, order)) for order in orders]
        for value, place in zip(found, places, strict=True):
            e.store(value, out, place)

    _by_columns(e, dim, [(2, narrow), (1, False)], columns)


@lanes()
def keep_values(e: Emit, x: Pointer, dim: Any, memory: Pointer) -> None:
    """Writes one token's values; `memory` is where they begin."""
    each(e, dim, lambda i: e.store(e.narrow(e.load(x, i), memory), memory, i))


@lanes()
def keep_keys(e: Emit, x: Pointer, dim: Any, memory: Pointer, slot: Any) -> None:
    """Writes one token's keys at its slot of a block; `memory` is where the block's keys begin."""
    b, pair = e.builder, 2 if e.is_narrow(memory) else 1
    column = b.mul(slot, e.index(pair))

    def step(i: Any) -> None:
        values = e.narrow(e.load(x, i), memory)
        for lane in range(LANES):
            line = b.mul(b.add(i, e.index(lane - lane % pair)), e.index(LANES))
            place = b.add(b.add(line, column), e.index(lane % pair))
            e.store(b.extract_element(values, I32(lane)), memory, place)

    each(e, dim, step)
