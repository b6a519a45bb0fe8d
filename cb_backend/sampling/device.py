"""Sampling by the Triton kernels: the rules of host.py for a whole batch at once, without waiting for the device.

What the host knows (parameters, penalties' counts, banned tokens, grammar masks) goes up in one transfer; the chosen
ids stay on the device for the next step, and a copy of them travels to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cb_kernels.sampling.launch import adjust_logits, sample

from ..device.transfer import to_device, to_host
from ..request import Logprob, Request
from .host import NO_FINITE_SCORE, banned_ids, unpack_mask
from .logprobs import Scores


@dataclass(slots=True)
class DeviceSampled:
    """What was chosen, on its way to the host. `token_ids`: int64 [rows], on the device."""

    token_ids: torch.Tensor
    requests: Sequence[Request]
    ids_on_host: torch.Tensor
    best: torch.Tensor  # float32 [rows]: the largest score of each row after its masks
    scored: list[int] = field(default_factory=list)  # rows that want log-probabilities
    scores: Scores | None = None

    def read(self) -> tuple[list[int], list[Logprob | None], dict[int, str]]:
        """Ids, log-probabilities (per row, or empty) and errors by row. The copies must have arrived."""
        ids = self.ids_on_host.tolist()
        errors = {i: NO_FINITE_SCORE for i, best in enumerate(self.best.tolist()) if not abs(best) < float("inf")}
        logprobs: list[Logprob | None] = []
        if self.scores is not None:
            logprobs = [None] * len(ids)
            tops = [self.requests[i].params.logprobs or 0 for i in self.scored]
            for i, found in zip(self.scored, self.scores.read([ids[i] for i in self.scored], tops), strict=True):
                logprobs[i] = found
        return ids, logprobs, errors


class DeviceSampler:
    """Args:
    device: where the logits are; a CPU only under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, logits: torch.Tensor, requests: Sequence[Request]) -> DeviceSampled:
        """Chooses one token for each row of `logits`, float32 [rows, vocab_size], which is overwritten."""
        grammars = _Grammars(requests)
        listed = _listed_tokens(requests)
        settings = np.empty((6, len(requests)), dtype=np.float32)
        for i, p in enumerate(request.params for request in requests):
            settings[:, i] = (
                p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty,
            )  # fmt: skip
        scored = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
        arrays: list[np.ndarray] = [
            settings,
            np.array([request.params.top_k for request in requests], dtype=np.int32),
            np.array([request.seed for request in requests], dtype=np.int64),
            np.array([request.num_known - 1 for request in requests], dtype=np.int64),
            np.array(scored, dtype=np.int64),
            *listed,
            *grammars.arrays,
        ]
        numbers, top_k, seeds, positions, rows, *rest = to_device(arrays, self._device)
        temperature, top_p, min_p, repetition, presence, frequency = numbers
        raw = logits.index_select(0, rows) if scored else None
        if len(listed[0][0]):
            ids, bias, counts, seen = rest[:4]
            adjust_logits(logits, ids, bias, counts, seen, repetition, presence, frequency)
        grammars.apply(logits, rest[4:])
        best = logits.amax(-1)
        chosen = sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
        result = DeviceSampled(chosen, requests, to_host(chosen), to_host(best), scored)
        if raw is not None:
            most = max(requests[i].params.logprobs or 0 for i in scored)
            result.scores = Scores(raw, chosen.index_select(0, rows), most)
        return result


def _listed_tokens(requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens whose logits change, as `adjust_logits` takes them: ids, bias, counts, seen, each [rows, most listed]."""
    rows = [_listed_of(request) for request in requests]
    shape = (len(rows), max(map(len, rows), default=0))
    ids = np.full(shape, -1, dtype=np.int32)
    bias = np.zeros(shape, dtype=np.float32)
    counts = np.zeros(shape, dtype=np.int32)
    seen = np.zeros(shape, dtype=np.bool_)
    for i, row in enumerate(rows):
        if row:
            n = len(row)
            ids[i, :n] = list(row)
            bias[i, :n], counts[i, :n], seen[i, :n] = zip(*row.values(), strict=True)
    return ids, bias, counts, seen


def _listed_of(request: Request) -> dict[int, tuple[float, int, bool]]:
    """One row's tokens: (bias, times generated, in the prompt)."""
    params = request.params
    bias: dict[int, float] = dict(params.logit_bias)
    if request.constraint is None:
        bias |= dict.fromkeys(banned_ids(request), float("-inf"))
    counts: Counter[int] = Counter()
    seen: set[int] = set()
    if params.repetition_penalty != 1.0:
        seen = set(request.token_ids[: request.prompt_len])
    if seen or params.presence_penalty or params.frequency_penalty:
        counts = Counter(request.token_ids[request.prompt_len :])
    return {token: (bias.get(token, 0.0), counts[token], token in seen) for token in {*bias, *counts, *seen}}


class _Grammars:
    """The masks of the rows that have a grammar; what it allows goes before min_tokens and banned words."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._rows: list[tuple[int, bool]] = []  # (row, whether tokens are banned beside the mask)
        self.arrays: list[np.ndarray] = []
        for i, request in enumerate(requests):
            if request.constraint is None:
                continue
            allowed = request.constraint.allowed()
            banned = np.array(banned_ids(request), dtype=np.int64)
            words = np.empty(0, dtype=np.int32) if allowed is None else np.asarray(allowed)
            if len(words) or len(banned):
                self._rows.append((i, bool(len(banned))))
                self.arrays += [words, banned]

    def apply(self, logits: torch.Tensor, arrays: Sequence[torch.Tensor]) -> None:
        for (i, bans), words, banned in zip(self._rows, arrays[::2], arrays[1::2], strict=True):
            row = logits[i]
            if len(words):
                row.masked_fill_(~unpack_mask(words, len(row)), float("-inf"))
            if bans:
                scores = row.index_select(0, banned)
                row.index_fill_(0, banned, float("-inf"))
                if len(words):
                    nothing_else = row.amax() == float("-inf")
                    row.index_copy_(0, banned, torch.where(nothing_else, scores, float("-inf")))
