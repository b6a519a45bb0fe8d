"""Puts an engine together: model, memory, backend, scheduler, thread. The one place that knows all the parts.

`build` does the slow work (loading, sizing, timing the two constants of preemption) and says what it chose in a few
log lines; after it nothing is configured any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cb_kernels import cpu

from ..config import EngineConfig
from ..device.cores import choose_threads
from ..errors import ModelError, RequestError
from ..execution.startup import prepare, use_device
from ..kv.blocks import BlockPool, HostPool
from ..kv.storage import KVStorage
from ..models.loader import LoadedModel, load_model
from ..params import SamplingParams, check_text
from ..request import Constraint
from ..scheduling.admission import Admission
from ..scheduling.lengths import LengthCurves, validate_class
from ..scheduling.preemption import Preemption
from ..scheduling.scheduler import Scheduler
from ..text.chat import ChatTemplate
from ..text.grammar import GrammarCompiler
from ..text.thought_constraint import ThoughtConstraint
from ..text.thoughts import THOUGHTS
from ..text.tools import TOOL_CALLS
from .bad_words import BadWords
from .core import EngineCore
from .limits import Limits

logger = logging.getLogger("cb_backend")


@dataclass(slots=True)
class Parts:
    """What `build` made. `curves` belong to the engine thread; the rest does not change after the start."""

    config: EngineConfig
    core: EngineCore
    limits: Limits
    loaded: LoadedModel
    storage: KVStorage
    curves: LengthCurves
    chat: ChatTemplate | None
    grammar: GrammarCompiler | None
    backend_name: str
    bad_words: BadWords

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.loaded.name

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.loaded.eos_token_ids

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the banned words, at a text's beginning and after a space."""
        return self.bad_words.ids(params.bad_words)

    def check_class(self, request_class: str | None) -> str:
        return "" if request_class is None else validate_class(check_text(request_class, "request_class"))

    def check_deadline(
        self, deadline: float | None, now: float, prompt_len: int, max_tokens: int, request_class: str
    ) -> None:
        """Refuses what the forecast says cannot be done in time.

        Raises:
            RequestError: with `admission.refuse_late`, the soonest possible end is after the deadline.
        """
        if deadline is None or not self.config.admission.refuse_late:
            return
        snapshot = self.core.snapshot
        soonest = snapshot.forecast.seconds_until_finish(prompt_len, max_tokens, request_class, snapshot.waiting)
        if now + soonest > deadline:
            raise RequestError(
                f"{deadline - now:.1f} s cannot be kept, the soonest end is in {soonest:.1f} s",
                path=("timeout",),
                status=503,
                code="deadline_unreachable",
                retry_after=max(1.0, soonest),
            )

    def compile_constraint(self, params: SamplingParams) -> Constraint | None:
        """What `response_format` asks for; may take a moment the first time, so not on an event loop.

        Raises:
            RequestError: the format is wrong, or there is no tokenizer to apply it with.
        """
        if not needs_constraint(params):
            return None
        if self.grammar is None:
            raise RequestError("this model has no tokenizer", path=("response_format",))
        answer = None if params.response_format is None else self.grammar.compile(params.response_format)
        thinking = params.thinking
        if thinking is None or (answer is None and thinking.budget is None):
            return answer
        return ThoughtConstraint(
            self.grammar.tokenizer,
            self.grammar.vocab_size,
            THOUGHTS[thinking.format],
            opened=thinking.opened,
            budget=thinking.budget,
            then=answer,
            calls=(params.response_format or {}).get("type") == TOOL_CALLS,
        )

    def save_state(self) -> None:
        """Saves the length curves for the next start. Call it after the engine thread has ended."""
        if self.config.admission.curves_file:
            self.curves.save(Path(self.config.admission.curves_file))


def build(config: EngineConfig) -> Parts:
    """Loads and connects everything.

    Raises:
        ModelError: the model or the memory does not allow serving; the message says what to do.
    """
    threads = choose_threads(config.num_threads)
    with computing_alone():
        parts = _build(config, threads.count)
    if parts.loaded.device.type == "cpu":
        logger.info(
            "CPU: %d thread%s (%s), instructions: %s",
            threads.count,
            "s" * (threads.count != 1),
            threads.reason,
            cpu.info()["isa"] if parts.backend_name == "cpu" else "torch's own",
        )
    return parts


@contextmanager
def computing_alone() -> Iterator[None]:
    """Loads on one core, so that the engine thread gets the cores later.

    OpenMP keeps a pool of threads for every thread that ever computed in parallel, and once the pools together are
    larger than the machine it lets none of them wait actively: every parallel step then sleeps and wakes twice.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build(config: EngineConfig, threads: int) -> Parts:
    loaded = load_model(config)
    device = prepare(config, loaded)
    executor, storage, memory = device.executor, device.storage, device.memory
    overlap = loaded.device.type == "cuda" if config.overlap is None else config.overlap
    pool = BlockPool(memory.num_blocks, config.block_size, config.enable_prefix_caching)
    host = HostPool(memory.num_host_blocks)
    curves = LengthCurves()
    if config.admission.curves_file:
        curves.load(Path(config.admission.curves_file))
    admission = Admission(config.admission, memory.num_blocks, config.block_size, curves, pool)
    preemption = Preemption(pool, host, config.preemption)
    scheduler = Scheduler(
        pool,
        host,
        admission,
        preemption,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )

    def start() -> None:
        use_device(loaded.device)
        torch.set_num_threads(threads)
        preemption.cost = executor.measure_costs()

    limits = Limits(
        memory.max_model_len, loaded.vocab_size, memory.num_blocks * config.block_size, scheduler.max_running
    )
    chat = grammar = None
    if loaded.tokenizer is not None:
        chat = ChatTemplate(
            loaded.tokenizer, config.allow_request_template, config.tool_call_format, limits.max_characters
        )
        grammar = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    logger.info(
        "%s: %s on %s (%d thread%s), attention %s; KV pool %d blocks of %d tokens (%.2f GiB, %d sequences of %d); "
        "host pool %d blocks; budget %d tokens a step; admission %s (risk %g); preemption %s",
        config.served_model_name or loaded.name,
        str(loaded.dtype).removeprefix("torch."),
        loaded.device,
        threads,
        "s" * (threads != 1),
        executor.backend.name,
        memory.num_blocks,
        config.block_size,
        memory.num_blocks * storage.bytes_per_block / 2**30,
        memory.num_blocks * config.block_size // memory.max_model_len,
        memory.max_model_len,
        memory.num_host_blocks,
        config.max_num_batched_tokens,
        config.admission.policy,
        config.admission.risk,
        config.preemption,
    )
    core = EngineCore(
        scheduler,
        executor,
        overlap=overlap,
        on_start=start,
        admission=admission,
        bytes_per_block=storage.bytes_per_block,
    )
    return Parts(
        config,
        core,
        limits,
        loaded,
        storage,
        curves,
        chat,
        grammar,
        executor.backend.name,
        BadWords(loaded.tokenizer),
    )


__all__ = ["ModelError", "Parts", "build"]


def needs_constraint(params: SamplingParams) -> bool:
    """Whether the request's tokens are constrained at all."""
    return params.response_format is not None or (params.thinking is not None and params.thinking.budget is not None)
