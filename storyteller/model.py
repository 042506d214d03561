"""A causal language model that writes many stories at once: one ragged forward pass a step, over paged KV memory.

Decode rows and prompt pieces of different stories go through together, without padding. The rows of a step are dealt to
`threads` threads; each thread runs its share from the embedding to the drawn tokens in one compiled call, without
the interpreter lock and without waiting for another.

It promises that a story's tokens depend on its own tokens, settings and seed alone, to the bit: not on its neighbours,
on how its prompt is cut into chunks, on which blocks it has, or on the number of threads. It does not decide who runs
(`scheduler.py`), and does not check that blocks belong to who names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from storyteller import checkpoint, heads, kernels, lanes, layout, ranking, sampling
from storyteller.architectures import ModelError
from storyteller.layout import GROUP, Net, Room, Rows
from storyteller.quantize import aligned
from storyteller.story import BLOCK, Chunk, Sampling, numbers
from storyteller.tiles import SPAN

__all__ = ["Model", "ModelError"]


class Model:
    """One model in memory. `step` is called by one thread at a time."""

    def __init__(self, found: checkpoint.Checkpoint, threads: int) -> None:
        self.name, self.revision = found.name, found.revision
        self.window = found.window  # tokens, prompt and story together
        self.vocab_size = found.vocabulary
        self.tokenizer = found.tokenizer
        self.end_ids = found.end_ids
        self._net = found.net
        net = self._net
        self._kind = np.dtype(np.uint8 if net.quantized else np.float32)
        self._block_size = net.layers * net.kv_heads * 2 * int(heads.half_block(net))  # numbers of KV in one block
        self._memory: NDArray[Any] = np.zeros(0, self._kind)
        self.num_blocks = 0  # of KV memory
        self._width = int(net.where[-1, layout.QKV + 3])  # of a row of logits
        self._workers = [_Worker(self) for _ in range(max(1, threads))]
        self._pool = ThreadPoolExecutor(max_workers=max(1, threads - 1), thread_name_prefix="step")

    @classmethod
    def load(
        cls,
        source: str,
        quantize: Literal["int8", "none"],
        threads: int,
        cache_folder: Path,
        say: Callable[[str], None],
    ) -> Model:
        """Loads a model: "" is the packaged one, else a folder, a .gguf file, or ``owner/name@revision`` of the hub.

        Args:
            quantize: int8 linear layers, keys and values, or float32 throughout.
            threads: that one step is dealt to.
            cache_folder: where a converted .gguf file is kept.
            say: is told what goes on, a line at a time.

        Raises:
            ModelError: in one line, what was expected and what came.
        """
        model = cls(checkpoint.load(source, quantize, cache_folder, say), threads)
        if lanes.uncached:
            say("compiled code cannot be kept, each start compiles anew: NUMBA_CACHE_DIR should be a writable folder")
        say(f"{model.name} {model.revision}: {model.window} tokens, products by {lanes.describe()}")
        return model

    @property
    def kv_bytes_per_token(self) -> int:
        return self._block_size // BLOCK * self._kind.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Reserves memory for `num_blocks` blocks of `BLOCK` tokens; pages are used when they are first written."""
        self._memory = aligned(num_blocks * self._block_size, self._kind)
        self.num_blocks = num_blocks

    def step(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Computes all chunks.

        Returns:
            for each chunk the next token's id, or None where it is not wanted.
        """
        self._copy(chunks)
        shares = _deal(chunks, len(self._workers))
        # A thread gets its share made ready: what is left to do there needs no interpreter.
        others = [
            self._pool.submit(worker.ready([chunks[i] for i in share]))
            for worker, share in zip(self._workers[1:], shares[1:], strict=False)
        ]
        results = [self._workers[0].ready([chunks[i] for i in shares[0]])()]
        results += [other.result() for other in others]
        told: list[int | None] = [None] * len(chunks)
        for share, tokens in zip(shares, results, strict=True):
            wanting = (i for i in share if chunks[i].sampling is not None)
            for i, token in zip(wanting, tokens.tolist(), strict=True):
                told[i] = token
        return told

    def _copy(self, chunks: Sequence[Chunk]) -> None:
        """Brings what newcomers take from others, in the order of the batch: a later copy may overwrite a source."""
        memory = self._memory.reshape(-1, self._block_size)
        for chunk in chunks:
            if chunk.source is not None:
                memory[chunk.blocks[chunk.start // BLOCK]] = memory[chunk.source]

    def log_probabilities(self, tokens: Sequence[int]) -> list[float]:
        """Of each token but the first, given those before it: to measure a model. Overwrites KV memory."""
        found: list[float] = []
        table = numbers(range(-(-len(tokens) // BLOCK)))
        for start in range(0, len(tokens) - 1, GROUP):
            piece = tokens[start : min(start + GROUP, len(tokens) - 1)]
            rows, _ = _rows([Chunk(numbers(piece), start, table, None, numbers())])
            logits = self._workers[0].compute(rows, np.arange(len(piece))).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            found += logits[np.arange(len(piece)), tokens[start + 1 : start + 1 + len(piece)]].tolist()
        return found

    def warm_up(self) -> None:
        """Compiles everything, or reads it from the compiler's cache, so that the first player does not wait."""
        kept, self._memory = self._memory, aligned(self._block_size, self._kind)
        settings = Sampling(temperature=1.0, top_k=2, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=1)
        first = numbers([0])
        self.step([Chunk(first, 0, first, settings, first)])
        self._memory = kept


def _deal(chunks: Sequence[Chunk], hands: int) -> list[list[int]]:
    """Chunk numbers for each thread, the costly ones first to whoever has least; fewer hands where chunks are few."""
    shares: list[list[int]] = [[] for _ in range(max(1, min(hands, len(chunks))))]
    loads = [0.0] * len(shares)
    costs = [len(chunk.tokens) * (1.0 + (chunk.start + len(chunk.tokens)) / 1024) for chunk in chunks]
    for i in sorted(range(len(chunks)), key=lambda i: -costs[i]):
        hand = loads.index(min(loads))
        shares[hand].append(i)
        loads[hand] += costs[i]
    return shares


class _Worker:
    """One thread's share of a step, and its scratch memory."""

    def __init__(self, model: Model) -> None:
        self._model = model
        net = model._net
        self._room = _room(net, model.window, 64)
        self._logits: NDArray[Any] = np.zeros(0, np.float32)
        self._desk = ranking.make_desk(model.vocab_size, model._width)
        self._stamp = 0

    def ready(self, chunks: Sequence[Chunk]) -> Callable[[], NDArray[np.int64]]:
        """All that the chunks take but the work itself, which gives the tokens that are wanted, in their order."""
        model = self._model
        rows, wanted = _rows(chunks)
        asking = [chunk for chunk in chunks if chunk.sampling is not None]
        wishes = sampling.wishes_of(
            [chunk.sampling for chunk in chunks if chunk.sampling is not None],
            [chunk.start + len(chunk.tokens) for chunk in asking],
            [chunk.history for chunk in asking],
        )
        tokens = np.zeros(len(asking), np.int64)
        self._make_room(rows, wanted)
        room, logits, desk, stamp = self._room, self._logits, self._desk, self._stamp
        self._stamp += len(asking)

        def work() -> NDArray[np.int64]:
            size = model.vocab_size, model._width
            kernels.write(model._net, model._memory, rows, wanted, room, logits, *size, wishes, desk, stamp, tokens)
            return tokens

        return work

    def compute(self, rows: Rows, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits of the wanted rows, [wanted, vocabulary]; they stay until the next call."""
        model = self._model
        self._make_room(rows, wanted)
        kernels.forward(model._net, model._memory, rows, wanted, self._room, self._logits)
        return self._logits[: len(wanted) * model._width].reshape(-1, model._width)[:, : model.vocab_size]

    def _make_room(self, rows: Rows, wanted: NDArray[np.int64]) -> None:
        model, count = self._model, len(rows.tokens)
        if self._room.x.size < count * model._net.hidden:
            self._room = _room(model._net, model.window, count + count // 2)
        if self._logits.size < len(wanted) * model._width:
            self._logits = aligned(len(wanted) * model._width, np.float32)


def _room(net: Net, window: int, rows: int) -> Room:
    linears = [net.where[:, column : column + 4] for column in (layout.QKV, layout.OUT, layout.UP, layout.DOWN)]
    widest = max(int(linear[:-1, 3].max()) for linear in linears)
    deepest = max(int(linear[:, 2].max()) for linear in linears)

    spans = -(-deepest // SPAN)

    def floats(size: int) -> NDArray[Any]:
        return aligned(size, np.float32)

    return Room(
        x=floats(rows * net.hidden), q=floats(rows * net.heads * net.dim), wide=floats(GROUP * widest),
        normed=floats(GROUP * deepest), small=aligned(GROUP * deepest, np.uint8), small_scale=floats(GROUP * spans),
        small2=aligned(GROUP * deepest, np.uint8), small2_scale=floats(GROUP * spans),
        normed2=floats(GROUP * deepest), scores=floats(window + BLOCK),
        head=aligned(net.dim, np.uint8),
    )  # fmt: skip


def _rows(chunks: Sequence[Chunk]) -> tuple[Rows, NDArray[np.int64]]:
    """The rows of all chunks, one behind the other, and the numbers of those that want a token."""
    positions: list[int] = []
    starts: list[int] = []
    wanted: list[int] = []
    place = 0  # where a story's blocks begin in the table of all
    for chunk in chunks:
        count = len(chunk.tokens)
        positions += range(chunk.start, chunk.start + count)
        starts += [place] * count
        place += len(chunk.blocks)
        if chunk.sampling is not None:
            wanted.append(len(positions) - 1)
    tokens, tables = (
        np.frombuffer(bytearray().join(parts), np.int64)
        for parts in ([chunk.tokens for chunk in chunks], [chunk.blocks for chunk in chunks])
    )
    return Rows(tokens, np.array(positions, np.int64), np.array(starts, np.int64), tables), np.array(wanted, np.int64)
