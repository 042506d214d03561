"""Attention of one row, compiled: its keys and values into their block, its queries over all blocks before it.

KV memory is paged: ``[block][layer][kv head][keys, values]``, float32 or bytes; `attention.py` has the blocks.
"""

from __future__ import annotations

import numpy as np

from storyteller import attention, vectors
from storyteller.lanes import compiled
from storyteller.layout import Array, Floats, Ints, Net, Room
from storyteller.story import BLOCK


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
            factor, scale = vectors.factor_of(qkv, keys, dim)
            vectors.to_int8(qkv, keys, dim, factor, room.head, 0)
            attention.keep_keys_int8(room.head, 0, scale, dim, memory, place, slot)
            factor, scale = vectors.factor_of(qkv, values, dim)
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
            factor, scale = vectors.factor_of(room.q, query, dim)
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
