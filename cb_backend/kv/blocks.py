"""The block pool: which KV blocks are free, who shares them, and which hold a known prompt beginning.

Knows block ids, reference counts and token ids; knows nothing of tensors, requests or policy.

    free list        never-used or forgotten blocks
    evictable (LRU)  no owner, but their content is still indexed: a prefix hit takes them back
    owned            reference count >= 1

Idle means free + evictable = all. Full blocks are indexed as a chain: a block's key is the node of the block before it
(or the salt, for the first one) and its own tokens, compared exactly by the dictionary, so that equal keys mean equal
prefixes and no hash is ever trusted. Node numbers are never reused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count as counter

from ..request import PrivateRoot, Salt


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are available: the caller must check `available` first."""


_Key = tuple[int | Salt, tuple[int, ...]]  # (node of the block before or the salt, own tokens)


@dataclass(frozen=True, slots=True)
class _Node:
    """An indexed block: its own number, and the key under which it is found."""

    number: int
    key: _Key


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that so many tokens fill or begin."""
    return -(-num_tokens // block_size)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} x {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # popped from the end: low ids first
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self._refs = [0] * num_blocks
        self._content: dict[int, _Node] = {}  # block id -> what it holds
        self._index: dict[_Key, int] = {}  # key -> block id
        self._numbers = counter()
        self.queried_tokens = 0
        self.hit_tokens = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner whose content can still be hit."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.available

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks: unindexed ones first, then the least recently used indexed ones.

        Raises:
            OutOfBlocks: fewer than `count` are available; nothing was taken.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} of {self.num_blocks} available")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _none = self._evictable.popitem(last=False)
                self._forget(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._evictable[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block. The tail of a sequence becomes evictable before its head,
        since a head without its tail is still a prefix and a tail without its head is nothing."""
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            if refs < 0:
                raise RuntimeError(f"block {block} released more often than it was taken")
            self._refs[block] = refs
            if refs == 0:
                if block in self._content:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def shares_under(self, salt: Salt) -> bool:
        """Whether blocks are indexed under `salt`."""
        return self.enable_prefix_caching or isinstance(salt, PrivateRoot)

    def lookup(
        self, token_ids: Sequence[int], salt: Salt = "", limit: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Longest indexed beginning of `token_ids`, in whole blocks: (block ids, their node numbers).

        `limit`: look only at this many tokens. Takes no reference: `share` the blocks before anything is allocated.
        """
        blocks: list[int] = []
        nodes: list[int] = []
        if not self.shares_under(salt):
            return blocks, nodes
        size = self.block_size
        parent: int | Salt = salt
        end = len(token_ids) if limit is None else min(limit, len(token_ids))
        for start in range(0, end - size + 1, size):
            block = self._index.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                break
            parent = self._content[block].number
            blocks.append(block)
            nodes.append(parent)
        return blocks, nodes

    def count_query(self, queried: int, hit: int) -> None:
        """Books one admission's prefix lookup, in tokens."""
        self.queried_tokens += queried
        self.hit_tokens += hit

    def index(
        self, token_ids: Sequence[int], blocks: Sequence[int], nodes: list[int], num_computed: int, salt: Salt
    ) -> list[int]:
        """Makes every full block below `num_computed` findable; `nodes` grows by their node numbers.

        Returns the blocks that were not before.

        A block may be indexed in the step that computes it: in each layer all K/V of a step are written before
        any of them is read, so a request of the same step can already share it. Where another block already holds
        the same content, that one stays the indexed one.
        """
        found: list[int] = []
        if not self.shares_under(salt):
            return found
        size = self.block_size
        for i in range(len(nodes), num_computed // size):
            key = (nodes[i - 1] if i else salt, tuple(token_ids[i * size : (i + 1) * size]))
            known = self._index.get(key)
            if known is not None:
                nodes.append(self._content[known].number)
                continue
            node = _Node(next(self._numbers), key)
            nodes.append(node.number)
            self._index[key] = blocks[i]
            self._content[blocks[i]] = node
            found.append(blocks[i])
        return found

    def forget(self, blocks: Iterable[int]) -> None:
        """No later request may hit these blocks: their content is not to be trusted, or is of no use any more."""
        for block in blocks:
            if block in self._content:
                self._forget(block)
                if self._refs[block] == 0:
                    del self._evictable[block]
                    self._free.append(block)

    def _forget(self, block: int) -> None:
        del self._index[self._content.pop(block).key]

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Verifies the pool against the block lists of all owners.

        Raises:
            RuntimeError: a block leaked, is used twice without sharing, or is both free and owned.
        """
        counted = [0] * self.num_blocks
        for blocks in owners:
            if len(set(blocks)) != len(blocks):
                raise RuntimeError(f"a sequence holds a block twice: {blocks}")
            for block in blocks:
                counted[block] += 1
        if counted != self._refs:
            wrong = [(b, self._refs[b], counted[b]) for b in range(self.num_blocks) if self._refs[b] != counted[b]]
            raise RuntimeError(f"reference counts differ (block, pool, owners): {wrong[:8]}")
        unowned = set(self._free) | set(self._evictable)
        if len(unowned) != self.available or unowned != {b for b in range(self.num_blocks) if not counted[b]}:
            raise RuntimeError(f"free and evictable blocks do not match the unowned ones: {self.available} listed")
        if len(self._index) != len(self._content) or any(self._index[c.key] != b for b, c in self._content.items()):
            raise RuntimeError("the prefix index points to a block that does not hold what it says")


class HostPool:
    """Block ids of the host-memory pool that holds the KV of swapped requests. Plain ids, no sharing."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfBlocks(f"{count} host blocks asked for, {len(self._free)} of {self.num_blocks} available")
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
