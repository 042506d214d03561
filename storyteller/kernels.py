"""The forward pass, compiled: some rows (tokens) through all layers in one call that holds no interpreter lock.

Each row is computed on its own, in an order that its position alone decides: alone, in a crowd, as part of a prompt or
one by one, on any number of threads, the same token after the same tokens gives the same bits.

KV memory is paged: ``[block][layer][kv head][keys, values]``, see `attention.py`; float32, or bytes.

It does not choose tokens (`sampling.py`), own memory or threads (`model.py`). Indices are not checked here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storyteller import attention, tiles, vectors
from storyteller.lanes import TILE_COLUMNS, TILE_ROWS, compiled
from storyteller.tiles import PANEL, SPAN

BLOCK = 16  # the same as story.BLOCK; a constant of the memory's layout here
GROUP = 48
"""Rows that go through a layer together: their numbers stay in the second cache."""
NORM_LAYER, NORM_RMS = range(2)
# columns of Net.where, one row a layer; a linear has four: weights, columns, padded inputs, padded outputs
NORM1_W, NORM1_B, NORM2_W, NORM2_B, QKV, OUT, UP, DOWN = 0, 1, 2, 3, 4, 8, 12, 16
WHERE_WIDTH = 20


Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Array = NDArray[Any]


class Net(NamedTuple):
    """A model's constants. Sizes are padded: hidden and dim to 16, outputs of linears to 64."""

    quantized: bool
    layers: int
    hidden: int
    true_hidden: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int  # leading numbers of a head that turn with the position; 0: none
    inner: int  # of the MLP
    gated: bool
    activation: int
    norm: int
    parallel: bool  # attention and MLP side by side, as GPT-NeoX may
    eps: float
    scale: Floats  # of the attention's scores, one a layer
    small: NDArray[np.int8]
    plain: NDArray[np.float32]
    where: NDArray[np.int64]  # [layers + 1, WHERE_WIDTH]; the last row: final norm, and the head at QKV
    embedding: NDArray[Any]  # [vocabulary * hidden], float32 or bfloat16
    positions: Floats  # [window * hidden], or empty
    cos: Floats  # [window * rotary / 2], or empty
    sin: NDArray[np.float32]


class Rows(NamedTuple):
    """What one call computes: row r is `tokens[r]` at `positions[r]`, its KV blocks begin at tables[starts[r]]."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    starts: NDArray[np.int64]
    tables: NDArray[np.int64]


class Room(NamedTuple):
    """Scratch memory of one thread; flat, float32 unless said."""

    x: Floats  # [rows][hidden]
    q: Floats  # [rows][heads * dim]
    wide: Floats  # [GROUP][widest linear]
    normed: Floats  # [GROUP][widest input]
    small: NDArray[np.uint8]  # [GROUP][widest input]
    small_scale: Floats  # [GROUP][spans]
    small2: NDArray[np.uint8]  # the same for the MLP's input
    small2_scale: NDArray[np.float32]
    normed2: NDArray[np.float32]
    scores: Floats  # [window]
    head: Bytes  # [dim]


@compiled
def linear(
    net: Net, place: Ints, a: Floats, small: Bytes, scale: Floats, y: Floats, ldy: int, rows: int, add: int
) -> None:
    """y[r] (+)= a[r] @ weights + bias for `rows` rows."""
    weights, column, depth, width = place[0], place[1], place[2], place[3]
    spans = -(-depth // SPAN)
    for panel in range(width // PANEL):
        for part in range(PANEL // TILE_COLUMNS):
            n = panel * PANEL + part * TILE_COLUMNS
            r = 0
            while r < rows:
                left = rows - r
                if net.quantized:
                    w = weights + panel * depth * PANEL + part * TILE_COLUMNS * 4
                    if left >= TILE_ROWS:
                        tiles.linear_int8_many(
                            small,
                            r * depth,
                            depth,
                            scale,
                            r * spans,
                            spans,
                            net.small,
                            w,
                            depth // 4,
                            net.plain,
                            column + n,
                            width,
                            y,
                            r * ldy + n,
                            ldy,
                            add,
                        )
                        r += TILE_ROWS
                    elif left >= 2:
                        tiles.linear_int8_two(
                            small,
                            r * depth,
                            depth,
                            scale,
                            r * spans,
                            spans,
                            net.small,
                            w,
                            depth // 4,
                            net.plain,
                            column + n,
                            width,
                            y,
                            r * ldy + n,
                            ldy,
                            add,
                        )
                        r += 2
                    else:
                        tiles.linear_int8_one(
                            small,
                            r * depth,
                            depth,
                            scale,
                            r * spans,
                            spans,
                            net.small,
                            w,
                            depth // 4,
                            net.plain,
                            column + n,
                            width,
                            y,
                            r * ldy + n,
                            ldy,
                            add,
                        )
                        r += 1
                else:
                    w = weights + panel * depth * PANEL + part * TILE_COLUMNS
                    if left >= TILE_ROWS:
                        tiles.linear_f32_many(
                            a, r * depth, depth, net.plain, w, depth, net.plain, column + n, y, r * ldy + n, ldy, add
                        )
                        r += TILE_ROWS
                    elif left >= 2:
                        tiles.linear_f32_two(
                            a, r * depth, depth, net.plain, w, depth, net.plain, column + n, y, r * ldy + n, ldy, add
                        )
                        r += 2
                    else:
                        tiles.linear_f32_one(
                            a, r * depth, depth, net.plain, w, depth, net.plain, column + n, y, r * ldy + n, ldy, add
                        )
                        r += 1


@compiled
def quantize_row(net: Net, x: Floats, at: int, size: int, small: Bytes, small_at: int, scale: Floats, r: int) -> None:
    """One row as int8, with a scale for each span; nothing in float32 mode."""
    if net.quantized:
        spans = -(-size // SPAN)
        for span in range(spans):
            first = span * SPAN
            count = min(SPAN, size - first)
            most = vectors.largest_size(x, at + first, count)
            factor = np.float32(127.0) / most if most > 0 else np.float32(0.0)
            scale[r * spans + span] = most / np.float32(127.0)
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
def rotate(net: Net, x: Floats, at: int, position: int) -> None:
    """Turns the leading numbers of one head, first half against second half."""
    half = net.rotary // 2
    vectors.turn(x, at, half, net.cos, position * half, net.sin, position * half)


@compiled
def half_block(net: Net) -> int:
    """Numbers of KV memory that one head's keys of a block take, or its values."""
    return net.dim * BLOCK + (attention.SCALES if net.quantized else 0)


