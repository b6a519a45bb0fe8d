"""How large a step may be after one that the device had no memory for. Pure numbers."""

from __future__ import annotations

from .plan import StepPlan

GROW_AFTER = 64  # steps that succeed before the limits are doubled


class StepLimits:
    """First the prompt tokens of a step are halved, then its sequences; both grow back, doubling."""

    def __init__(self) -> None:
        self._prefill: int | None = None  # most tokens of prompts; None: as many as the budget has
        self._sequences: int | None = None
        self._succeeded = 0  # steps since the last change

    def prefill(self, budget: int) -> int:
        """Of `budget` tokens, those that prompts may take."""
        return budget if self._prefill is None else min(budget, self._prefill)

    def sequences(self, most: int) -> int:
        return most if self._sequences is None else min(most, self._sequences)

    def shrink(self, plan: StepPlan) -> bool:
        """False where a step cannot be smaller: it was one token of one sequence."""
        self._succeeded = 0
        chunked = int(plan.lengths[plan.lengths > 1].sum())
        if chunked:
            self._prefill = chunked // 2
        elif len(plan.seq_ids) > 1:
            self._sequences = len(plan.seq_ids) // 2
        else:
            return False
        return True

    def grow(self) -> None:
        """A step succeeded."""
        if self._prefill is None and self._sequences is None:
            return
        self._succeeded += 1
        if self._succeeded == GROW_AFTER:
            self._succeeded = 0
            self._prefill = _doubled(self._prefill)
            self._sequences = _doubled(self._sequences)


def _doubled(limit: int | None) -> int | None:
    return None if limit is None or limit >= 1 << 20 else 2 * limit
