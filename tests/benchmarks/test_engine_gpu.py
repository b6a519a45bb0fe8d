"""The end-to-end GPU benchmark's command, on a CPU with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from integration.benchmarks import engine_gpu


def test_the_command_measures_the_engine_and_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    assert engine_gpu.main(["--tiny", "--device", "cpu", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert out.read_text() == capsys.readouterr().out
    assert [row["stage"] for row in rows] == ["start", "engine", "engine", "generate_batch", "ratio"]
    for row in rows[1:3]:
        assert row["steps"] >= 8
        assert 0.0 < row["device_busy"] < 1.0
        assert row["step_overhead_us"] > 0
        assert row["out_tok_s"] == pytest.approx(32 / row["wall_s"], rel=0.05)
    assert [row["overlap"] for row in rows[1:3]] == [False, True]
    best = max(row["out_tok_s"] for row in rows[1:3])
    assert rows[4]["ours_to_theirs"] == round(best / rows[3]["out_tok_s"], 2)


def test_time_in_which_something_ran_counts_once() -> None:
    assert engine_gpu.covered([(0.0, 2.0), (1.0, 3.0), (1.5, 1.6), (10.0, 11.0)]) == 4.0
    assert engine_gpu.covered([]) == 0.0


@pytest.mark.parametrize("name, millions", [("qwen3-0.6b", 596), ("llama-8b", 8030)])
def test_the_models_have_their_namesakes_sizes(name: str, millions: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(engine_gpu.MODELS[name]())
    assert round(model.num_parameters() / 1e6) == millions


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in ((["--tiny"], "--tiny --device cpu shows"), (["--device", "cpu"], "on a CPU use --tiny")):
        with pytest.raises(SystemExit) as ended:
            engine_gpu.main(arguments)
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
