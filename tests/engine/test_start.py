"""What starting an engine leaves behind."""

from __future__ import annotations

import torch

from cb_backend import Engine
from cb_backend.cores import choose_threads


def test_starting_an_engine_leaves_the_callers_threads_alone_and_measures_with_its_own(tiny_llama):
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a caller may have it
    try:
        with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=8, num_threads=2) as engine:
            assert torch.get_num_threads() == 1
            assert engine.core.call(torch.get_num_threads) == choose_threads(2).count
            stats = engine.stats()
            assert 0 < stats["recompute_seconds_per_token"] < 1
            assert 0 < stats["swap_seconds_per_block"] < 1
    finally:
        torch.set_num_threads(before)
