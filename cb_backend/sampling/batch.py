"""One step's sampling as arrays: what a sampler must know of each sampled row, and nothing of requests.

    SlotSettings   the parameters of what runs, a row for each slot, written when a sequence gets the slot
    SamplingBatch  of one step: rows gathered from there, and lists for the few rows whose tokens count

A batch is a value: it can be pickled, and sampling the same logits with it gives the same tokens anywhere. numpy only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..request import Request

logger = logging.getLogger("cb_backend")

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

ROW_FAILED = "the engine could not choose the next token of this request"
CONSTRAINT_FAILED = "the grammar of this request's response_format failed"

_NO_LOGPROBS = -1


@dataclass(frozen=True, slots=True, eq=False)
class ListedTokens:
    """Tokens whose scores change, row after row: those of row i are at `offsets[i] : offsets[i + 1]`."""

    offsets: Ints  # [rows + 1]
    ids: Ints
    bias: Floats  # logit_bias
    counts: Ints  # times generated; filled where a penalty counts them
    seen: Bools  # in the prompt; filled where a repetition penalty looks there


@dataclass(frozen=True, slots=True, eq=False)
class BannedTokens:
    """Tokens that may not come next: ends before min_tokens, and those that would complete a banned word. Where the
    row's mask leaves nothing else they may, after all. Row i has `ids[offsets[i] : offsets[i + 1]]`."""

    offsets: Ints  # [rows + 1]
    ids: Ints

    def of(self, row: int) -> Ints:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Row i is the i-th sampled row of the step. The parameters mean what `SamplingParams` says."""

    numbers: Floats  # [6, rows]: temperature, top_p, min_p, repetition, presence and frequency penalty
    top_k: Words  # [rows]; 0 and below: off
    seeds: Ints  # [rows]
    positions: Ints  # [rows], of the token that is chosen, in its sequence
    logprobs: Ints  # [rows], how many of the most likely tokens are wanted; -1: no log-probabilities at all
    greedy: Bools  # [rows]
    listed: ListedTokens | None = None
    banned: BannedTokens | None = None
    mask_rows: Ints | None = None  # [masks], ascending
    masks: Words | None = None  # [masks, words], one bit per token id, lowest bit first; 1: allowed

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def temperature(self) -> Floats:
        return self._row(0)

    @property
    def top_p(self) -> Floats:
        return self._row(1)

    @property
    def min_p(self) -> Floats:
        return self._row(2)

    @property
    def repetition(self) -> Floats:
        return self._row(3)

    @property
    def presence(self) -> Floats:
        return self._row(4)

    @property
    def frequency(self) -> Floats:
        return self._row(5)

    def _row(self, number: int) -> Floats:
        row: Floats = self.numbers[number]
        return row

    @property
    def scored(self) -> list[int]:
        """Rows that want log-probabilities."""
        return np.flatnonzero(self.logprobs >= 0).tolist()


class SlotSettings:
    """Args:
    num_slots: sequences that may run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._numbers: Floats = np.zeros((6, num_slots), dtype=np.float32)
        self._top_k: Words = np.zeros(num_slots, dtype=np.int32)
        self._seeds: Ints = np.zeros(num_slots, dtype=np.int64)
        self._logprobs: Ints = np.zeros(num_slots, dtype=np.int64)
        self._greedy: Bools = np.zeros(num_slots, dtype=np.bool_)
        self._has_lists: Bools = np.zeros(num_slots, dtype=np.bool_)

    def put(self, slot: int, request: Request) -> None:
        """`request` has the slot from now on."""
        p = request.params
        self._numbers[:, slot] = (
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty,
        )  # fmt: skip
        self._top_k[slot] = p.top_k
        self._seeds[slot] = request.seed
        self._logprobs[slot] = _NO_LOGPROBS if p.logprobs is None else p.logprobs
        self._greedy[slot] = p.greedy
        self._has_lists[slot] = bool(request.needs_host_tokens or p.logit_bias or (p.min_tokens and request.stop_ids))

    def batch(self, slots: Ints, positions: Ints, requests: Sequence[Request]) -> tuple[SamplingBatch, dict[int, str]]:
        """The batch of the rows with these slots.

        Args:
            slots, positions: [rows].
            requests: of the rows; each one counts the token that is chosen as in flight.

        Returns:
            The batch, and by row what went wrong with it: its lists are empty then, and its token is of no use.
        """
        lists = [_NOTHING] * len(requests)
        errors: dict[int, str] = {}
        for row in np.flatnonzero(self._has_lists[slots]).tolist():
            request = requests[row]
            try:
                lists[row] = _lists_of(request)
            except Exception:
                logger.exception("request %s: its row cannot be sampled", request.request_id)
                errors[row] = ROW_FAILED if request.constraint is None else CONSTRAINT_FAILED
        batch = SamplingBatch(
            self._numbers.take(slots, axis=1),  # contiguous rows, unlike [:, slots]
            self._top_k[slots],
            self._seeds[slots],
            positions,
            self._logprobs[slots],
            self._greedy[slots],
            _listed(lists),
            _banned(lists),
            *_masks(lists),
        )
        return batch, errors


