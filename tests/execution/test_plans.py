"""A plan is a value: the plans of a run, pickled, give the same tokens on an executor in another process."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.execution.executor import Executor, Pending
from cb_backend.execution.tables import BlockTables
from cb_backend.request import Request
from cb_backend.scheduling.plan import ON_DEVICE, TableDelta
from tests.engine.oracle import random_prompts


def params(i: int) -> SamplingParams:
    """Greedy, seeded draws, filters, penalties, log-probabilities, choices, and a grammar."""
    return SamplingParams(
        max_tokens=8 + i % 7,
        seed=i,
        temperature=float(i % 4 > 0),
        top_p=0.9 if i % 3 == 1 else 1.0,
        repetition_penalty=1.3 if i % 5 == 0 else 1.0,
        frequency_penalty=0.4 if i % 5 == 1 else 0.0,
        logit_bias={7: 3.0} if i % 6 == 0 else {},
        min_tokens=i % 3,
        n=2 if i % 8 == 3 else 1,
        logprobs=1 if i % 4 == 1 else None,
        prompt_logprobs=1 if i % 7 == 2 else None,
        response_format={"type": "regex", "regex": "[a-f]+"} if i % 6 == 4 else None,
    )


def holds(value: object, kind: type) -> bool:
    """Whether a plan's value, at any depth of its containers, is a `kind`."""
    if isinstance(value, kind):
        return True
    if hasattr(value, "__dataclass_fields__"):
        return any(holds(getattr(value, name), kind) for name in value.__dataclass_fields__)
    if isinstance(value, dict):
        return any(holds(each, kind) for each in [*value, *value.values()])
    return isinstance(value, (list, tuple)) and any(holds(each, kind) for each in value)


@pytest.mark.parametrize(("mode", "overlap"), [("swap", True), ("recompute", False)])
def test_recorded_plans_give_the_same_tokens_in_a_fresh_process(tiny_llama, tmp_path, monkeypatch, mode, overlap):
    fields = {
        "model": str(tiny_llama),
        "dtype": "float32",
        "attention_backend": "torch",
        "block_size": 8,
        "num_kv_blocks": 18,
        "swap_space": "16MiB",
        "max_num_batched_tokens": 48,
        "max_num_seqs": 10,
        "preemption": mode,
        "admission": {"policy": "prompt"},
        "overlap": overlap,
    }
    launched: list[Pending] = []
    launch = Executor.launch

    def recording(self, plan):
        launched.append(launch(self, pickle.loads(pickle.dumps(plan))))
        return launched[-1]

    monkeypatch.setattr(Executor, "launch", recording)
    shared = random_prompts(1, (16, 16), 512, seed=1)[0]
    prompts = [
        shared + prompt if i % 2 else prompt for i, prompt in enumerate(random_prompts(18, (1, 40), 512, seed=2))
    ]
    with Engine(EngineConfig(**fields)) as engine:
        engine.generate(prompts, [params(i) for i in range(len(prompts))])
        stats = engine.stats()
    plans = [pending.plan for pending in launched]
    tokens = [[list(row) for row in pending.result().token_ids] for pending in launched]

    assert not any(holds(plan, Request) for plan in plans)
    assert stats[f"preemptions_{mode}"] > 2 and stats["prefix_hit_tokens"] > 0
    assert (mode == "recompute") == (not any(plan.swap_in for plan in plans))
    assert any(plan.sampling.masks is not None for plan in plans)
    assert any(plan.sampling.listed is not None for plan in plans)
    assert any(plan.prompt_targets for plan in plans)
    assert overlap == any((plan.token_ids == ON_DEVICE).any() for plan in plans)

    path = tmp_path / "plans.pickle"
    path.write_bytes(pickle.dumps(plans))
    command = [sys.executable, "-m", "tests.execution.replay_plans", str(path), json.dumps(fields)]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(replayed.stdout.splitlines()[-1]) == tokens


def test_block_tables_grow_and_keep_what_plans_said():
    tables = BlockTables()
    tables.update([TableDelta(1, 0, (4, 5)), TableDelta(0, 0, (7,))])
    tables.update([TableDelta(1, 2, (6,)), TableDelta(3, 0, (1, 2, 3, 8, 9))])
    assert tables.rows[1, :3].tolist() == [4, 5, 6]
    assert tables.rows[3, :5].tolist() == [1, 2, 3, 8, 9]
    assert tables.rows[0, 0] == 7
    assert tables.rows.dtype == np.int32
