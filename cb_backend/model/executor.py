"""The device side: everything that touches a tensor happens here, everything before it is host work.

`launch(plan)` starts a step and returns what is on its way; `Pending.result()` waits for it. The order within a step is
swap out, copy on write, swap in, ragged forward, sampling. A token that is sampled but not yet seen by the host is fed
to the next step from the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..kv.storage import KVStorage
from ..request import Assignment, Logprob, Request, SamplingParams, StepPlan, StepResult, Timings
from ..scheduling.preemption import CostModel
from .attention import AttentionBackend
from .batch import RaggedBatch, build_batch
from .loader import ModelError
from .projection import Projection
from .sampler import Sampled, logprobs_of, sample

_PROBE_TOKENS = 128
_PROMPT_LOGPROB_ROWS = 64  # rows of vocabulary-wide float32 held at once


@dataclass(slots=True)
class Pending:
    """A step on its way to the host."""

    plan: StepPlan
    sampled: Sampled | None
    prompt_logprobs: dict[str, list[Logprob]]

    def result(self) -> StepResult:
        if self.sampled is None:
            return StepResult((), prompt_logprobs=self.prompt_logprobs)
        return StepResult(
            self.sampled.token_ids.tolist(), self.sampled.logprobs, self.prompt_logprobs, self.sampled.errors
        )


class Executor:
    def __init__(self, model: PreTrainedModel, storage: KVStorage, backend: AttentionBackend) -> None:
        self.model = model
        self.body = model.base_model
        self.projection = Projection(model)
        self.storage = storage
        self.backend = backend
        self.device = storage.device.device
        self._last: Pending | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Starts one step. Raises whatever the device raises; no request state was changed then."""
        swap = self.storage.swap
        swap.out(plan.swap_out)
        swap.before_writing(_written_blocks(plan, self.storage.block_size))
        self.storage.copy(plan.copies)
        swap.into(plan.swap_in)
        sampled, prompt_logprobs = None, {}
        if plan.assignments:
            batch = build_batch(plan.assignments, self.storage, self.device)
            self._feed_from_device(plan, batch)
            hidden = self._forward(batch)
            prompt_logprobs = self._prompt_logprobs(plan, hidden)
            if plan.samplers:
                sampled = self._sample(plan, batch, hidden)
        self._last = Pending(plan, sampled, prompt_logprobs)
        return self._last

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of every token: [T, hidden_size]."""
        return self._call(self.body, batch).last_hidden_state[0]

    def _call(self, module: PreTrainedModel, batch: RaggedBatch) -> Any:
        return module(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            cb_batch=batch,
            cb_backend=self.backend,
        )

    def _feed_from_device(self, plan: StepPlan, batch: RaggedBatch) -> None:
        """Ids that the last step sampled and the host has not seen."""
        last = self._last
        if last is None or last.sampled is None:
            return
        rows = {id(request): i for i, (request, _row) in enumerate(last.plan.samplers)}
        at, source, flat = [], [], 0
        for item in plan.assignments:
            flat += item.num_tokens
            if item.start + item.num_tokens > len(item.request.token_ids):
                at.append(flat - 1)
                source.append(rows[id(item.request)])
        if at:
            batch.input_ids[at] = last.sampled.token_ids[source]

    def _sample(self, plan: StepPlan, batch: RaggedBatch, hidden: torch.Tensor) -> Sampled:
        ends, last_rows = 0, []
        for item in plan.assignments:
            ends += item.num_tokens
            if item.samples:
                last_rows.append(ends - 1)
        logits = self.projection(hidden[last_rows])
        requests = [request for request, _row in plan.samplers]
        rows = [row for _request, row in plan.samplers]
        if len(rows) != len(last_rows):  # forks sample the same row
            logits = logits[rows]
        return sample(logits, requests)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[str, list[Logprob]]:
        """For requests that ask: log-probabilities of the prompt tokens that this step's rows predict."""
        found: dict[str, list[Logprob]] = {}
        first = 0
        for item in plan.assignments:
            request = item.request
            top = request.params.prompt_logprobs
            if top is not None and item.start < request.prompt_len and not request.num_settled:
                targets = request.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, request.prompt_len)]
                found[request.request_id] = self._score(hidden[first : first + len(targets)], targets, top)
            first += item.num_tokens
        return found

    def _score(self, hidden: torch.Tensor, targets: Sequence[int], top: int) -> list[Logprob]:
        scores: list[Logprob] = []
        for at in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[at : at + _PROMPT_LOGPROB_ROWS]
            logits = self.projection(hidden[at : at + len(part)])
            scores += logprobs_of(logits, part, [top] * len(part))
        return scores

    @torch.inference_mode()
    def check_projection(self) -> None:
        """Compares our logits of a few tokens with those of the model's own forward.

        Writes only to blocks that nobody owns yet; called before the first request.

        Raises:
            ModelError: they differ: the model does something after its output embedding that is not known here.
        """
        num_tokens = min(4, self.storage.num_blocks * self.storage.block_size)
        batch = build_batch(_probe(num_tokens, self.storage), self.storage, self.device)
        ours = self.projection(self._forward(batch))
        theirs = self._call(self.model, batch).logits[0].float()
        allowed = 16 * torch.finfo(self.storage.device.dtype).eps * theirs.abs().max().clamp(min=1.0)
        if not bool(((ours - theirs).abs() <= allowed).all()):
            raise ModelError(
                f"{type(self.model).__name__} changes its scores after the output projection in a way that this engine "
                "does not know; serve a model of another architecture"
            )

    @torch.inference_mode()
    def measure_costs(self) -> CostModel:
        """Times a small prefill, and a block's copy to the host and back: the two constants of preemption.

        Writes only to blocks that nobody owns yet; called before the first request.
        """
        num_tokens = min(_PROBE_TOKENS, self.storage.num_blocks * self.storage.block_size)
        batch = build_batch(_probe(num_tokens, self.storage), self.storage, self.device)
        prefill = self._timed(lambda: self._forward(batch))
        per_block = float("inf")
        if len(self.storage.host):
            pair = [(0, 0)]
            per_block = (
                self._timed(lambda: self.storage.swap.out(pair)) + self._timed(lambda: self.storage.swap.into(pair))
            ) / 2
        return CostModel(per_block, prefill / num_tokens)

    def _timed(self, run: Callable[[], object]) -> float:
        """Seconds of the second run of two: the first one warms caches and touches pages."""
        seconds = 0.0
        for _ in range(2):
            self._synchronize()
            start = time.perf_counter()
            run()
            self._synchronize()
            seconds = time.perf_counter() - start
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _written_blocks(plan: StepPlan, block_size: int) -> set[int]:
    """Device blocks that the step's computation writes: copies' destinations and those of the new tokens."""
    written = {destination for _, destination in plan.copies}
    for item in plan.assignments:
        first, last = item.start // block_size, (item.start + item.num_tokens - 1) // block_size
        written.update(item.request.blocks[first : last + 1])
    return written


def _probe(num_tokens: int, storage: KVStorage) -> list[Assignment]:
    """An assignment of a made-up request that fills the first blocks of the pool."""
    blocks = list(range(-(-num_tokens // storage.block_size)))
    request = Request(
        "probe", num_tokens, [0] * num_tokens, SamplingParams(), 1, frozenset(), 0, Timings(0.0), lambda delta: None
    )
    request.blocks = blocks
    return [Assignment(request, 0, num_tokens, False)]
