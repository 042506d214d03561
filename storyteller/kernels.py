"""A share of a step, compiled: some rows (tokens) from embedding to drawn token in one call without interpreter lock.

Each row is computed on its own, in an order that its position alone decides: alone, in a crowd, as part of a prompt or
one by one, on any number of threads, the same token after the same tokens gives the same bits.

How a row attends is in `heads.py`, how a token is drawn in `sampling.py`. Memory and threads belong to `model.py`.
Indices are not checked here.
"""

from __future__ import annotations

import numpy as np

from storyteller import heads, tiles, vectors
from storyteller.lanes import TILE_COLUMNS, TILE_ROWS, compiled
from storyteller.layout import (
    DOWN,
    GROUP,
    NORM1_B,
    NORM1_W,
    NORM2_B,
    NORM2_W,
    NORM_LAYER,
    OUT,
    QKV,
    UP,
    Array,
    Bytes,
    Floats,
    Ints,
    Net,
    Room,
    Rows,
)
from storyteller.ranking import Desk
from storyteller.sampling import Wishes, draw_all
from storyteller.story import BLOCK
from storyteller.tiles import PANEL, SPAN


@compiled
def linear(
    net: Net, place: Ints, a: Floats, small: Bytes, scale: Floats, y: Floats, ldy: int, rows: int, add: int
) -> None:
    """y[r] (+)= a[r] @ weights + bias for `rows` rows."""
    weights, column, depth, width = place[0], place[1], place[2], place[3]
    spans, words, big = -(-depth // SPAN), depth // 4, net.plain
    for n in range(0, width, TILE_COLUMNS):
        panel, part, c = n // PANEL, n % PANEL, column + n
        w = weights + panel * depth * PANEL + part * (4 if net.quantized else 1)
        r = 0
        while r < rows:
            left, at, s, out = rows - r, r * depth, r * spans, r * ldy + n
            if net.quantized:
                if left >= TILE_ROWS:
                    tiles.linear_int8_many(
                        small, at, depth, scale, s, spans, net.small, w, words, big, c, width, y, out, ldy, add
                    )
                elif left >= 2:
                    tiles.linear_int8_two(
                        small, at, depth, scale, s, spans, net.small, w, words, big, c, width, y, out, ldy, add
                    )
                else:
                    tiles.linear_int8_one(
                        small, at, depth, scale, s, spans, net.small, w, words, big, c, width, y, out, ldy, add
                    )
            elif left >= TILE_ROWS:
                tiles.linear_f32_many(a, at, depth, big, w, depth, big, c, y, out, ldy, add)
            elif left >= 2:
                tiles.linear_f32_two(a, at, depth, big, w, depth, big, c, y, out, ldy, add)
            else:
                tiles.linear_f32_one(a, at, depth, big, w, depth, big, c, y, out, ldy, add)
            r += TILE_ROWS if left >= TILE_ROWS else 2 if left >= 2 else 1


@compiled
def quantize_row(net: Net, x: Floats, at: int, size: int, small: Bytes, small_at: int, scale: Floats, r: int) -> None:
    """One row as int8, with a scale for each span; nothing in float32 mode."""
    if net.quantized:
        spans = -(-size // SPAN)
        for span in range(spans):
            first = span * SPAN
            count = min(SPAN, size - first)
            factor, scale[r * spans + span] = vectors.factor_of(x, at + first, count)
            vectors.to_int8(x, at + first, count, factor, small, small_at + first)


@compiled
def norm_rows(
    net: Net, x: Floats, first: int, rows: int, weight: int, bias: int, y: Floats, small: Bytes, scale: Floats
) -> None:
    """LayerNorm or RMSNorm of rows first.. into y and, quantized, into `small`."""
    size = net.hidden
    for r in range(rows):
        at = (first + r) * size
        mean = np.float32(0.0)
        if net.norm == NORM_LAYER:
            mean = vectors.total(x, at, size) / np.float32(net.true_hidden)
        squares = vectors.total_squares(x, at, size, mean) - np.float32(size - net.true_hidden) * mean * mean
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(net.true_hidden) + np.float32(net.eps))
        vectors.normalise(x, at, size, mean, factor, net.plain, weight, net.plain, bias, y, r * size)
        quantize_row(net, y, r * size, size, small, r * size, scale, r)


@compiled
def activate(net: Net, x: Floats, at: int) -> None:
    """The MLP's curve over one row, times the gate's other half where there is one."""
    kind, size = net.activation, net.inner
    if net.gated:
        if kind == vectors.SILU:
            vectors.gated_silu(x, at, size)
        elif kind == vectors.GELU_TANH:
            vectors.gated_gelu_tanh(x, at, size)
        elif kind == vectors.GELU:
            vectors.gated_gelu(x, at, size)
        else:
            vectors.gated_relu(x, at, size)
    elif kind == vectors.SILU:
        vectors.silu(x, at, size)
    elif kind == vectors.GELU_TANH:
        vectors.gelu_tanh(x, at, size)
    elif kind == vectors.GELU:
        vectors.gelu(x, at, size)
    else:
        vectors.relu(x, at, size)


@compiled
def embed(net: Net, rows: Rows, x: Floats) -> None:
    for r in range(rows.tokens.size):
        vectors.fetch(net.embedding, rows.tokens[r] * net.hidden, net.hidden, x, r * net.hidden)
        if net.positions.size > 0:
            for i in range(net.hidden):
                x[r * net.hidden + i] += net.positions[rows.positions[r] * net.hidden + i]


@compiled
def remember(net: Net, memory: Array, layer: int, rows: Rows, room: Room) -> None:
    """First half of a layer: queries, keys and values of all rows; keys and values go to memory."""
    where = net.where[layer]
    width = where[QKV + 3]
    for first in range(0, rows.tokens.size, GROUP):
        count = min(GROUP, rows.tokens.size - first)
        norm_rows(net, room.x, first, count, where[NORM1_W], where[NORM1_B], room.normed, room.small, room.small_scale)
        linear(net, where[QKV : QKV + 4], room.normed, room.small, room.small_scale, room.wide, width, count, 0)
        for r in range(count):
            position = rows.positions[first + r]
            block = rows.tables[rows.starts[first + r] + position // BLOCK]
            heads.take_queries(net, layer, room.wide, r * width, position, room.q, (first + r) * net.heads * net.dim)
            heads.keep(net, memory, layer, room.wide, r * width, position, block, room)


@compiled
def think(net: Net, memory: Array, layer: int, rows: Rows, room: Room) -> None:
    """Second half of a layer: attention and MLP, both added to x."""
    where = net.where[layer]
    size, width, inputs = net.heads * net.dim, where[UP + 3], where[DOWN + 2]
    for first in range(0, rows.tokens.size, GROUP):
        count = min(GROUP, rows.tokens.size - first)
        if net.parallel:
            norm_rows(
                net, room.x, first, count, where[NORM2_W], where[NORM2_B], room.normed2, room.small2, room.small2_scale
            )
        for r in range(count):
            row = first + r
            position, start = rows.positions[row], rows.starts[row]
            heads.attend(net, memory, layer, position, rows.tables, start, room, row * size, r * size)
            quantize_row(net, room.normed, r * size, size, room.small, r * size, room.small_scale, r)
        x = room.x[first * net.hidden :]
        linear(net, where[OUT : OUT + 4], room.normed, room.small, room.small_scale, x, net.hidden, count, 1)
        if not net.parallel:
            norm_rows(
                net, room.x, first, count, where[NORM2_W], where[NORM2_B], room.normed2, room.small2, room.small2_scale
            )
        linear(net, where[UP : UP + 4], room.normed2, room.small2, room.small2_scale, room.wide, width, count, 0)
        for r in range(count):
            activate(net, room.wide, r * width)
            quantize_row(net, room.wide, r * width, inputs, room.small, r * inputs, room.small_scale, r)
            if not net.quantized:
                for i in range(inputs):
                    room.normed[r * inputs + i] = room.wide[r * width + i]
        linear(net, where[DOWN : DOWN + 4], room.normed, room.small, room.small_scale, x, net.hidden, count, 1)


@compiled
def forward(net: Net, memory: Array, rows: Rows, wanted: Ints, room: Room, logits: Floats) -> None:
    """All layers over `rows`, then logits[i], flat, for each row number wanted[i]."""
    embed(net, rows, room.x)
    for layer in range(net.layers):
        remember(net, memory, layer, rows, room)
        think(net, memory, layer, rows, room)
    where = net.where[net.layers]
    for first in range(0, wanted.size, GROUP):
        count = min(GROUP, wanted.size - first)
        for i in range(count):  # wanted rows move to the front: i never overtakes wanted[i]
            source, target = wanted[first + i] * net.hidden, (first + i) * net.hidden
            for j in range(net.hidden):
                room.x[target + j] = room.x[source + j]
        norm_rows(net, room.x, first, count, where[NORM1_W], where[NORM1_B], room.normed, room.small, room.small_scale)
        y = logits[first * where[QKV + 3] :]
        linear(net, where[QKV : QKV + 4], room.normed, room.small, room.small_scale, y, where[QKV + 3], count, 0)


@compiled
def write(
    net: Net,
    memory: Array,
    rows: Rows,
    wanted: Ints,
    room: Room,
    logits: Floats,
    vocabulary: int,
    width: int,
    wishes: Wishes,
    desk: Desk,
    stamp: int,
    tokens: Ints,
) -> None:
    """One share of a step: all layers, then the next token of each wanted row."""
    forward(net, memory, rows, wanted, room, logits)
    draw_all(logits, vocabulary, width, wishes, desk, stamp, tokens)
