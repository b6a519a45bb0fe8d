"""Decode steps over static buffers, with a stand-in for the capture that calls the same Python again."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.engine import build as assembly
from cb_backend.errors import ModelError
from cb_backend.execution.batch import build_batch
from cb_backend.execution.graphs import DecodeGraphs, bucket_sizes
from cb_backend.execution.probe import probe_sampling
from cb_backend.execution.tables import BlockTables
from cb_backend.kv.storage import KVGeometry, KVStorage
from cb_backend.scheduling.plan import StepPlan, TableDelta
from tests.engine.oracle import random_prompts
from tests.replaying import Replaying


def test_sizes_are_fine_where_batches_are_small_and_end_with_the_largest_batch():
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(6) == (1, 2, 4, 6)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bucket_sizes(130)[-4:] == (64, 96, 128, 130)


@pytest.fixture
def storage():
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=2, num_heads=1)
    return KVStorage(geometry, 10, 4, 0, torch.float32, torch.device("cpu"))


def decodes(*sequences):
    """(plan, block tables) of a step in which each sequence, given as (blocks, start), computes one token."""
    tables = BlockTables()
    tables.update(TableDelta(slot, 0, tuple(blocks)) for slot, (blocks, _start) in enumerate(sequences))
    starts = np.array([start for _blocks, start in sequences])
    ones = np.ones(len(starts), dtype=np.int64)
    rows = (np.arange(len(starts)), starts, ones, ones.astype(np.bool_), starts, probe_sampling(len(starts)))
    return StepPlan(1, tuple(range(len(starts))), *rows), tables.rows


def test_padding_rows_see_no_key_and_write_to_the_trash_block(storage):
    batch = build_batch(*decodes(([3, 7], 5)), storage, torch.device("cpu"), padded=4)
    assert batch.slots.tolist() == [7 * 4 + 1, 40, 40, 40]
    assert batch.seq_lens.tolist() == [6, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert batch.num_decodes == 4


def test_a_replay_reads_the_buffers_that_were_captured_whatever_ran_before(storage):
    """Every tensor has the same address in every step, and nothing of a larger step is left in a smaller one."""
    seen = []

    def forward(batch):
        fields = (batch.input_ids, batch.positions, batch.slots, batch.block_tables, batch.seq_lens, batch.cu_seqlens)
        seen.append(([tensor.data_ptr() for tensor in fields], [tensor.clone() for tensor in fields]))
        return batch.input_ids[:, None].float()

    recorder = Replaying()
    graphs = DecodeGraphs(forward, storage, (1, 4), 5, recorder)
    assert list(graphs.capture()) == [4, 1]
    (addresses, _), _ = seen
    seen.clear()
    three = [([1, 2], 6), ([3], 2), ([4, 5, 6], 9)]
    for step in (three, three[:2], three[1:]):
        size = graphs.size_for(len(step))
        assert size == 4
        hidden = graphs.run(build_batch(*decodes(*step), storage, torch.device("cpu"), padded=size))
        assert hidden[: len(step), 0].tolist() == [start for _blocks, start in step]
    assert [ptrs for ptrs, _ in seen] == [addresses] * 3
    ids, positions, slots, tables, lens, firsts = seen[1][1]
    assert positions.tolist() == [6, 2, 0, 0]
    assert slots.tolist() == [2 * 4 + 2, 3 * 4 + 2, 40, 40]
    assert lens.tolist() == [7, 3, 0, 0]
    assert tables[0, :2].tolist() == [1, 2]
    assert firsts.tolist() == [0, 1, 2, 3, 4]


def test_batches_larger_than_every_graph_run_without_one(storage):
    graphs = DecodeGraphs(lambda batch: batch.input_ids[:, None], storage, (1, 2), 5, Replaying())
    assert graphs.size_for(1) == 0, "not captured yet"
    list(graphs.capture())
    assert [graphs.size_for(n) for n in (1, 2, 3)] == [1, 2, 0]


PROMPTS = random_prompts(9, (2, 40), 512, seed=4)
PARAMS = [
    SamplingParams(max_tokens=6 + i, seed=i, temperature=float(i % 2), ignore_eos=True, n=1 + 2 * (i == 3))
    for i in range(9)
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blocks", [120, 12])
def test_an_engine_gives_with_graphs_what_it_gives_without(tiny_llama, overlap, blocks):
    """The reference backend reads lengths from tensors alone, as a captured graph must."""
    fields = {
        "model": str(tiny_llama),
        "dtype": "float32",
        "attention_backend": "reference",
        "block_size": 8,
        "num_kv_blocks": blocks,
        "overlap": overlap,
        "max_num_seqs": 6,
        "admission": {"policy": "prompt"},
    }
    outputs = []
    for sizes in ((), (1, 4, 6)):
        recorder = Replaying()
        with Engine(EngineConfig(**fields)) as engine:
            executor = engine.core.executor
            if sizes:
                capture = functools.partial(executor.capture, recorder, sizes, engine.max_model_len)
                assert engine.core.call(lambda capture=capture: list(capture())) == [6, 4, 1]
            outputs.append([[c.token_ids for c in o.choices] for o in engine.generate(PROMPTS, PARAMS)])
            preempted = engine.stats()["preemptions_recompute"] + engine.stats()["preemptions_swap"]
    assert outputs[0] == outputs[1]
    assert recorder.replays > 10
    assert (preempted > 0) == (blocks == 12)


def test_graphs_are_off_unless_asked_for(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=60) as engine:
        assert engine.core.executor.graphs is None


def test_graphs_without_a_gpu_or_the_triton_backend_are_refused(tiny_llama, monkeypatch):
    fields = {"model": str(tiny_llama), "dtype": "float32", "num_kv_blocks": 60, "cuda_graphs": True}
    with pytest.raises(ModelError, match="cuda_graphs needs a GPU and attention_backend 'triton'.*set cuda_graphs"):
        Engine(**fields).start()
    monkeypatch.setattr(assembly, "prepare", functools.partial(assembly.prepare, recorder=Replaying))
    with pytest.raises(ModelError, match="has 'torch' on cpu; set cuda_graphs to false"):
        Engine(**fields, attention_backend="torch").start()
