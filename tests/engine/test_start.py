"""What starting an engine leaves behind."""

from __future__ import annotations

import logging

import torch

from cb_backend import Engine
from cb_backend.device.cores import choose_threads


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


def test_a_start_is_summed_up_in_one_line(tiny_llama, caplog):
    options = {"num_kv_blocks": 8, "block_size": 16, "max_model_len": 64, "swap_space": 0, "preemption": "recompute"}
    with (
        caplog.at_level(logging.INFO, "cb_backend"),
        Engine(
            model=str(tiny_llama),
            served_model_name="tiny",
            dtype="float32",
            num_threads=1,
            attention_backend="torch",
            max_num_batched_tokens=48,
            **options,
        ),
    ):
        pass
    [line] = [message for message in caplog.messages if message.startswith("tiny: ")]
    head, _, rest = line.partition("; ")
    assert head == "tiny: float32 on cpu (1 thread), attention torch"
    assert rest == (
        "KV pool 8 blocks of 16 tokens (0.00 GiB, 2 sequences of 64); host pool 0 blocks; budget 48 tokens a step; "
        "admission forecast (risk 0.01); preemption recompute"
    )
