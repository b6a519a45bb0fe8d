"""Log-probabilities of chosen tokens and of the most likely ones: computed on the device, read on the host later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device.transfer import to_host
from ..request import Logprob


class Scores:
    """Log-probabilities from raw logits, on their way to the host.

    Args:
        logits: float32 [rows, vocab_size], before any filter.
        chosen: int64 [rows], on the logits' device.
        most: how many of the most likely tokens to keep of each row.
    """

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, most: int) -> None:
        table = logits.log_softmax(-1)
        self._picked = to_host(table.gather(1, chosen[:, None])[:, 0])
        self._best: tuple[torch.Tensor, torch.Tensor] | None = None
        if most:
            values, ids = table.topk(min(most, table.shape[1]), dim=-1)
            self._best = to_host(values), to_host(ids)

    def read(self, chosen: Sequence[int], tops: Sequence[int]) -> list[Logprob]:
        """One entry per row, with the row's own number of most likely tokens. The copies must have arrived."""
        picked = self._picked.tolist()
        if self._best is None:
            return [Logprob(token, value) for token, value in zip(chosen, picked, strict=True)]
        values, ids = (part.tolist() for part in self._best)
        best = [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
        return [Logprob(chosen[i], picked[i], tuple(best[i][: tops[i]])) for i in range(len(chosen))]
