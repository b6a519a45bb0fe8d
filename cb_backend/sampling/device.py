"""Sampling by the Triton kernels: the rules of host.py for a whole batch at once, without waiting for the device.

What the host knows (parameters, penalties' counts, banned tokens, grammar masks) goes up in one transfer; the chosen
ids stay on the device for the next step, and a copy of them travels to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cb_kernels.sampling.launch import adjust_logits, sample

from ..device.transfer import to_device, to_host
from ..request import Logprob
from .batch import Ints, SamplingBatch
from .host import NO_FINITE_SCORE, unpack_mask
from .logprobs import Scores


@dataclass(slots=True)
class DeviceSampled:
    """What was chosen, on its way to the host. `token_ids`: int64 [rows], on the device."""

    token_ids: torch.Tensor
    logprobs: Ints  # [rows], how many most likely tokens are wanted
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
            tops = self.logprobs[self.scored].tolist()
            for i, found in zip(self.scored, self.scores.read([ids[i] for i in self.scored], tops), strict=True):
                logprobs[i] = found
        return ids, logprobs, errors


class DeviceSampler:
    """Args:
    device: where the logits are; a CPU only under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> DeviceSampled:
        """Chooses one token for each row of `logits`, float32 [rows, vocab_size], which is overwritten."""
        masked = [] if batch.mask_rows is None else batch.mask_rows.tolist()
        listed = _listed_tokens(batch, masked)
        scored = batch.scored
        arrays: list[np.ndarray] = [
            batch.numbers, batch.top_k, batch.seeds, batch.positions, np.array(scored, dtype=np.int64), *listed,
        ]  # fmt: skip
        bans = [np.empty(0, dtype=np.int64) if batch.banned is None else batch.banned.of(row) for row in masked]
        if batch.masks is not None:
            arrays += [batch.masks, *bans]
        numbers, top_k, seeds, positions, rows, *rest = to_device(arrays, self._device)
        temperature, top_p, min_p, repetition, presence, frequency = numbers
        raw = logits.index_select(0, rows) if scored else None
        if len(listed[0][0]):
            ids, bias, counts, seen = rest[:4]
            adjust_logits(logits, ids, bias, counts, seen, repetition, presence, frequency)
        for row, words, banned in zip(masked, *((rest[4], rest[5:]) if masked else ((), ())), strict=True):
            _apply_grammar(logits[row], words, banned)
        best = logits.amax(-1)
        chosen = sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
        result = DeviceSampled(chosen, batch.logprobs, to_host(chosen), to_host(best), scored)
        if raw is not None:
            result.scores = Scores(raw, chosen.index_select(0, rows), int(batch.logprobs.max()))
        return result


def _listed_tokens(
    batch: SamplingBatch, masked: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens whose scores change, as `adjust_logits` takes them: ids, bias, counts, seen, each [rows, most listed].

    Banned ones get a bias of -inf, except in rows with a mask: what that allows goes before bans.
    """
    rows: list[dict[int, tuple[float, int, bool]]] = [{} for _ in range(len(batch))]
    if batch.listed is not None:
        listed = batch.listed
        tokens = list(
            zip(listed.ids.tolist(), listed.bias.tolist(), listed.counts.tolist(), listed.seen.tolist(), strict=True)
        )
        for row in np.flatnonzero(np.diff(listed.offsets)).tolist():
            part = tokens[listed.offsets[row] : listed.offsets[row + 1]]
            rows[row] = {token: (bias_of, times, seen_there) for token, bias_of, times, seen_there in part}
    if batch.banned is not None:
        for row in set(np.flatnonzero(np.diff(batch.banned.offsets)).tolist()) - set(masked):
            for token in batch.banned.of(row).tolist():
                _bias, times, seen_there = rows[row].get(token, (0.0, 0, False))
                rows[row][token] = (float("-inf"), times, seen_there)
    shape = (len(rows), max(map(len, rows), default=0))
    ids = np.full(shape, -1, dtype=np.int32)
    bias = np.zeros(shape, dtype=np.float32)
    counts = np.zeros(shape, dtype=np.int32)
    seen = np.zeros(shape, dtype=np.bool_)
    for i, found in enumerate(rows):
        if found:
            n = len(found)
            ids[i, :n] = list(found)
            bias[i, :n], counts[i, :n], seen[i, :n] = zip(*found.values(), strict=True)
    return ids, bias, counts, seen


def _apply_grammar(row: torch.Tensor, words: torch.Tensor, banned: torch.Tensor) -> None:
    """Masks one row, and bans tokens beside the mask unless that leaves nothing."""
    row.masked_fill_(~unpack_mask(words, len(row)), float("-inf"))
    if len(banned):
        scores = row.index_select(0, banned)
        row.index_fill_(0, banned, float("-inf"))
        nothing_else = row.amax() == float("-inf")
        row.index_copy_(0, banned, torch.where(nothing_else, scores, float("-inf")))
