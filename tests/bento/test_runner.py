"""The legacy runner within one process, as a script uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bentoml.exceptions import InvalidArgument

import cb_backend


@pytest.mark.parametrize(
    ("reference", "name"), [("Owner/Big_Model", "big_model"), ("llm:latest", "llm"), ("/models/v 1/", "v-1")]
)
def test_a_runner_is_named_after_its_model(reference: str, name: str) -> None:
    assert cb_backend.to_runner(reference).name == name


def test_it_answers_as_a_pipeline_and_as_itself(tiny_llama: Path) -> None:
    runner = cb_backend.to_runner(
        str(tiny_llama), name="own", dtype="float32", num_kv_blocks=40, block_size=16, swap_space=0, num_threads=1
    )
    runner.init_local(quiet=True)
    try:
        [answer] = runner.run("The cache", max_new_tokens=8, do_sample=False, ignore_eos=True)
        result = runner.generate.run("The cache", max_tokens=8, temperature=0.0, ignore_eos=True)
        assert answer == {"generated_text": "The cache" + result["text"]}
        assert result["finish_reason"] == "length"
        both = runner.run(["The cache", "A"], max_new_tokens=2, num_return_sequences=2)
        assert [[len(choices) for choices in both], both[1][0]["generated_text"][0]] == [[2, 2], "A"]
        for name, fields in {"top_p": {"top_p": 3.0}, "echo": {"echo": True}, "stop.0": {"stop": ["\ud83d"]}}.items():
            with pytest.raises(InvalidArgument, match=f"'{name}'"):
                runner.run("The cache", **fields)
        with pytest.raises(InvalidArgument, match="'prompt'"):
            runner.generate.run("half \ud83d", max_tokens=1)
    finally:
        runner.destroy()
