"""The device side: everything that touches a tensor happens here, everything before it is host work.

`launch(plan)` starts a step and returns what is on its way; `Pending.result()` waits for it. The order within a step is
swap out, swap in, ragged forward, sampling. A token that is sampled but not yet seen by the host is fed
to the next step from the device, so that a step can be launched before the one before it has been read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from ..attention.batch import RaggedBatch
from ..attention.hook import AttentionBackend
from ..device.transfer import Arrival, to_device
from ..errors import ModelError
from ..kv.storage import KVStorage
from ..models.projection import Projection
from ..request import Logprob, Request, StepPlan, StepResult
from ..sampling.host import sample
from ..sampling.logprobs import Scores
from ..scheduling.preemption import CostModel
from .batch import build_batch
from .graphs import DecodeGraphs, Recorder
from .probe import probe, probe_request

_PROBE_TOKENS = 128
_PROMPT_LOGPROB_ROWS = 64  # rows of vocabulary-wide float32 held at once


class Sampled(Protocol):
    """sampling/host.py or sampling/device.py. `token_ids`: int64 [rows], on the device."""

    token_ids: torch.Tensor

    def read(self) -> tuple[Sequence[int], Sequence[Logprob | None], dict[int, str]]:
        """Ids, log-probabilities (per row, or empty) and errors by row; on the host, once the step is done."""


Sampler = Callable[[torch.Tensor, Sequence[Request]], Sampled]


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of some prompt tokens of one request, on their way to the host."""

    request_id: str
    targets: Sequence[int]
    top: int
    scores: Scores

    def read(self) -> list[Logprob]:
        return self.scores.read(self.targets, [self.top] * len(self.targets))


@dataclass(slots=True)
class Pending:
    """A step on its way to the host."""

    plan: StepPlan
    arrival: Arrival
    sampled: Sampled | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)

    def result(self) -> StepResult:
        self.arrival.wait()
        found: dict[str, list[Logprob]] = {}
        for part in self.prompt_scores:
            found.setdefault(part.request_id, []).extend(part.read())
        ids, logprobs, errors = ((), (), {}) if self.sampled is None else self.sampled.read()
        return StepResult(ids, logprobs, found, errors)


