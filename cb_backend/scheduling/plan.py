"""What a step is and what comes back, as values: ids, numbers and arrays, nothing that lives on.

A plan can be pickled, logged, replayed, and run in another process. An executor keeps a row for each slot (the block
table of the sequence that has it), so that a plan carries only what changed: all blocks of a sequence when it gets its
slot, one block when it grows. numpy only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..request import Logprob
from ..sampling.batch import Bools, Ints, SamplingBatch

ON_DEVICE = -1  # in the place of a token id: the one that the step before sampled for the same slot


class Assignment(NamedTuple):
    """`num_tokens` tokens of one sequence in one step, from position `start`; `samples`: its last row is sampled."""

    seq_id: int
    slot: int
    start: int
    num_tokens: int
    samples: bool


class TableDelta(NamedTuple):
    """The block table of the sequence in `slot` has these blocks from place `at` on."""

    slot: int
    at: int
    blocks: tuple[int, ...]


class PromptTargets(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted. Row `row + i` of the step predicts `targets[i]`, which is at
    position `start + i + 1` of its sequence. `top`: how many of the most likely tokens, too."""

    seq_id: int
    row: int
    start: int
    targets: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step does, in this order: swap out, swap in, the ragged forward, sampling.

    The arrays have an entry for each sequence of the step, decodes first, then chunks of prompts.
    """

    step: int
    seq_ids: tuple[int, ...]  # `Request.seq_id`
    slots: Ints
    starts: Ints  # position of the first token
    lengths: Ints  # tokens
    samples: Bools  # its last row is sampled
    token_ids: Ints  # [sum(lengths)], of all sequences; ON_DEVICE where the host does not know it yet
    sampling: SamplingBatch  # its rows: the sequences that sample, in order
    tables: tuple[TableDelta, ...] = ()
    prompt_targets: tuple[PromptTargets, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()  # (device block, host block)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host block, device block)
    admitted: tuple[int, ...] = ()  # seq_ids
    resumed: tuple[int, ...] = ()
    preempted: tuple[tuple[int, str], ...] = ()  # (seq_id, "swap" | "recompute")
    completed: tuple[int, ...] = ()  # their prompts are computed, and they generate nothing
    indexed: tuple[int, ...] = ()  # device blocks that later requests may hit, if the step succeeds
    errors: Mapping[int, str] = field(default_factory=dict)  # sampled row -> why its token is of no use
    sampled: tuple[int, ...] = field(init=False)  # the seq_id of each sampled row

    def __post_init__(self) -> None:
        rows = zip(self.seq_ids, self.samples.tolist(), strict=True)
        object.__setattr__(self, "sampled", tuple([seq_id for seq_id, samples in rows if samples]))

    @property
    def assignments(self) -> list[Assignment]:
        """The sequences of the step one by one."""
        arrays = (self.slots.tolist(), self.starts.tolist(), self.lengths.tolist(), self.samples.tolist())
        return [Assignment(*each) for each in zip(self.seq_ids, *arrays, strict=True)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def __bool__(self) -> bool:
        return bool(self.seq_ids or self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device gave back, one entry per sampled row, in order."""

    token_ids: Sequence[Sequence[int]]  # one token; more where a step verifies guesses
    logprobs: Sequence[tuple[Logprob, ...] | None] = ()  # as many as tokens; empty: no row wanted any
    prompt_logprobs: Mapping[int, Sequence[Logprob]] = field(default_factory=dict)  # by seq_id: this step's targets
    errors: Mapping[int, str] = field(default_factory=dict)  # sampled row -> what went wrong with that row alone
