"""What running requests hold: device blocks, a slot each, and host blocks while they are swapped out.

A slot, 0 to max_running - 1, is where a running sequence has its row in what is kept for every one: its block table in
the executor, its sampling parameters here. It has one from admission to preemption or its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..kv.blocks import BlockPool, HostPool
from ..request import Request, Status
from ..sampling.batch import SlotSettings
from .draft import Draft
from .plan import TableDelta
from .preemption import Mode


class Found(NamedTuple):
    """What a waiting request would get. `cached` blocks hold its beginning; `revived` of them have no owner now."""

    cached: list[int]
    nodes: list[int]
    new: int
    revived: int


class Memory:
    def __init__(self, pool: BlockPool, host: HostPool, max_running: int) -> None:
        self.pool = pool
        self.host = host
        self.settings = SlotSettings(max_running)
        self.num_swapped = 0  # requests whose blocks are on the host
        self._num_slots = max_running
        self._free_slots = list(range(max_running - 1, -1, -1))  # popped from the end: low ones first

    def needs_block(self, request: Request) -> bool:
        """Its next token begins a block. Only full blocks are shared, so no other request writes to the last one."""
        return self.pool.blocks_for(request.num_known) > len(request.blocks)

    def grow(self, request: Request, draft: Draft) -> None:
        """One more block for `request`, which runs."""
        (block,) = self.pool.allocate(1)
        draft.tables.append(TableDelta(request.slot, len(request.blocks), (block,)))
        request.blocks.append(block)

    def find(self, request: Request) -> Found:
        """What `request`, which waits, would get for all its known tokens. Takes nothing."""
        cached: list[int] = []
        nodes: list[int] = []
        if request.status is Status.WAITING:
            # The last token is always computed, for its logits; and all of a prompt that is to be scored.
            limit = 0 if request.scores_prompt and not request.num_settled else request.num_known - 1
            cached, nodes = self.pool.lookup(request.token_ids, request.salt, limit)
        new = self.pool.blocks_for(request.num_known) - len(cached)
        return Found(cached, nodes, new, sum(1 for block in cached if self.pool.refs(block) == 0))

    def take(self, request: Request, found: Found, draft: Draft) -> None:
        """Gives `request` a slot and the blocks that `find` told of; it runs from now on."""
        self.pool.share(found.cached)
        request.blocks = found.cached + self.pool.allocate(found.new)
        if request.status is Status.SWAPPED:
            draft.swap_in += zip(request.host_blocks, request.blocks, strict=False)
            self._leave_host(request)
        else:
            request.block_nodes = found.nodes
            request.num_computed = len(found.cached) * self.pool.block_size
            request.computed_high = max(request.computed_high, request.num_computed)
            if not request.preempted and request.index == 0:  # other choices find what was computed for the first one
                request.num_cached = request.num_computed
                self.pool.count_query(request.prompt_len, request.num_cached)
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        self.settings.put(request.slot, request)
        draft.tables.append(TableDelta(request.slot, 0, tuple(request.blocks)))

    def preempt(self, request: Request, mode: Mode, draft: Draft) -> int:
        """Takes slot and blocks away; returns how many blocks are copied to the host."""
        used = request.blocks[: self.pool.blocks_for(request.num_computed)] if mode == "swap" else []
        if mode == "swap":
            request.host_blocks = self.host.allocate(len(used))
            draft.swap_out += zip(used, request.host_blocks, strict=True)
            self.num_swapped += 1
        self._leave_device(request)
        if mode == "swap":
            request.status = Status.SWAPPED
        else:
            self.forget_computed(request)
        return len(used)

    def forget_computed(self, request: Request) -> None:
        """Its K/V are gone: everything known is to be computed again. What the host has seen of its prompt stays."""
        if request.status is Status.SWAPPED:
            self._leave_host(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.block_nodes = []

    def release(self, request: Request) -> None:
        """`request` ended: gives back all that it holds."""
        if request.status is Status.RUNNING:
            self._leave_device(request)
        elif request.status is Status.SWAPPED:
            self._leave_host(request)
        request.block_nodes = []

    def distrust(self, request: Request) -> None:
        """Its K/V may be wrong: no later request may hit them, wherever they are by now."""
        self.pool.forget(request.blocks)
        self.pool.forget(self.pool.lookup(request.token_ids, request.salt)[0])

    def take_back(self, request: Request, num_tokens: int) -> None:
        """The last `num_tokens` computed tokens are not those of the sequence (rejected guesses): their K/V do not
        count. The blocks stay, for the tokens that will come in their place.

        Raises:
            ValueError: it does not run, or has not computed as many.
        """
        if request.status is not Status.RUNNING or not 0 <= num_tokens <= request.num_computed:
            raise ValueError(f"{num_tokens} of {request.num_computed} computed tokens cannot be taken back")
        request.num_computed -= num_tokens
        request.computed_high = min(request.computed_high, request.num_computed)
        full = request.num_computed // self.pool.block_size
        self.pool.forget(request.blocks[full : len(request.block_nodes)])
        del request.block_nodes[full:]

    def _leave_device(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self._free_slots.append(request.slot)
        request.blocks, request.slot = [], -1

    def _leave_host(self, request: Request) -> None:
        self.host.release(request.host_blocks)
        request.host_blocks = []
        self.num_swapped -= 1

    def check(self, running: Iterable[Request]) -> None:
        """Verifies blocks and slots against those that run.

        Raises:
            RuntimeError: one leaked, or is used twice.
        """
        requests = list(running)
        self.pool.check(request.blocks for request in requests)
        slots = sorted([*self._free_slots, *(request.slot for request in requests)])
        if slots != list(range(self._num_slots)):
            raise RuntimeError(f"slots leaked or are used twice: {len(self._free_slots)} free, {len(requests)} running")