def batch_of(requests: Sequence[Request]) -> SamplingBatch:
    """The batch in which row i samples the next token of `requests[i]`: for probes and tests."""
    settings = SlotSettings(len(requests))
    for slot, request in enumerate(requests):
        settings.put(slot, request)
    positions = np.array([request.num_known - 1 for request in requests], dtype=np.int64)
    return settings.batch(np.arange(len(requests)), positions, requests)[0]


@dataclass(frozen=True, slots=True)
class _Lists:
    """One row's tokens: id -> (bias, times generated, in the prompt); the banned ones; the grammar's words."""

    listed: dict[int, tuple[float, int, bool]]
    banned: list[int]
    mask: Words | None


_NOTHING = _Lists({}, [], None)


def _lists_of(request: Request) -> _Lists:
    params = request.params
    bias = params.logit_bias
    counts: Counter[int] = Counter()
    seen: set[int] = set()
    if params.repetition_penalty != 1.0:
        seen = set(request.token_ids[: request.prompt_len])
    if seen or params.presence_penalty or params.frequency_penalty:
        counts = Counter(request.token_ids[request.prompt_len :])
    listed = {token: (bias.get(token, 0.0), counts[token], token in seen) for token in {*bias, *counts, *seen}}
    allowed = None if request.constraint is None else request.constraint.allowed()
    mask = None if allowed is None else np.asarray(allowed, dtype=np.int32).reshape(-1)
    return _Lists(listed, _banned_ids(request), mask)


def _banned_ids(request: Request) -> list[int]:
    banned: list[int] = []
    if request.stop_ids and request.num_output <= request.params.min_tokens:  # the token in the making is counted
        banned += sorted(request.stop_ids)
    if request.bad_word_ids:
        output = request.token_ids[request.prompt_len :]
        for word in request.bad_word_ids:
            if len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]:
                banned.append(word[-1])
    return banned


def _offsets(lengths: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _listed(lists: Sequence[_Lists]) -> ListedTokens | None:
    tokens = [token for each in lists for token in each.listed.items()]
    if not tokens:
        return None
    ids, values = zip(*tokens, strict=True)
    bias, counts, seen = zip(*values, strict=True)
    return ListedTokens(
        _offsets([len(each.listed) for each in lists]),
        np.array(ids, dtype=np.int64),
        np.array(bias, dtype=np.float32),
        np.array(counts, dtype=np.int64),
        np.array(seen, dtype=np.bool_),
    )


def _banned(lists: Sequence[_Lists]) -> BannedTokens | None:
    ids = [token for each in lists for token in each.banned]
    return BannedTokens(_offsets([len(each.banned) for each in lists]), np.array(ids, dtype=np.int64)) if ids else None


def _masks(lists: Sequence[_Lists]) -> tuple[Ints | None, Words | None]:
    """The rows that have a mask, and the masks."""
    found = [(row, each.mask) for row, each in enumerate(lists) if each.mask is not None]
    if not found:
        return None, None
    masks = np.zeros((len(found), max(len(mask) for _row, mask in found)), dtype=np.int32)
    for i, (_row, mask) in enumerate(found):
        masks[i, : len(mask)] = mask
    return np.array([row for row, _mask in found], dtype=np.int64), masks
