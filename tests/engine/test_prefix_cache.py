"""Equal prompt beginnings are computed once, for those that may share them, and the usage says so."""

from __future__ import annotations

import pytest

from cb_backend import Engine, SamplingParams

PREFIX = [3 + (i * 7) % 500 for i in range(200)]
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tiny_llama):
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=200, block_size=16) as engine:
        yield engine


def test_prompts_that_arrive_together_share_their_prefix(engine):
    prompts = [[*PREFIX, 400 + i] for i in range(16)]
    outputs = engine.generate(prompts, PARAMS)
    cached = [output.usage.cached_tokens for output in outputs]
    assert cached == [0] + [192] * 15  # 12 whole blocks of 16
    # 201 once, then 9 of each of the others, and three further tokens of each
    assert engine.stats()["computed_tokens"] == 201 + 15 * 9 + 16 * 3
    assert engine.stats()["prefix_hit_tokens"] == 15 * 192


def test_sharing_changes_no_output(engine, tiny_llama):
    prompts = [[*PREFIX, 400 + i] for i in range(6)]
    shared = [output.token_ids for output in engine.generate(prompts, PARAMS)]
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=200, enable_prefix_caching=False) as plain:
        assert [output.token_ids for output in plain.generate(prompts, PARAMS)] == shared
        assert plain.stats()["prefix_hit_tokens"] == 0


def test_a_salt_keeps_tenants_apart(engine):
    def cached(salt):
        return engine.generate(PREFIX, PARAMS, salt=salt)[0].usage.cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached(None)] == [0, 0, 192, 0]


def test_choices_share_the_prompt_and_count_it_once(engine):
    (output,) = engine.generate([PREFIX], SamplingParams(max_tokens=4, n=4, seed=1, ignore_eos=True))
    assert len(output.choices) == 4
    # Each of the other three computes the 8 tokens again that do not fill a block.
    assert engine.stats()["computed_tokens"] == 200 + 3 * 8 + 4 * 3


def test_generated_tokens_can_be_hit_by_the_next_turn(engine):
    first = engine.generate(PREFIX, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))[0]
    turn = [*PREFIX, *first.token_ids, 9, 9]
    assert engine.generate(turn, PARAMS)[0].usage.cached_tokens == (len(turn) - 3) // 16 * 16
