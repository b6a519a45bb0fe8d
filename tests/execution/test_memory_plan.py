"""How large the pools become, and what an engine learnt and keeps over a restart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.device.headroom import Room
from cb_backend.errors import ModelError
from cb_backend.execution import memory_plan as memory_module
from cb_backend.execution.memory_plan import plan_memory
from cb_backend.kv.storage import KVGeometry


@dataclass
class Loaded:
    """The part of a `LoadedModel` that sizes depend on: 1024 bytes a token in float32."""

    geometry: KVGeometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=32, num_heads=4)
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    max_model_len: int = 1000


def plan(room=None, **fields):
    return plan_memory(EngineConfig(**{"model": "m", "block_size": 10, "swap_space": 0} | fields), Loaded(), room)


def test_the_pool_is_as_large_as_it_was_asked_to_be():
    assert plan(num_kv_blocks=300).num_blocks == 300
    assert plan(kv_cache_memory="1MiB").num_blocks == 2**20 // 10_240


def test_no_pool_is_larger_than_all_sequences_could_fill():
    assert plan(kv_cache_memory="1GiB", max_num_seqs=3).num_blocks == 3 * 100


@pytest.mark.parametrize("share, blocks", [(0.9, 899), (0.5, 499)])
def test_a_gpu_gives_the_stated_share_of_what_is_left(share, blocks):
    """One block of the share is the trash block."""
    assert plan(room=Room(1200 * 10_240, 150 * 10_240, 50 * 10_240), gpu_memory_utilization=share).num_blocks == blocks


@pytest.mark.parametrize("room", [Room(10**6, 2 * 10**6), Room(10_000, 0), Room(20_480, 0)])
def test_a_gpu_without_room_is_a_clear_error(room):
    with pytest.raises(ModelError, match="no memory is left for the KV pool on the GPU.*GiB free beside the weights"):
        plan(room=room)


def test_a_pool_never_takes_more_than_the_card_has():
    room = Room(120 * 10_240, 20 * 10_240)
    assert plan(room=room, num_kv_blocks=99).num_blocks == 99
    assert plan(room=room, gpu_memory_utilization=1.0).num_blocks == 99
    with pytest.raises(ModelError, match="1034240 bytes, more than the 1024000 that the GPU has left.*lower num_kv_"):
        plan(room=room, num_kv_blocks=100)
    with pytest.raises(ModelError, match="more than the 1024000 that the GPU has left"):
        plan(room=room, kv_cache_memory="1GiB")


def test_a_float8_cache_takes_a_quarter_of_float32():
    assert plan(kv_cache_memory="1MiB", kv_cache_dtype="fp8_e4m3").num_blocks == 4 * (2**20 // 10_240) + 1


def test_a_cpu_gives_a_quarter_of_what_is_free_within_the_containers_limit(monkeypatch):
    monkeypatch.setattr(memory_module, "_meminfo", lambda field: 4000 * 10_240)
    monkeypatch.setattr(memory_module, "memory_limit", lambda: None)
    assert plan().num_blocks == 1000
    monkeypatch.setattr(memory_module, "memory_limit", lambda: 400 * 10_240)
    assert plan().num_blocks == 100


def test_the_host_pool_follows_swap_space_and_is_absent_without_swapping():
    assert plan(num_kv_blocks=300, swap_space=50 * 10_240).num_host_blocks == 50
    assert plan(num_kv_blocks=300, swap_space=50 * 10_240, preemption="recompute").num_host_blocks == 0
    assert plan(num_kv_blocks=10, swap_space="1GiB").num_host_blocks == 40


def test_sequences_are_limited_to_what_the_pool_holds():
    assert plan(num_kv_blocks=20).max_model_len == 200
    assert plan(num_kv_blocks=300).max_model_len == 1000


def test_observed_lengths_are_kept_over_a_restart(tiny_llama, tmp_path):
    fields = {
        "model": str(tiny_llama),
        "dtype": "float32",
        "num_kv_blocks": 20,
        "admission": {"curves_file": str(tmp_path / "curves.json")},
    }
    anything = SamplingParams(max_tokens=5, stop_token_ids=tuple(range(512)))  # ends by itself, after one token
    with Engine(**fields) as engine:
        engine.generate([[5, 6]] * 4, anything, request_class="short")
        known = engine.core.call(lambda: engine.parts.curves.effective_observations("short"))
    assert known > 3
    with Engine(**fields) as engine:
        again = engine.core.call(lambda: engine.parts.curves.effective_observations("short"))
    assert again == pytest.approx(known, rel=0.01)
