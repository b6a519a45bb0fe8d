"""The block table of every running sequence, a row for each slot: written by what plans say has changed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..scheduling.plan import TableDelta


class BlockTables:
    """Grows as slots and longer sequences come. What a row holds beyond its sequence's blocks is of an earlier one."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)  # [slots, blocks]

    def update(self, deltas: Iterable[TableDelta]) -> None:
        for slot, at, blocks in deltas:
            end = at + len(blocks)
            if slot >= self.rows.shape[0] or end > self.rows.shape[1]:
                self._grow(slot + 1, end)
            self.rows[slot, at:end] = blocks

    def _grow(self, slots: int, blocks: int) -> None:
        shape = [
            have if have >= need else max(need, 2 * have)
            for have, need in zip(self.rows.shape, (slots, blocks), strict=True)
        ]
        rows = np.zeros(shape, dtype=np.int32)
        rows[: self.rows.shape[0], : self.rows.shape[1]] = self.rows
        self.rows = rows
