"""Weights as the kernels want them: padded, in panels of columns, int8 with a scale a column or plain float32.

int8: each output column is scaled so that its largest weight is 127. Activations are scaled row by row in the step
itself, never over a batch, so that a row's result does not depend on its neighbours.

It promises that padding is zeros, so that padded lanes stay zero through the whole model. It knows nothing of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storyteller.tiles import PANEL, SPAN

Floats = NDArray[np.float32]


def padded(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass
class Shelf:
    """Grows two flat arrays, `small` (int8) and `plain` (float32), and hands out the places in them."""

    quantized: bool
    small: list[NDArray[np.int8]] = field(default_factory=list)
    plain: list[Floats] = field(default_factory=list)
    small_size: int = 0
    plain_size: int = 0

    def put(self, values: Floats) -> int:
        """Stores one vector, padded to 16 numbers; its place in `plain`."""
        place = self.plain_size
        flat = np.zeros(padded(values.size, 16), np.float32)
        flat[: values.size] = values.reshape(-1)
        self.plain.append(flat)
        self.plain_size += flat.size
        return place

    def put_linear(self, weight: Floats, bias: Floats | None) -> tuple[int, int, int, int]:
        """Stores y = x @ weight.T + bias; weight is [outputs, inputs].

        Returns:
            places of the weights (in `small` or `plain`) and of the columns' numbers in `plain` (int8: scales, biases,
            and for each span -128 times the column's sum; float32: biases), padded inputs, padded outputs.
        """
        outputs, inputs = padded(weight.shape[0], PANEL), padded(weight.shape[1], 16)
        whole = np.zeros((outputs, inputs), np.float32)
        whole[: weight.shape[0], : weight.shape[1]] = weight
        biases = np.zeros(outputs, np.float32)
        if bias is not None:
            biases[: bias.size] = bias
        if not self.quantized:
            panels = whole.reshape(outputs // PANEL, PANEL, inputs).transpose(0, 2, 1)
            return self.put(np.ascontiguousarray(panels)), self.put(biases), inputs, outputs
        codes, scales = to_int8(whole)
        starts = np.arange(0, inputs, SPAN)
        lost = -128 * np.add.reduceat(codes, starts, axis=1, dtype=np.int32)  # [outputs, spans]
        panels8 = codes.reshape(outputs // PANEL, PANEL, inputs // 4, 4).transpose(0, 2, 1, 3)
        place = self.small_size
        self.small.append(np.ascontiguousarray(panels8).reshape(-1))
        self.small_size += codes.size
        return place, self.put(np.concatenate([scales, biases, lost.T.reshape(-1).view(np.float32)])), inputs, outputs

    def arrays(self) -> tuple[NDArray[np.int8], Floats]:
        """Both arrays whole; the shelf is empty afterwards."""
        return gathered(self.small, np.int8), gathered(self.plain, np.float32)


def gathered(parts: list[Any], kind: Any) -> NDArray[Any]:
    """The parts one behind the other, beginning at a cache line; empties the list as it goes."""
    whole = aligned(sum(part.size for part in parts), kind)
    place = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        whole[place : place + part.size] = part
        place += part.size
    return whole


def aligned(size: int, kind: Any) -> NDArray[Any]:
    """A zeroed flat array that begins at a cache line."""
    room = np.zeros(size * np.dtype(kind).itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size * np.dtype(kind).itemsize].view(kind)


def to_int8(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Codes within ±127 and one scale a row: weight ≈ codes * scales[:, None]."""
    scales = (np.abs(weight).max(axis=1) / np.float32(127)).astype(np.float32)
    safe = np.where(scales > 0, scales, np.float32(1))
    return np.rint(weight / safe[:, None]).clip(-127, 127).astype(np.int8), scales


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """The upper 16 bits, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
