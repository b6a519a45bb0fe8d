"""lm-evaluation-harness scores a task through the server as its transformers backend does on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.bento.servers import Server
from tests.clients.conftest import TINY

pytestmark = pytest.mark.timeout(240)

DATA = Path(__file__).parents[1] / "data" / "lm_eval"
TASK = "cb_words"
METRICS = ("acc,none", "acc_norm,none", "acc_stderr,none")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskManager:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = yaml.safe_load((DATA / f"{TASK}.yaml").read_text(encoding="utf-8"))
    task["dataset_kwargs"] = {"data_files": {"test": str(DATA / f"{TASK}.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / f"{TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(tasks: TaskManager, backend: str, **model_args: Any) -> tuple[dict[str, float], list[tuple[float, bool]]]:
    """The metrics, and of every ending its log-likelihood and whether it is the greedy one."""
    result = simple_evaluate(
        model=backend, model_args=model_args, tasks=[TASK], task_manager=tasks, batch_size=1, bootstrap_iters=0
    )
    samples = sorted(result["samples"][TASK], key=lambda sample: sample["doc_id"])
    endings = [(float(value), bool(greedy)) for sample in samples for value, greedy in sample["filtered_resps"]]
    return {name: result["results"][TASK][name] for name in METRICS}, endings


def test_a_task_is_scored_as_by_the_transformers_backend(
    tasks: TaskManager, tiny_server: Server, tiny_llama: Path
) -> None:
    through_server = evaluate(
        tasks,
        "local-completions",
        model=TINY,
        base_url=f"{tiny_server.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(tiny_llama),
        num_concurrent=2,
    )
    by_transformers = evaluate(tasks, "hf", pretrained=str(tiny_llama), dtype="float32", device="cpu")
    assert len(through_server[1]) == 24
    assert through_server[0] == by_transformers[0]
    assert [greedy for _, greedy in through_server[1]] == [greedy for _, greedy in by_transformers[1]]
    values = [value for value, _ in by_transformers[1]]
    assert [value for value, _ in through_server[1]] == pytest.approx(values, abs=1e-3)
