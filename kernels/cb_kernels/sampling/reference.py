"""What adjusting logits and drawing tokens mean, one row and one token at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cb_kernels.sampling.noise import gumbel


def reference_adjust_logits(
    logits: Tensor,
    ids: Tensor,
    bias: Tensor,
    counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Applies bias, then penalties, to the tokens that each row lists; in place.

    Args:
        logits: float32 [rows, vocab].
        ids: int32 [rows, n], distinct within a row; negative: unused entry.
        bias: float32 [rows, n], added first (-inf forbids a token).
        counts: int32 [rows, n], how often the row has generated the token.
        seen: bool [rows, n], whether the prompt contains it.
        repetition, presence, frequency: float32 [rows]. A token that was seen or generated has its logit divided by
            `repetition` (multiplied, where the logit is not positive); then frequency * count is taken off, and
            presence where count > 0.
    """
    for row, listed in enumerate(ids.tolist()):
        for column, token in enumerate(listed):
            if not 0 <= token < logits.shape[1]:
                continue
            logit = logits[row, token] + bias[row, column]
            count = counts[row, column]
            if count > 0 or seen[row, column]:
                logit = logit / repetition[row] if logit > 0 else logit * repetition[row]
            logit = logit - frequency[row] * count
            if count > 0:
                logit = logit - presence[row]
            logits[row, token] = logit


def reference_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draws one token per row: temperature, top-k, top-p of what is left, min-p, then Gumbel-max.

    A filter keeps all tokens as likely as the least likely one it must keep (ties are never split), so what it keeps is
    a threshold on the logit. The lowest id wins a tie of scores.

    Args:
        logits: float32 [rows, vocab]; -inf: never drawn.
        temperature: float32 [rows], below 1e-5: greedy.
        top_k: int32 [rows], 0 or less: off. top_p: float32 [rows], 1: off. min_p: float32 [rows], 0: off.
        seeds, positions: int64 [rows], of the noise.

    Returns:
        int64 [rows].
    """
    chosen = []
    vocab = logits.shape[1]
    noise = gumbel(seeds, positions, torch.arange(vocab, device=logits.device))
    for row in range(logits.shape[0]):
        heat = temperature[row].item()
        if heat < 1e-5:
            chosen.append(int(logits[row].argmax()))
            continue
        value = logits[row] / temperature[row]
        order = value.sort(descending=True).values.double()
        floor = -math.inf
        k = int(top_k[row])
        if 0 < k < vocab:
            floor = order[k - 1].item()
        kept = order[order >= floor]
        mass = (kept - order[0]).exp().cumsum(0)
        p = top_p[row].item()
        if p < 1.0:
            floor = max(floor, kept[int((mass < p * mass[-1]).sum())].item())
        if min_p[row] > 0:
            floor = max(floor, order[0].item() + math.log(min_p[row].item()))
        score = torch.where(value.double() >= floor, value + noise[row], -math.inf)
        chosen.append(int(score.argmax()))
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)
