"""One step's sampling: from float32 logits to one token per row, each row by its own request's rules.

Stateless: the noise of a choice is a function of (seed, position, token id) only, so neither the other rows of the
batch nor a preemption can change it. The order of the filters is documented at `SamplingParams`. One row's NaN stays
in its row. Log-probabilities are the model's own, before any filter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from cb_kernels.sampling.noise import gumbel

from ..request import Logprob, Request
from .logprobs import Scores

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


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
    """Chooses one token for each row.

    Args:
        logits: float32 [rows, vocab_size]; overwritten.
        requests: the request of each row; the token's position is the request's `num_known` less the one in flight.
    """
    raw = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    untouched = logits[raw].clone() if raw else None
    for row, request in zip(logits, requests, strict=True):
        adjust(row, request)
    best, token_ids = logits.max(dim=-1)
    errors = {
        i: NO_FINITE_SCORE
        for i, value in enumerate(best.tolist())
        if not value > float("-inf") or value == float("inf")
    }
    drawn = [i for i, r in enumerate(requests) if not r.params.greedy and i not in errors]
    if drawn:
        rows = logits if len(drawn) == len(requests) else logits[drawn]
        token_ids[drawn] = draw(rows, [requests[i] for i in drawn])
    result = Sampled(token_ids, errors=errors)
    if untouched is not None:
        tops = [requests[i].params.logprobs or 0 for i in raw]
        found = iter(logprobs_of(untouched, token_ids[raw].tolist(), tops))
        result.logprobs = [next(found) if r.params.logprobs is not None else None for r in requests]
    return result


def adjust(row: torch.Tensor, request: Request) -> None:
    """Bias, masks and penalties of one request, in place on its row `[vocab_size]`."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(request.token_ids)), device=row.device)
        seen = row[ids]
        row[ids] = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    if request.num_settled and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(request.token_ids[request.prompt_len :])
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
    allowed = None if request.constraint is None else request.constraint.allowed()
    if allowed is not None:
        row.masked_fill_(~unpack_mask(allowed, row.shape[0]).to(row.device), float("-inf"))
    if banned := banned_ids(request):
        ids = torch.tensor(banned, device=row.device)
        scores = row[ids].clone()
        row[ids] = float("-inf")
        if allowed is not None and row.max() == float("-inf"):
            row[ids] = scores  # the grammar leaves nothing else: it goes before min_tokens and bad_words


def banned_ids(request: Request) -> list[int]:
    """Tokens that may not come next: ends before min_tokens, and those that would complete a banned word."""
    banned: list[int] = []
    if request.stop_ids and request.num_output <= request.params.min_tokens:  # the token in the making is counted
        banned += request.stop_ids
    if request.bad_word_ids:
        output = request.token_ids[request.prompt_len :]
        for word in request.bad_word_ids:
            if len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]:
                banned.append(word[-1])
    return banned


def unpack_mask(bits: torch.Tensor, size: int) -> torch.Tensor:
    """Bool [size] from int32 words, lowest bit first; ids past the words are not allowed."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    flat = ((bits[:, None] >> shifts) & 1).bool().flatten()[:size]
    return flat if len(flat) == size else torch.nn.functional.pad(flat, (0, size - len(flat)))


def draw(rows: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Samples `rows [n, vocab_size]` by Gumbel-max after temperature, top_k, top_p and min_p: ids [n]."""
    device = rows.device
    params = [r.params for r in requests]
    rows = rows / torch.tensor([p.temperature for p in params], device=device)[:, None]
    seeds = torch.tensor([r.seed for r in requests], device=device)
    positions = torch.tensor([r.num_known - 1 for r in requests], device=device)
    for i, p in enumerate(params):
        if 0 < p.top_k < rows.shape[1]:
            keep_top_k(rows[i], p.top_k)
        if p.top_p < 1.0:
            keep_top_p(rows[i], p.top_p)
    min_p = torch.tensor([p.min_p for p in params], device=device)
    if bool((min_p > 0).any()):
        floor = rows.max(dim=-1, keepdim=True).values + min_p.log()[:, None]  # log 0 = -inf keeps everything
        rows = rows.masked_fill(rows < floor, float("-inf"))
    ids = torch.arange(rows.shape[1], device=device)
    return (rows + gumbel(seeds, positions, ids)).argmax(dim=-1)


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
