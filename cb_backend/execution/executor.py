"""The device side: everything that touches a tensor happens here, everything before it is host work.

`launch(plan)` starts a step and returns what is on its way; `Pending.result()` waits for it. The order within a step is
swap out, swap in, ragged forward, sampling. A token that is sampled but not yet seen by the host is fed
to the next step from the device, so that a step can be launched before the one before it has been read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from ..attention.batch import RaggedBatch
from ..attention.hook import AttentionBackend
from ..device.transfer import Arrival, to_device
from ..errors import ModelError, first_line
from ..kv.storage import KVStorage
from ..models.projection import Projection
from ..request import Logprob
from ..sampling.batch import SamplingBatch
from ..sampling.host import sample
from ..sampling.logprobs import Scores
from ..scheduling.plan import ON_DEVICE, PromptTargets, StepPlan, StepResult
from ..scheduling.preemption import CostModel
from .batch import build_batch, written_blocks
from .graphs import DecodeGraphs, Recorder
from .probe import probe, probe_sampling
from .tables import BlockTables

_Rows = npt.NDArray[np.int64]

_PROBE_TOKENS = 128
_PROMPT_LOGPROB_ROWS = 64  # rows of vocabulary-wide float32 held at once


class Sampled(Protocol):
    """sampling/host.py or sampling/device.py. `token_ids`: int64 [rows], on the device."""

    token_ids: torch.Tensor

    def read(self) -> tuple[Sequence[int], Sequence[Logprob | None], dict[int, str]]:
        """Ids, log-probabilities (per row, or empty) and errors by row; on the host, once the step is done."""


Sampler = Callable[[torch.Tensor, SamplingBatch], Sampled]


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of some of the prompt tokens that a step was asked for, on their way to the host."""

    wanted: PromptTargets
    targets: Sequence[int]
    scores: Scores

    def read(self) -> list[Logprob]:
        return self.scores.read(self.targets, [self.wanted.top] * len(self.targets))


@dataclass(slots=True)
class Pending:
    """A step on its way to the host."""

    plan: StepPlan
    arrival: Arrival
    sampled: Sampled | None = None
    prompt_scores: list[PromptScores] = field(default_factory=list)

    def result(self) -> StepResult:
        """
        Raises:
            MemoryError: the device has no memory for the step.
        """
        with _out_of_memory_as_error():
            return self._read()

    def _read(self) -> StepResult:
        self.arrival.wait()
        found: dict[int, list[Logprob]] = {}
        for part in self.prompt_scores:
            found.setdefault(part.wanted.seq_id, []).extend(part.read())
        ids, logprobs, errors = ((), (), {}) if self.sampled is None else self.sampled.read()
        each = [None if one is None else (one,) for one in logprobs]
        return StepResult([(token,) for token in ids], each, found, errors)


class Executor:
    """Args:
    sampler: chooses tokens from float32 logits [rows, vocab_size] by the batch of the same rows.
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
        self.tables = BlockTables()
        self._last: tuple[StepPlan, Sampled] | None = None

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Starts one step. Raises whatever the device raises; no request state was changed then.

        Raises:
            MemoryError: the device has no memory for the step.
        """
        with _out_of_memory_as_error():
            return self._launch(plan)

    def _launch(self, plan: StepPlan) -> Pending:
        self.tables.update(plan.tables)
        tables = self.tables.rows
        swap = self.storage.swap
        swap.out(plan.swap_out)
        if swap.is_leaving:
            swap.before_writing(written_blocks(plan, tables, self.storage.block_size))
        swap.into(plan.swap_in)
        last, self._last = self._last, None
        sampled, prompt_scores = None, []
        if plan.seq_ids:
            at, source = _ids_on_device(plan, last)
            rows = (np.cumsum(plan.lengths) - 1)[plan.samples]
            padded = self._graph_size(plan)
            indices = (at, source, rows)
            batch = build_batch(plan, tables, self.storage, self.device, padded=padded, indices=indices)
            if last is not None and len(at):
                unseen = last[1].token_ids.index_select(0, batch.indices[1])
                batch.input_ids.index_copy_(0, batch.indices[0], unseen)
            hidden = self.graphs.run(batch) if self.graphs is not None and padded else self._forward(batch)
            prompt_scores = self._score_prompts(plan, hidden)
            if len(rows):
                in_order = rows[-1] == len(rows) - 1  # rows ascend
                hidden = hidden[: len(rows)] if in_order else hidden.index_select(0, batch.indices[2])
                sampled = self.sampler(self.projection(hidden), plan.sampling)
                self._last = (plan, sampled)
        return Pending(plan, Arrival(self.device), sampled, prompt_scores)

    def _graph_size(self, plan: StepPlan) -> int:
        """The graph that runs this step: its padded batch size, or 0 where none does."""
        if self.graphs is None or len(plan.token_ids) != len(plan.slots):
            return 0
        return self.graphs.size_for(len(plan.slots))

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
        """The log-probabilities of prompt tokens that the plan asks for."""
        found: list[PromptScores] = []
        for wanted in plan.prompt_targets:
            for at in range(0, len(wanted.targets), _PROMPT_LOGPROB_ROWS):
                part = wanted.targets[at : at + _PROMPT_LOGPROB_ROWS]
                (chosen,) = to_device([np.array(part, dtype=np.int64)], self.device)
                logits = self.projection(hidden[wanted.row + at : wanted.row + at + len(part)])
                found.append(PromptScores(wanted, part, Scores(logits, chosen, wanted.top)))
        return found

    @torch.inference_mode()
    def check_projection(self) -> None:
        """Compares our logits of a few tokens with those of the model's own forward.

        Writes only to blocks that no request owns yet; called before the first request.

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

        Writes only to blocks that no request owns yet; called before the first request.
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
        plan = probe(num_tokens, self.storage, self.projection.vocab_size, longest)
        tables = BlockTables()
        tables.update(plan.tables)
        return build_batch(plan, tables.rows, self.storage, self.device)

    @torch.inference_mode()
    def run_probe(self, num_tokens: int, *, longest: int | None = None, num_samples: int = 0) -> None:
        """One step of made-up sequences of up to `longest` tokens, `num_samples` rows sampled.

        Writes to the first blocks of the pool: only before a request owns them.
        """
        hidden = self._forward(self._probe_batch(num_tokens, longest))
        if num_samples:
            self.sampler(self.projection(hidden[:num_samples]), probe_sampling(num_samples))

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


@contextmanager
def _out_of_memory_as_error() -> Iterator[None]:
    """The engine knows no torch: a step that is too large for the device is a `MemoryError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(first_line(error)) from error


def _ids_on_device(plan: StepPlan, last: tuple[StepPlan, Sampled] | None) -> tuple[_Rows, _Rows]:
    """Rows of the batch whose ids the last step sampled and the host has not seen, and their rows in that step."""
    at = np.flatnonzero(plan.token_ids == ON_DEVICE)
    if last is None or not len(at):
        return at[:0], at[:0]
    slots = last[0].slots[last[0].samples]
    row_of_slot = np.zeros(int(slots.max()) + 1, dtype=np.int64)
    row_of_slot[slots] = np.arange(len(slots))
    return at, row_of_slot[np.repeat(plan.slots, plan.lengths)[at]]
