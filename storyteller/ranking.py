"""The largest of many numbers, compiled, without sorting them all: which tokens stay when a row of logits is cut.

Few are gathered above a floor and sorted; many are cut by a histogram of their upper bits, of which one bin is sorted.
Equal numbers are in the order of their ids. It does not know what a setting is (`sampling.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storyteller.lanes import compiled
from storyteller.layout import Floats, Ints


class Desk(NamedTuple):
    """Scratch memory of one thread."""

    stamps: Ints  # [vocabulary]: the last row number that penalised a token
    peaks: Floats  # [padded vocabulary / 16]
    ids: Ints  # [vocabulary]
    values: Floats  # [vocabulary + 16]: weights of `ids`
    masses: NDArray[np.float64]  # [BINS]


BINS = 0x3F80 + 1
"""Upper halves of the floats in [0, 1]: 128 bins for each power of two."""
FEW = 1024
"""Up to so many candidates are gathered and sorted; above, the vocabulary is cut by a histogram."""
SHORT = 256
"""Up to so many are sorted by insertion: up to ten times as fast as a heap, whose every step is a wrong guess."""


def make_desk(vocabulary: int, width: int) -> Desk:
    """`width` is the padded vocabulary."""
    return Desk(
        np.full(vocabulary, -1, np.int64), np.zeros(-(-width // 256) * 16, np.float32), np.zeros(vocabulary, np.int64),
        np.zeros(vocabulary + 16, np.float32), np.zeros(BINS, np.float64),
    )  # fmt: skip


@compiled
def sift(values: Floats, ids: Ints, root: int, size: int) -> None:
    """Restores a heap whose root comes last: the smallest value, of equal ones that with the highest id."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and comes_later(values, ids, child + 1, child):
            child += 1
        if not comes_later(values, ids, child, root):
            return
        values[root], values[child] = values[child], values[root]
        ids[root], ids[child] = ids[child], ids[root]
        root = child


@compiled
def comes_later(values: Floats, ids: Ints, a: int, b: int) -> Any:
    return values[a] < values[b] or (values[a] == values[b] and ids[a] > ids[b])


@compiled
def sort(values: Floats, ids: Ints, size: int) -> None:
    """Sorts both arrays, largest value first, equal values by id: short ones by insertion, long ones as a heap."""
    if size <= SHORT:
        for i in range(1, size):
            value, id_, j = values[i], ids[i], i
            while j > 0 and (values[j - 1] < value or (values[j - 1] == value and ids[j - 1] > id_)):
                values[j], ids[j] = values[j - 1], ids[j - 1]
                j -= 1
            values[j], ids[j] = value, id_
        return
    for root in range(size // 2 - 1, -1, -1):
        sift(values, ids, root, size)
    for last in range(size - 1, 0, -1):
        values[0], values[last] = values[last], values[0]
        ids[0], ids[last] = ids[last], ids[0]
        sift(values, ids, 0, last)


@compiled
def num_from(values: Floats, size: int, floor: Any) -> int:
    """How many of the values reach the floor."""
    count = 0
    for i in range(size):
        count += values[i] >= floor
    return count


@compiled
def floor_of(values: Floats, size: int, k: int, most: float) -> Any:
    """A number that at least `k` of the values reach, and not many more; `most` is their largest."""
    high, step = np.float32(most), np.float32(1.0)
    low = high - step
    while num_from(values, size, low) < k:
        step *= np.float32(2.0)
        low = high - step
    for _ in range(16):
        middle = (low + high) * np.float32(0.5)
        count = num_from(values, size, middle)
        if count < k:
            high = middle
        else:
            low = middle
            if count <= k + k // 4:
                break
    return low


@compiled
def gather_top(logits: Floats, at: int, width: int, k: int, most: float, desk: Desk) -> int:
    """The k largest logits, and those as large as the k-th, sorted into desk.values and desk.ids; how many.

    A number that k of the peaks reach is a floor: k logits at least reach it, and few others do.
    """
    values, ids, num_peaks = desk.values, desk.ids, -(-width // 256) * 16
    floor = floor_of(desk.peaks, num_peaks, k, most) if k <= num_peaks else np.float32(-np.inf)
    size = 0
    for i in range(num_peaks):
        if desk.peaks[i] >= floor:
            first = i // 16 * 256 + i % 16
            for j in range(first, min(first + 256, width), 16):
                if logits[at + j] >= floor and logits[at + j] > -np.inf:
                    values[size], ids[size] = logits[at + j], j
                    size += 1
    sort(values, ids, size)
    kept = min(k, size)
    while kept < size and values[kept] == values[kept - 1]:
        kept += 1
    return kept


@compiled
def cut(weights: Floats, at: int, vocabulary: int, count: float, share: float, desk: Desk) -> None:
    """Keeps the heaviest weights, until `count` of them or `share` of their sum is reached; sets the others to zero.

    A histogram finds the bin where that happens; only that bin is sorted. By count, equals of the last one stay too.
    """
    bits = weights.view(np.uint32)
    by_count = count > 0
    desk.masses[:] = 0.0
    for i in range(at, at + vocabulary):
        desk.masses[bits[i] >> np.uint32(16)] += 1.0 if by_count else weights[i]
    target = count if by_count else share * desk.masses.sum()
    reached, edge = 0.0, BINS - 1
    while edge > 0 and reached + desk.masses[edge] < target:
        reached += desk.masses[edge]
        edge -= 1
    size = 0
    for i in range(vocabulary):
        place = bits[at + i] >> np.uint32(16)
        if place == edge:
            desk.values[size], desk.ids[size] = weights[at + i], i
            size += 1
        elif place < edge:
            weights[at + i] = 0.0
    sort(desk.values, desk.ids, size)
    for j in range(size):
        tied = by_count and j > 0 and desk.values[j] == desk.values[j - 1]
        if reached >= target and not tied and (reached > 0.0):
            for rest in range(j, size):
                weights[at + desk.ids[rest]] = 0.0
            return
        reached += 1.0 if by_count else desk.values[j]
