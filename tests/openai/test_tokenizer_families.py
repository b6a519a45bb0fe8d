"""Text and offsets where tokenizers differ: byte-level, metaspace with byte fallback, unigram; echoed or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend import Engine, SamplingParams
from cb_backend.openai.app import openai_app
from tests.text.tokenizers_made_here import FAMILIES, tokenizer_of

PROMPTS = ["Hello! I am", "Hello", "naïve 🦙", " two  spaces ", "Köln 東京"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module", params=FAMILIES)
def engine(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("family") / request.param
    shutil.copytree(tiny_llama, path, ignore=shutil.ignore_patterns("token*", "special*", "chat*"))
    tokenizer_of(request.param).save_pretrained(path)
    fields = {"served_model_name": "tiny", "dtype": "float32", "num_kv_blocks": 40, "block_size": 16, "num_threads": 1}
    with Engine(model=str(path), **fields) as engine:
        yield engine


async def ask(engine: Engine, **fields: Any) -> tuple[dict[str, Any], str]:
    """The choice as a whole answer has it, and the streamed text."""
    transport = httpx.ASGITransport(openai_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        whole = await client.post("/completions", json={"model": "tiny", **GREEDY, **fields})
        assert whole.status_code == 200, whole.text
        streamed = await client.post("/completions", json={"model": "tiny", "stream": True, **GREEDY, **fields})
    events = [json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-2]]
    return whole.json()["choices"][0], "".join(event["choices"][0]["text"] for event in events)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_an_echoed_text_is_what_decoding_prompt_and_output_at_once_gives(engine: Engine, prompt: str) -> None:
    [output] = engine.generate([prompt], SamplingParams(**GREEDY))
    ids = [*output.prompt_token_ids, *output.token_ids]
    shown = engine.tokenizer.decode(list(output.prompt_token_ids), skip_special_tokens=True)
    together = engine.tokenizer.decode(ids, skip_special_tokens=True)
    choice, streamed = await ask(engine, prompt=prompt, echo=True)
    assert choice["text"] == streamed == prompt + together.removeprefix(shown)
    alone, streamed = await ask(engine, prompt=prompt)
    assert alone["text"] == streamed == engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_prompt_of_ids_is_echoed_as_its_tokens_say(engine: Engine, prompt: str) -> None:
    ids = engine.tokenizer(prompt)["input_ids"]
    choice, streamed = await ask(engine, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    assert choice["text"] == streamed == engine.tokenizer.decode(ids)
    assert choice["logprobs"]["text_offset"][0] == 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_every_token_lies_where_its_offset_says(engine: Engine, prompt: str, echo: bool) -> None:
    # Hidden special tokens among the others, and nothing that the tokenizer does not know.
    unknown = range(len(engine.tokenizer), engine.vocab_size)
    bias = {str(engine.tokenizer.eos_token_id): 2} | {str(i): -100 for i in unknown}
    choice, _ = await ask(
        engine, prompt=prompt, echo=echo, logprobs=0, logit_bias=bias, max_tokens=40, temperature=1.0, seed=1
    )
    text, shape = choice["text"], choice["logprobs"]
    begins = shape["text_offset"]
    assert begins == sorted(begins)
    special = set(engine.tokenizer.all_special_tokens)
    checked = 0
    for token, begin, end in zip(shape["tokens"], begins, [*begins[1:], len(text)], strict=True):
        if "\ufffd" in text[begin:end]:
            continue  # a broken character before the token ends where the next one begins
        if token in special:
            assert begin == end
        elif token and not token.startswith("bytes:"):
            assert text[begin:end] == token or (begin == 0 and " " + text[begin:end] == token)
            checked += 1
    assert checked > 3