@compiled
def factor_of(x: Floats, at: int, size: int) -> Any:
    """What a row is multiplied with to become bytes, and its scale: what the bytes are multiplied with."""
    most = vectors.largest_size(x, at, size)
    factor = np.float32(127.0) / most if most > 0 else np.float32(0.0)
    return factor, most / np.float32(127.0)


@compiled
def keep(net: Net, memory: Array, layer: int, qkv: Floats, at: int, position: int, block: int, room: Room) -> None:
    """Turns keys by their position and writes keys and values of one row into its block."""
    slot, dim, half = position % BLOCK, net.dim, half_block(net)
    for head in range(net.kv_heads):
        keys = at + (net.heads + head) * dim
        values = keys + net.kv_heads * dim
        if net.rotary > 0:
            rotate(net, qkv, keys, position)
        place = ((block * net.layers + layer) * net.kv_heads + head) * 2 * half
        if net.quantized:
            factor, scale = factor_of(qkv, keys, dim)
            vectors.to_int8(qkv, keys, dim, factor, room.head, 0)
            attention.keep_keys_int8(room.head, 0, scale, dim, memory, place, slot)
            factor, scale = factor_of(qkv, values, dim)
            vectors.to_signed_int8(qkv, values, dim, factor, room.head, 0)
            attention.keep_values_int8(room.head, 0, scale, dim, memory, place + half, slot)
        else:
            attention.keep_keys_f32(qkv, keys, dim, memory, place, slot)
            attention.keep_values_f32(qkv, values, dim, memory, place + half, slot)


@compiled
def take_queries(net: Net, layer: int, qkv: Floats, at: int, position: int, q: Floats, q_at: int) -> None:
    """Turns the queries of one row, scales them, and keeps them for the attention."""
    for head in range(net.heads):
        if net.rotary > 0:
            rotate(net, qkv, at + head * net.dim, position)
    vectors.scaled(qkv, at, net.heads * net.dim, net.scale[layer], q, q_at)


@compiled
def attend(
    net: Net, memory: Array, layer: int, position: int, tables: Ints, start: int, room: Room, q_at: int, out_at: int
) -> None:
    """Attention of one row over keys 0..position, head by head; the heads of a group read the same keys."""
    dim, half, group = net.dim, half_block(net), net.heads // net.kv_heads
    blocks, whole = position // BLOCK + 1, net.layers * net.kv_heads * 2 * half
    scores, out = room.scores, room.normed
    for head in range(net.heads):
        here = (layer * net.kv_heads + head // group) * 2 * half
        query, target = q_at + head * dim, out_at + head * dim
        if net.quantized:
            factor, scale = factor_of(room.q, query, dim)
            vectors.to_signed_int8(room.q, query, dim, factor, room.head, 0)
            total = vectors.total_int8(room.head, 0, dim)
            for b in range(blocks):
                place = tables[start + b] * whole + here
                attention.score_int8(room.head, 0, total, scale, memory, place, dim, scores, b * BLOCK)
        else:
            for b in range(blocks):
                attention.score_f32(room.q, query, memory, tables[start + b] * whole + here, dim, scores, b * BLOCK)
        # What lies behind the row's own position may be another story's, even no number.
        for i in range(position + 1, blocks * BLOCK):
            scores[i] = -np.inf
        most = vectors.largest(scores, 0, blocks * BLOCK)
        weight = np.float32(1.0) / vectors.exponentials(scores, 0, blocks * BLOCK, most, np.float32(1.0))
        for i in range(dim):
            out[target + i] = np.float32(0.0)
        for b in range(blocks):
            place = tables[start + b] * whole + here + half
            if net.quantized:
                attention.weigh_int8(scores, b * BLOCK, memory, place, dim, out, target)
            else:
                count = min(BLOCK, position + 1 - b * BLOCK)
                attention.weigh_f32(scores, b * BLOCK, count, memory, place, dim, out, target)
        vectors.scaled(out, target, dim, weight, out, target)


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
            take_queries(net, layer, room.wide, r * width, position, room.q, (first + r) * net.heads * net.dim)
            keep(net, memory, layer, room.wide, r * width, position, block, room)


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
            attend(net, memory, layer, position, rows.tables, start, room, row * size, r * size)
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
