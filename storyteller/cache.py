"""Who holds which block of the KV memory: allocation, shared prefixes, and the budget. No tensors live here.

Memory is handed out in blocks of `BLOCK` tokens, so at most `BLOCK - 1` tokens a story are allocated and not yet
written. A full block of a prompt is known by the hash of everything up to its end; a later story with the same
beginning takes the block instead of computing it again. A block that nobody holds any more keeps its content until
its memory is wanted, the longest unused first.

The idea of hashing whole blocks is vLLM's automatic prefix caching.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

from storyteller.story import BLOCK

PROMPT_TOKENS = 128
"""Room for a prompt beside each story, where the budget is found out."""


def num_blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK)


def prefix_keys(tokens: Sequence[int]) -> Iterable[bytes]:
    """One key for each full block of `tokens`, which stands for all tokens up to the block's end."""
    key = b""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        key = blake2b(key + array("q", tokens[end - BLOCK : end]).tobytes(), digest_size=16).digest()
        yield key


class Blocks:
    """All blocks of the KV memory, each free, held by one story or more, or idle with content worth keeping."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}  # block -> key, for blocks with known content
        self._block_of: dict[bytes, int] = {}  # the same, the other way round
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks with content that nobody holds, oldest first

    @property
    def num_held(self) -> int:
        """Blocks that stories hold, a shared one counted once."""
        return self.num_blocks - len(self._free) - len(self._idle)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the beginning of `tokens` already; never the last token's, which must be computed."""
        found = []
        for key in prefix_keys(tokens[:-1]):
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

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
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def publish(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Makes the full blocks of computed `tokens` findable."""
        for block, key in zip(blocks, prefix_keys(tokens), strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        self._holders[block] = 1
        return block


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
