"""From one row of logits and its settings to the next token, compiled, without sorting the vocabulary.

The order is that of transformers: repetition penalty, temperature, top_k (ties with the last one stay), top_p (the
shortest head of the sorted list that reaches it), min_p (against the most likely token). Temperature 0 and top_p 0 are
greedy; ties go to the lowest id. The random number comes from (seed, position) alone.

It promises that a row's token depends on that row, its settings and its position only, and that logits which are no
numbers harm nobody else. It does not know stories or stop ids.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storyteller import vectors
from storyteller.lanes import compiled
from storyteller.layout import Floats, Ints
from storyteller.ranking import FEW, Desk, cut, gather_top
from storyteller.story import Sampling, numbers


class Wishes(NamedTuple):
    """Settings of the rows that want a token; all arrays have one element a row."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    penalty: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: NDArray[np.int64]  # of the token to be drawn
    history: NDArray[np.int64]  # of all rows that have a penalty, one behind the other
    history_end: NDArray[np.int64]  # where each row's history ends; it begins where the one before ends


def wishes_of(settings: Sequence[Sampling], positions: Sequence[int], histories: Sequence[array[int]]) -> Wishes:
    """What the rows want: `positions` of the tokens to be drawn, and all tokens before them."""
    packed = np.frombuffer(bytearray().join(map(_packed, settings)), _SETTINGS)
    penalised = [
        history if setting.repetition_penalty != 1.0 else _NOTHING
        for history, setting in zip(histories, settings, strict=True)
    ]

    def column(name: str) -> NDArray[Any]:
        # As it is, one of one row is contiguous and one of more is not: two types, and one more to compile.
        return np.ascontiguousarray(packed[name])

    return Wishes(
        column("temperature"),
        column("top_k"),
        column("top_p"),
        column("min_p"),
        column("penalty"),
        column("seed"),
        np.array(positions, np.int64),
        np.frombuffer(bytearray().join(penalised), np.int64),
        np.cumsum([len(history) for history in penalised], dtype=np.int64),
    )


