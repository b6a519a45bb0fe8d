"""One step's sampling: from float32 logits to one token per row, each row by its own request's rules.

Stateless: the noise of a choice is a function of (seed, position, token id) only, so neither the other rows of the
batch nor a preemption can change it. The order of the filters is documented at `SamplingParams`. What goes wrong with
one row, a NaN too, stays in its row. Log-probabilities are the model's own, before any filter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from cb_kernels.sampling.noise import gumbel

from ..request import Logprob
from .batch import ROW_FAILED, SamplingBatch
from .logprobs import Scores

logger = logging.getLogger("cb_backend")

NO_FINITE_SCORE = "the model produced no finite score for the next token"

# A sort of the whole vocabulary is slow; nearly always the nucleus lies within the best few.
_NUCLEUS_GUESS = 1024


@dataclass(slots=True)
class Sampled:
    """`token_ids [rows]` on the logits' device; `logprobs` per row or empty; `errors`: row -> what was wrong."""

    token_ids: torch.Tensor
    logprobs: list[Logprob | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    def read(self) -> tuple[list[int], list[Logprob | None], dict[int, str]]:
        """Ids, log-probabilities (per row, or empty) and errors by row."""
        return self.token_ids.tolist(), self.logprobs, self.errors


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Chooses one token for each row.

    Args:
        logits: float32 [rows, vocab_size]; overwritten.
        batch: of the same rows.
    """
    scored = batch.scored
    untouched = logits[scored].clone() if scored else None
    errors = adjust(logits, batch)
    best, token_ids = logits.max(dim=-1)
    for row in torch.nonzero(~best.isfinite())[:, 0].tolist():
        errors.setdefault(row, NO_FINITE_SCORE)
    drawn = [row for row in np.flatnonzero(~batch.greedy).tolist() if row not in errors]
    if drawn:
        token_ids[drawn] = draw(logits if len(drawn) == len(batch) else logits[drawn], batch, drawn)
    result = Sampled(token_ids, errors=errors)
    if untouched is not None:
        tops = batch.logprobs[scored].tolist()
        result.logprobs = [None] * len(batch)
        for row, found in zip(scored, logprobs_of(untouched, token_ids[scored].tolist(), tops), strict=True):
            result.logprobs[row] = found
    return result


def adjust(logits: torch.Tensor, batch: SamplingBatch) -> dict[int, str]:
    """Bias, penalties, masks and bans of all rows, in place. Returns what went wrong, by row."""
    rows: set[int] = set()
    for lists in (batch.listed, batch.banned):
        if lists is not None:
            rows.update(np.flatnonzero(np.diff(lists.offsets)).tolist())
    masks: dict[int, torch.Tensor] = {}
    if batch.mask_rows is not None and batch.masks is not None:
        masks = dict(zip(batch.mask_rows.tolist(), torch.from_numpy(batch.masks).to(logits.device), strict=True))
    errors: dict[int, str] = {}
    for row in sorted(rows | masks.keys()):
        try:
            _adjust_row(logits[row], batch, row, masks.get(row))
        except Exception:
            logger.exception("a row cannot be sampled")
            errors[row] = ROW_FAILED
    return errors


def _adjust_row(scores: torch.Tensor, batch: SamplingBatch, row: int, allowed: torch.Tensor | None) -> None:
    """Bias, penalties, mask and bans of one row, in place on its scores `[vocab_size]`."""
    device = scores.device
    if batch.listed is not None:
        listed = batch.listed
        part = slice(int(listed.offsets[row]), int(listed.offsets[row + 1]))
        ids = torch.from_numpy(listed.ids[part]).to(device)
        changed = scores[ids] + torch.from_numpy(listed.bias[part]).to(device)
        counts = torch.from_numpy(listed.counts[part]).to(device)
        repetition = float(batch.repetition[row])
        if repetition != 1.0:
            known = torch.from_numpy(listed.seen[part]).to(device) | (counts > 0)
            penalized = torch.where(changed < 0, changed * repetition, changed / repetition)
            changed = torch.where(known, penalized, changed)
        times = counts.to(scores.dtype)
        due = float(batch.presence[row]) + float(batch.frequency[row]) * times
        scores[ids] = torch.where(counts > 0, changed - due, changed)
    if allowed is not None:
        scores.masked_fill_(~unpack_mask(allowed, scores.shape[0]), float("-inf"))
    if batch.banned is not None and len(banned := batch.banned.of(row)):
        ids = torch.from_numpy(banned).to(device)
        before = scores[ids].clone()
        scores[ids] = float("-inf")
        if allowed is not None and scores.max() == float("-inf"):
            scores[ids] = before  # the grammar leaves nothing else: it goes before min_tokens and bad_words


def unpack_mask(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Bool [size] from int32 words, lowest bit first; ids past the words are not allowed."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    flat = ((bits[:, None] >> shifts) & 1).bool().flatten()[:size]
    return flat if len(flat) == size else torch.nn.functional.pad(flat, (0, size - len(flat)))


def draw(scores: torch.Tensor, batch: SamplingBatch, rows: Sequence[int]) -> torch.Tensor:
    """Samples by Gumbel-max after temperature, top_k, top_p and min_p: ids [n].

    Args:
        scores: [n, vocab_size], of these rows of `batch`.
    """
    device = scores.device
    scores = scores / torch.from_numpy(batch.temperature[rows]).to(device)[:, None]
    top_k, top_p, least = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
    for i in np.flatnonzero((top_k > 0) & (top_k < scores.shape[1])).tolist():
        keep_top_k(scores[i], int(top_k[i]))
    for i in np.flatnonzero(top_p < 1.0).tolist():
        keep_top_p(scores[i], float(top_p[i]))
    if (least > 0).any():
        # log 0 = -inf keeps everything
        floor = scores.max(dim=-1, keepdim=True).values + torch.from_numpy(least).to(device).log()[:, None]
        scores = scores.masked_fill(scores < floor, float("-inf"))
    ids = torch.arange(scores.shape[1], device=device)
    seeds, positions = (
        torch.from_numpy(batch.seeds[rows]).to(device),
        torch.from_numpy(batch.positions[rows]).to(device),
    )
    return (scores + gumbel(seeds, positions, ids)).argmax(dim=-1)


def keep_top_k(row: torch.Tensor, k: int) -> None:
    """Sets all but the `k` largest to -inf; those equal to the k-th stay."""
    threshold = row.topk(k).values[-1]
    row.masked_fill_(row < threshold, float("-inf"))


def keep_top_p(row: torch.Tensor, p: float) -> None:
    """Keeps the smallest set of the most likely tokens whose probability reaches `p` (at least one)."""
    total = row.logsumexp(0)
    for count in (min(_NUCLEUS_GUESS, len(row)), len(row)):
        values, ids = row.topk(count)
        mass = (values - total).exp().cumsum(0)
        if count == len(row) or mass[-1] >= p:
            break
    # A token goes when those before it already reach p.
    size = int((mass[:-1] < p).sum()) + 1
    kept, at = values[:size].clone(), ids[:size]
    row.fill_(float("-inf"))
    row[at] = kept


def logprobs_of(logits: torch.Tensor, chosen: Sequence[int], tops: Sequence[int]) -> list[Logprob]:
    """Log-probabilities of the chosen ids and of each row's `tops` most likely ones, from raw logits [rows, vocab]."""
    picked = torch.tensor(chosen, device=logits.device)
    return Scores(logits, picked, max(tops)).read(chosen, tops)
