"""Neither neighbours, nor chunking, nor preemption at every step changes what a request gets."""

from __future__ import annotations

import itertools

import pytest

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.scheduling.preemption import Preemption, Victim
from cb_backend.scheduling.scheduler import Scheduler

from .oracle import random_prompts

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}


def params(seed: int) -> SamplingParams:
    """A mix: greedy and sampled, with penalties and without, with log-probabilities."""
    return SamplingParams(
        max_tokens=8 + seed % 7,
        seed=seed,
        logprobs=2,
        **({"temperature": 0.0} if seed % 4 == 0 else SAMPLED),
        **({"repetition_penalty": 1.2, "presence_penalty": 0.3} if seed % 3 == 0 else {}),
    )


PROMPTS = random_prompts(32, (1, 70), 512, seed=11)
PARAMS = [params(i) for i in range(32)]


def run(path, prompts=PROMPTS, each=PARAMS, **fields):
    config = EngineConfig(
        **{"model": str(path), "dtype": "float32", "num_kv_blocks": 400, "block_size": 8, "swap_space": "64MiB"}
        | fields
    )
    with Engine(config) as engine:
        outputs = engine.generate(prompts, each)
        stats = engine.stats()
        engine.core.call(lambda: engine.core.scheduler.check())
    return outputs, stats


@pytest.fixture(scope="module")
def alone(tiny_llama):
    """Every request by itself in an engine that has room for everything."""
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=400, block_size=8) as engine:
        return [engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]


def assert_same(outputs, wanted):
    for got, want in zip(outputs, wanted, strict=True):
        assert got.token_ids == want.token_ids
        assert (got.finish_reason, got.text) == (want.finish_reason, want.text)
        assert [p.logprob for p in got.logprobs] == pytest.approx([p.logprob for p in want.logprobs], abs=1e-4)
        assert [[i for i, _ in p.top] for p in got.logprobs] == [[i for i, _ in p.top] for p in want.logprobs]


def test_a_batch_of_thirty_two_is_thirty_two_times_alone(tiny_llama, alone):
    outputs, stats = run(tiny_llama, max_num_seqs=32)
    assert_same(outputs, alone)
    assert stats["preemptions_swap"] + stats["preemptions_recompute"] == 0


@pytest.mark.parametrize("budget", [16, 40, 512])
def test_chunking_and_order_change_nothing(tiny_llama, alone, budget):
    order = list(reversed(range(32)))
    outputs, _ = run(tiny_llama, [PROMPTS[i] for i in order], [PARAMS[i] for i in order], max_num_batched_tokens=budget)
    assert_same(outputs, [alone[i] for i in order])


@pytest.mark.parametrize("mode", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize("prefix_caching, budget", [(False, 512), (True, 512), (True, 24)])
def test_preemption_at_every_step(tiny_llama, alone, monkeypatch, mode, prefix_caching, budget):
    """Every step takes the memory of one running request, whether it is short or not."""
    modes = itertools.cycle(["swap", "recompute"] if mode == "mixed" else [mode])
    plan = Scheduler._make_room_for_decodes

    def choose(self, candidates):
        victims = [r for r in candidates if r.blocks and r.progressed]
        if not victims:
            return None
        request = victims[len(victims) // 2]
        how = next(modes)
        room = self.pool.blocks_for(request.num_computed) <= self.host.available
        return Victim(request, "swap" if how == "swap" and room else "recompute")

    def preempt_one(self, draft):
        decodes = plan(self, draft)
        victim = choose(self.preemption, self.running)
        if victim is not None:
            self._preempt(victim, draft)
        return [request for request in decodes if victim is None or request is not victim.request]

    monkeypatch.setattr(Scheduler, "_make_room_for_decodes", preempt_one)
    monkeypatch.setattr(Preemption, "choose", choose)
    outputs, stats = run(
        tiny_llama, enable_prefix_caching=prefix_caching, max_num_batched_tokens=budget, max_num_seqs=12
    )
    assert_same(outputs, alone)
    if mode != "recompute":
        assert stats["preemptions_swap"] >= 12
    if mode != "swap":
        assert stats["preemptions_recompute"] >= 12
        assert stats["recomputed_tokens"] > 0


def test_choices_of_a_seeded_request_are_reproducible_alone(tiny_llama):
    prompt = PROMPTS[5]
    three = SamplingParams(max_tokens=10, seed=7, n=3, **SAMPLED)
    ones = [SamplingParams(max_tokens=10, seed=7 + i, **SAMPLED) for i in range(3)]
    (several,), _ = run(tiny_llama, [prompt], [three])
    (again,), _ = run(tiny_llama, [prompt], [three], num_kv_blocks=40, max_num_batched_tokens=16)
    alone, _ = run(tiny_llama, [prompt] * 3, ones)
    assert [c.token_ids for c in several.choices] == [c.token_ids for c in again.choices]
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert [c.token_ids for c in several.choices] == [one.token_ids for one in alone]
    assert len({c.token_ids for c in several.choices}) == 3


def test_unseeded_requests_differ_and_the_engines_seed_repeats_them(tiny_llama):
    prompts = [PROMPTS[5]] * 3
    free = SamplingParams(max_tokens=10, **SAMPLED)
    first, _ = run(tiny_llama, prompts, free, seed=1)
    second, _ = run(tiny_llama, prompts, free, seed=1)
    other, _ = run(tiny_llama, prompts, free, seed=2)
    assert len({o.token_ids for o in first}) == 3
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    assert [o.token_ids for o in first] != [o.token_ids for o in other]


def test_in_bfloat16_too_where_layers_run_as_one_native_call(tiny_llama, native_kernels):
    """Exactly: the native product adds its terms in one order for any number of rows."""
    if not native_kernels.native.has_product:
        pytest.skip(f"{native_kernels.isa} has no bf16 products: oneDNN's sums depend on the number of rows")
    config = EngineConfig(
        model=str(tiny_llama), dtype="bfloat16", attention_backend="cpu", num_kv_blocks=400, block_size=8
    )
    with Engine(config) as engine:
        assert len(engine.parts.loaded.model.base_model.layers) == 1  # all of them are one module now
        wanted = [engine.generate([p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)]
    for fields in ({}, {"max_num_batched_tokens": 24}, {"num_kv_blocks": 30}):
        outputs, _ = run(tiny_llama, dtype="bfloat16", attention_backend="cpu", **fields)
        for got, want in zip(outputs, wanted, strict=True):
            assert got.token_ids == want.token_ids
            assert [p.logprob for p in got.logprobs] == [p.logprob for p in want.logprobs]