class Executor:
    """Args:
    sampler: chooses tokens from float32 logits [rows, vocab_size] for the request of each row.
    """

    def __init__(
        self, model: PreTrainedModel, storage: KVStorage, backend: AttentionBackend, sampler: Sampler = sample
    ) -> None:
        self.model = model
        self.body = model.base_model
        self.projection = Projection(model)
        self.storage = storage
        self.backend = backend
        self.sampler = sampler
        self.device = storage.device.device
        self.graphs: DecodeGraphs | None = None  # set once they are captured
        self._last: tuple[StepPlan, Sampled] | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Starts one step. Raises whatever the device raises; no request state was changed then."""
        swap = self.storage.swap
        swap.out(plan.swap_out)
        swap.before_writing(_written_blocks(plan, self.storage.block_size))
        swap.into(plan.swap_in)
        last, self._last = self._last, None
        sampled, prompt_scores = None, []
        if plan.assignments:
            at, source = _ids_on_device(plan, last)
            rows = _sampled_rows(plan)
            padded = self._graph_size(plan)
            batch = build_batch(plan.assignments, self.storage, self.device, padded=padded, indices=(at, source, rows))
            if last is not None and at:
                unseen = last[1].token_ids.index_select(0, batch.indices[1])
                batch.input_ids.index_copy_(0, batch.indices[0], unseen)
            hidden = self.graphs.run(batch) if self.graphs is not None and padded else self._forward(batch)
            prompt_scores = self._score_prompts(plan, hidden)
            if plan.samplers:
                in_order = rows == list(range(len(rows)))
                hidden = hidden[: len(rows)] if in_order else hidden.index_select(0, batch.indices[2])
                sampled = self.sampler(self.projection(hidden), plan.samplers)
                self._last = (plan, sampled)
        return Pending(plan, Arrival(self.device), sampled, prompt_scores)

    def _graph_size(self, plan: StepPlan) -> int:
        """The graph that runs this step: its padded batch size, or 0 where none does."""
        if self.graphs is None or any(item.num_tokens != 1 for item in plan.assignments):
            return 0
        return self.graphs.size_for(len(plan.assignments))

    def _forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Hidden states of every token: [T, hidden_size]."""
        hidden: torch.Tensor = self._call(self.body, batch).last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def capture(self, recorder: Recorder, sizes: tuple[int, ...], max_model_len: int) -> Iterator[int]:
        """Records decode batches of `sizes`, the largest first, and yields each size; from then on steps use them."""
        max_blocks = -(-max_model_len // self.storage.block_size)
        graphs = DecodeGraphs(self._forward, self.storage, sizes, max_blocks, recorder)
        yield from graphs.capture()
        self.graphs = graphs

    def _call(self, module: PreTrainedModel, batch: RaggedBatch) -> Any:
        return module(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            cb_batch=batch,
            cb_backend=self.backend,
        )

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> list[PromptScores]:
        """For requests that ask: log-probabilities of the prompt tokens that this step's rows predict."""
        found: list[PromptScores] = []
        first = 0
        for item in plan.assignments:
            request = item.request
            top = request.params.prompt_logprobs if request.scores_prompt else None
            if top is not None and item.start < request.prompt_len and not request.num_settled:
                targets = request.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, request.prompt_len)]
                for at in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
                    part = targets[at : at + _PROMPT_LOGPROB_ROWS]
                    (chosen,) = to_device([np.array(part, dtype=np.int64)], self.device)
                    logits = self.projection(hidden[first + at : first + at + len(part)])
                    found.append(PromptScores(request.request_id, part, top, Scores(logits, chosen, top)))
            first += item.num_tokens
        return found

    @torch.inference_mode()
    def check_projection(self) -> None:
        """Compares our logits of a few tokens with those of the model's own forward.

        Writes only to blocks that nobody owns yet; called before the first request.

        Raises:
            ModelError: they differ: the model does something after its output embedding that is not known here.
        """
        num_tokens = min(4, self.storage.num_blocks * self.storage.block_size)
        batch = self._probe_batch(num_tokens)
        ours = self.projection(self._forward(batch))
        theirs = self._call(self.model, batch).logits[0].float()
        allowed = 16 * torch.finfo(self.model.dtype).eps * theirs.abs().max().clamp(min=1.0)
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
        batch = self._probe_batch(num_tokens)
        prefill = self._timed(lambda: self._forward(batch))
        per_block = float("inf")
        if len(self.storage.host):
            pair = [(0, 0)]
            per_block = (
                self._timed(lambda: self.storage.swap.out(pair)) + self._timed(lambda: self.storage.swap.into(pair))
            ) / 2
        return CostModel(per_block, prefill / num_tokens)

    def _probe_batch(self, num_tokens: int, longest: int | None = None) -> RaggedBatch:
        assignments = probe(num_tokens, self.storage, self.projection.vocab_size, longest)
        return build_batch(assignments, self.storage, self.device)

    @torch.inference_mode()
    def run_probe(self, num_tokens: int, *, longest: int | None = None, num_samples: int = 0) -> None:
        """One step of made-up sequences of up to `longest` tokens, `num_samples` rows sampled.

        Writes to the first blocks of the pool: only before anybody owns them.
        """
        hidden = self._forward(self._probe_batch(num_tokens, longest))
        if num_samples:
            self.sampler(self.projection(hidden[:num_samples]), [probe_request([0])] * num_samples)

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


def _ids_on_device(plan: StepPlan, last: tuple[StepPlan, Sampled] | None) -> tuple[list[int], list[int]]:
    """Rows of the batch whose ids the last step sampled and the host has not seen, and their rows in that step."""
    at: list[int] = []
    source: list[int] = []
    if last is None:
        return at, source
    rows: dict[int, int] | None = None
    end = 0
    for item in plan.assignments:
        end += item.num_tokens
        if item.start + item.num_tokens > len(item.request.token_ids):
            if rows is None:
                rows = {id(request): i for i, request in enumerate(last[0].samplers)}
            at.append(end - 1)
            source.append(rows[id(item.request)])
    return at, source


def _sampled_rows(plan: StepPlan) -> list[int]:
    """The rows of the batch that are sampled."""
    end = 0
    rows: list[int] = []
    for item in plan.assignments:
        end += item.num_tokens
        if item.samples:
            rows.append(end - 1)
    return rows


def _written_blocks(plan: StepPlan, block_size: int) -> set[int]:
    """Device blocks that the step's computation writes."""
    written: set[int] = set()
    for item in plan.assignments:
        first, last = item.start // block_size, (item.start + item.num_tokens - 1) // block_size
        written.update(item.request.blocks[first : last + 1])
    return written
