"""Who holds which block of the KV memory: allocation, shared prefixes, and the budget. No tensors live here.

Memory is handed out in blocks of `BLOCK` tokens, so at most `BLOCK - 1` tokens a story are allocated and not yet
written. A full block of a prompt is known by the hash of everything up to its end; a later story with the same
beginning takes the block instead of computing it again. Where its beginning ends within a block, it copies that block
and goes on from there. A block that nobody holds any more keeps its content until its memory is wanted, the longest
unused first.

The idea of hashing whole blocks is vLLM's automatic prefix caching; copying on a partial match is as in SGLang's radix
tree, cut down to the first block that came behind each beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from storyteller.story import BLOCK, numbers

PROMPT_TOKENS = 128
"""Room for a prompt beside each story, where the budget is found out."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK)


def prefix_keys(tokens: Sequence[int]) -> Iterable[bytes]:
    """One key for each full block of `tokens`, which stands for all tokens up to the block's end."""
    key = b""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = blake2b(key + numbers(tokens[end - BLOCK : end]).tobytes(), digest_size=16).digest()
        yield key


class Beginning(NamedTuple):
    """What is computed already of a story's tokens."""

    blocks: list[int]  # full ones, to be shared
    num_tokens: int  # in `blocks`, and behind them in `source`
    source: int | None  # a block to copy, whose first tokens are the story's next


class Content(NamedTuple):
    """What a block holds of a prompt; `key` is empty where the prompt ends within the block."""

    before: bytes
    key: bytes
    tokens: Sequence[int]


class Blocks:
    """All blocks of the KV memory, each free, held by one story or more, or idle with content worth keeping."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._contents: dict[int, Content] = {}  # of each block that is known
        self._block_of: dict[bytes, int] = {}  # the known block of a key
        self._first_behind: dict[bytes, int] = {}  # of the blocks behind a key's tokens, the one that came first
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks with content that nobody holds, oldest first

    @property
    def num_held(self) -> int:
        """Blocks that stories hold, a shared one counted once."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def find(self, tokens: Sequence[int]) -> Beginning:
        """What is there of the beginning of `tokens`; never the last token, which must be computed."""
        found, before = [], b""
        for key in prefix_keys(tokens[:-1]):
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
            before = key
        num_tokens, source = len(found) * BLOCK, self._first_behind.get(before)
        if source is None:
            return Beginning(found, num_tokens, None)
        pairs = zip(self._contents[source].tokens, tokens[num_tokens:-1], strict=False)
        num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return Beginning(found, num_tokens + num_alike, source if num_alike else None)

    def hold(self, shared: Sequence[int], num_new: int) -> list[int]:
        """Holds `shared` once more and `num_new` further blocks; `MemoryError` where there are not so many."""
        for block in shared:
            self._idle.pop(block, None)
            self._holders[block] += 1
        if num_new > len(self._free) + len(self._idle):
            self.release(shared)
            raise MemoryError(f"expected {num_new} blocks, {len(self._free) + len(self._idle)} are left")
        return [*shared, *(self._take() for _ in range(num_new))]

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back a story's blocks; what the last holder leaves behind stays findable while its memory lasts."""
        # A chain is only of use from its beginning: its end must be forgotten first.
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._contents:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes the blocks of a prompt findable that is computed to its end."""
        before, keys = b"", [*prefix_keys(prompt), b""]
        for number, (block, key) in enumerate(zip(blocks, keys, strict=False)):
            tokens = prompt[number * BLOCK : (number + 1) * BLOCK]
            is_wanted = key not in self._block_of if key else before not in self._first_behind
            if tokens and is_wanted and block not in self._contents:
                self._contents[block] = Content(before, key, tokens)
                self._first_behind.setdefault(before, block)
                if key:
                    self._block_of[key] = block
            before = key

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block)
        self._block_of.pop(content.key, None)
        if self._first_behind.get(content.before) == block:
            del self._first_behind[content.before]


def default_num_tokens(bytes_per_token: int, window: int, batch_size: int, max_tokens: int) -> int:
    """The KV budget where none is set: a full batch of longest stories, within a quarter of the memory there is."""
    wanted = max(window, batch_size * (max_tokens + PROMPT_TOKENS))
    return min(wanted, available_memory() // 4 // bytes_per_token)


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has left, or what its control group allows."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        return min(left, int(limit)) if limit != "max" else left
    except OSError:
        return left