# The same fields in the same order as `Sampling`.
_SETTINGS = np.dtype([
    ("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("penalty", "f8"), ("seed", "u8"),
])  # fmt: skip
_NOTHING = numbers()


@lru_cache(maxsize=4096)
def _packed(setting: Sampling) -> bytes:
    return struct.pack("=dqdddQ", *setting)


@compiled
def mixed(x: Any) -> Any:
    """The finaliser of SplitMix64: 64 bits in, 64 well-mixed bits out."""
    x = np.uint64(x)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def uniform(seed: Any, position: Any) -> Any:
    """A number in [0, 1) that depends on seed and position alone."""
    start = mixed(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
    x = mixed(start + np.uint64(position + 1) * np.uint64(0x9E3779B97F4A7C15))
    return np.float64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def penalise(
    logits: Floats,
    at: int,
    vocabulary: int,
    history: Ints,
    begin: int,
    end: int,
    penalty: float,
    stamps: Ints,
    stamp: int,
) -> None:
    """Makes every token of the history less likely, once."""
    for i in range(begin, end):
        token = history[i]
        if 0 <= token < vocabulary and stamps[token] != stamp:
            stamps[token] = stamp
            value = logits[at + token]
            logits[at + token] = value / np.float32(penalty) if value > 0 else value * np.float32(penalty)


@compiled
def greedy(logits: Floats, at: int, vocabulary: int, most: float, peaks: Floats) -> int:
    """The lowest id whose logit is `most`; 0 where there is none."""
    best = vocabulary
    for i in range(-(-vocabulary // 256) * 16):
        if peaks[i] == most:
            first = i // 16 * 256 + i % 16
            for j in range(first, min(first + 256, vocabulary), 16):
                if logits[at + j] == most:
                    best = min(best, j)
                    break
    return best if best < vocabulary else 0


@compiled
def draw_few(
    logits: Floats, at: int, width: int, k: int, most: float, wishes: Wishes, i: int, lot: float, desk: Desk
) -> Any:
    """Draws from the k most likely tokens."""
    values = desk.values
    size = gather_top(logits, at, width, k, most, desk)
    whole = -(-size // 16) * 16
    for j in range(size, whole):
        values[j] = -np.inf
    mass: Any = np.float64(vectors.exponentials(values, 0, whole, values[0], steepness(wishes.temperature[i])))
    if wishes.top_p[i] < 1.0:
        reached, kept = 0.0, 0
        while kept < size and (kept == 0 or reached < wishes.top_p[i] * mass):
            reached += values[kept]
            kept += 1
        size, mass = kept, reached
    if wishes.min_p[i] > 0.0:
        mass, kept = 0.0, 0
        while kept < size and (kept == 0 or values[kept] >= wishes.min_p[i]):
            mass += values[kept]
            kept += 1
        size = kept
    reached = 0.0
    for j in range(size):
        reached += values[j]
        if reached > lot * mass:
            return desk.ids[j]
    return desk.ids[size - 1]


@compiled
def steepness(temperature: float) -> Any:
    return np.float32(min(1.0 / temperature, 1e30))


@compiled
def draw_many(
    logits: Floats, at: int, vocabulary: int, width: int, most: float, wishes: Wishes, i: int, lot: float, desk: Desk
) -> int:
    """Draws from the whole vocabulary, cut by top_k, top_p and min_p; the logits become weights."""
    vectors.exponentials(logits, at, width, most, steepness(wishes.temperature[i]))
    if 0 < wishes.top_k[i] < vocabulary:
        cut(logits, at, vocabulary, np.float64(wishes.top_k[i]), 0.0, desk)
    if wishes.top_p[i] < 1.0:
        cut(logits, at, vocabulary, 0.0, wishes.top_p[i], desk)
    least = np.float32(wishes.min_p[i])
    if least > 0:
        for j in range(at, at + vocabulary):
            logits[j] = logits[j] if logits[j] >= least else np.float32(0.0)
    return pick(logits, at, width, lot)


@compiled
def pick(weights: Floats, at: int, width: int, lot: float) -> int:
    """The id at share `lot` of the sum of weights, in the order of ids."""
    mass = 0.0
    for start in range(0, width, 256):
        mass += vectors.total(weights, at + start, min(256, width - start))
    target, reached, last = lot * mass, 0.0, 0
    for start in range(0, width, 256):
        size = min(256, width - start)
        block = vectors.total(weights, at + start, size)
        if reached + block > target:
            for j in range(start, start + size):
                if weights[at + j] > 0:
                    reached += weights[at + j]
                    last = j
                    if reached > target:
                        return j
            return last  # the block's sum was rounded up
        reached += block
        if block > 0:
            last = start
    for j in range(last, min(last + 256, width)):
        if weights[at + j] > 0:
            last = j
    return last


@compiled
def draw(logits: Floats, at: int, vocabulary: int, width: int, wishes: Wishes, i: int, desk: Desk, stamp: int) -> Any:
    """The next token of one row; its logits are used up. `width` is the padded vocabulary."""
    if wishes.penalty[i] != 1.0:
        begin, end = wishes.history_end[i - 1] if i > 0 else 0, wishes.history_end[i]
        penalise(logits, at, vocabulary, wishes.history, begin, end, wishes.penalty[i], desk.stamps, stamp)
    for j in range(vocabulary, width):
        logits[at + j] = -np.inf
    vectors.peaks(logits, at, width, desk.peaks, 0)
    most = vectors.largest(desk.peaks, 0, -(-width // 256) * 16)
    k = wishes.top_k[i]
    if wishes.temperature[i] <= 0.0 or wishes.top_p[i] <= 0.0 or k == 1 or not np.isfinite(most):
        return greedy(logits, at, vocabulary, most, desk.peaks)
    lot = uniform(wishes.seed[i], wishes.position[i])
    if 0 < k <= min(FEW, vocabulary - 1):
        return draw_few(logits, at, width, k, most, wishes, i, lot, desk)
    return draw_many(logits, at, vocabulary, width, most, wishes, i, lot, desk)


@compiled
def draw_all(logits: Floats, vocabulary: int, width: int, wishes: Wishes, desk: Desk, stamp: int, tokens: Ints) -> None:
    """tokens[i] for each row i of logits."""
    for i in range(tokens.size):
        tokens[i] = draw(logits, i * width, vocabulary, width, wishes, i, desk, stamp + i)
