"""A model's numbers as compiled code has them, the rows of a step, and a thread's scratch memory: shapes, no code.

Arrays are flat. Sizes are padded: hidden and dim to 16, outputs of linear layers to 64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """A model's constants."""

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
