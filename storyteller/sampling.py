"""From one row of logits and its settings to the next token, compiled, without sorting the vocabulary.

The order is that of transformers: repetition penalty, temperature, top_k (ties with the last one stay), top_p (the
shortest head of the sorted list that reaches it), min_p (against the most likely token). Temperature 0 and top_p 0 are
greedy; ties go to the lowest id. The random number comes from (seed, position) alone.

It promises that a row's token depends on that row, its settings and its position only, and that logits which are no
numbers harm nobody else. It does not know stories or stop ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storyteller import tiles
from storyteller.kernels import Floats, Ints
from storyteller.lanes import compiled


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


class Desk(NamedTuple):
    """Scratch memory of one thread."""

    order: NDArray[np.int64]  # [vocabulary]
    stamps: NDArray[np.int64]  # [vocabulary]: the last row number that penalised a token


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
def greedy(logits: Floats, at: int, vocabulary: int) -> int:
    best, most = 0, np.float32(-np.inf)
    for i in range(vocabulary):
        if logits[at + i] > most:
            best, most = i, logits[at + i]
    return best


@compiled
def before(weights: Floats, at: int, a: int, b: int) -> bool:
    """Whether token a comes before token b: heavier, or as heavy with the lower id."""
    x, y = weights[at + a], weights[at + b]
    return x > y or (x == y and a < b)


@compiled
def sift(weights: Floats, at: int, order: Ints, root: int, size: int) -> None:
    """Restores a heap whose root is the token that comes last."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and before(weights, at, order[child], order[child + 1]):
            child += 1
        if not before(weights, at, order[root], order[child]):
            return
        order[root], order[child] = order[child], order[root]
        root = child


@compiled
def sort(weights: Floats, at: int, order: Ints, size: int) -> None:
    """Sorts order[:size], most likely first."""
    for root in range(size // 2 - 1, -1, -1):
        sift(weights, at, order, root, size)
    for last in range(size - 1, 0, -1):
        order[0], order[last] = order[last], order[0]
        sift(weights, at, order, 0, last)


@compiled
def lightest_of_top(weights: Floats, at: int, vocabulary: int, k: int, order: Ints) -> Any:
    """The weight of the k-th most likely token."""
    for i in range(k):
        order[i] = i
    for root in range(k // 2 - 1, -1, -1):
        sift(weights, at, order, root, k)
    for i in range(k, vocabulary):
        if weights[at + i] > weights[at + order[0]]:
            order[0] = i
            sift(weights, at, order, 0, k)
    return weights[at + order[0]]


@compiled
def cut_top_p(weights: Floats, at: int, vocabulary: int, top_p: float, order: Ints) -> None:
    """Sets everything behind the head that holds `top_p` of the mass to zero."""
    size, mass = 0, 0.0
    for i in range(vocabulary):
        if weights[at + i] > 0:
            order[size] = i
            size += 1
            mass += weights[at + i]
    sort(weights, at, order, size)
    reached = 0.0
    for i in range(size):
        token = order[i]
        if i > 0 and reached >= top_p * mass:
            weights[at + token] = 0
        else:
            reached += weights[at + token]


@compiled
def pick(weights: Floats, at: int, vocabulary: int, lot: float) -> int:
    """The token at share `lot` of the mass, in the order of ids."""
    mass = 0.0
    for i in range(vocabulary):
        mass += weights[at + i]
    target, reached, last = lot * mass, 0.0, 0
    for i in range(vocabulary):
        if weights[at + i] > 0:
            reached += weights[at + i]
            last = i
            if reached > target:
                return i
    return last


@compiled
def draw(logits: Floats, at: int, vocabulary: int, width: int, wishes: Wishes, i: int, desk: Desk, stamp: int) -> int:
    """The next token of one row; its logits are used up. `width` is the padded vocabulary."""
    if wishes.penalty[i] != 1.0:
        begin, end = wishes.history_end[i - 1] if i > 0 else 0, wishes.history_end[i]
        penalise(logits, at, vocabulary, wishes.history, begin, end, wishes.penalty[i], desk.stamps, stamp)
    if wishes.temperature[i] <= 0.0 or wishes.top_p[i] <= 0.0:
        return greedy(logits, at, vocabulary)
    for j in range(vocabulary, width):
        logits[at + j] = -np.inf
    most = tiles.largest(logits, at, width)
    if not np.isfinite(most):
        return greedy(logits, at, vocabulary)
    k = wishes.top_k[i]
    floor: Any = np.float32(-np.inf)
    if 0 < k < vocabulary:
        floor = lightest_of_top(logits, at, vocabulary, k, desk.order)
    for j in range(vocabulary):
        if not logits[at + j] >= floor:
            logits[at + j] = -np.inf
    factor = np.float32(min(1.0 / wishes.temperature[i], 1e30))
    tiles.exponentials(logits, at, width, most, factor)
    if wishes.top_p[i] < 1.0:
        cut_top_p(logits, at, vocabulary, wishes.top_p[i], desk.order)
    least = np.float32(wishes.min_p[i])
    if least > 0:
        for j in range(vocabulary):
            if logits[at + j] < least:
                logits[at + j] = 0
    return pick(logits, at, vocabulary, uniform(wishes.seed[i], wishes.position[i]))


@compiled
def draw_all(logits: Floats, vocabulary: int, width: int, wishes: Wishes, desk: Desk, stamp: int, tokens: Ints) -> None:
    """tokens[i] for each row i of logits."""
    for i in range(tokens.size):
        tokens[i] = draw(logits, i * width, vocabulary, width, wishes, i, desk, stamp + i)
