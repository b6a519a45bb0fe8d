"""The services that docs/migrate.md ends with run as it says. The legacy one is in tests/bento/test_fronts.py."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.bento.servers import Server, serving

ROOT = Path(__file__).parents[2]


def get(server: Server, path: str) -> object:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return json.loads(answer.read())


def test_the_pipeline_service_keeps_its_endpoint_and_streams(tiny_llama: Path, tmp_path: Path) -> None:
    with serving("integration.migrate.pipeline_service:Summarizer", tmp_path, tiny_llama, num_kv_blocks=16) as server:
        body = json.dumps({"text": "ab", "max_tokens": 4}).encode()
        answers = []
        for path in ("/summarize", "/summarize_live"):
            request = urllib.request.Request(server.url + path, body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers.append(answer.read().decode())
        assert answers[0] == answers[1]
        assert answers[0]
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/summarize", text="ab", max_tokens=10**6)
        assert refused.value.code == 400
        assert "max_tokens" in refused.value.read().decode()


def test_the_bentovllm_service_keeps_the_openai_routes(tiny_llama: Path, tmp_path: Path) -> None:
    with serving("integration.migrate.bentovllm_service:LLM", tmp_path, tiny_llama, num_kv_blocks=16) as server:
        models = get(server, "/v1/models")
        assert isinstance(models, dict)
        assert [model["id"] for model in models["data"]] == ["tiny"]
        answer = server.post("/v1/completions", model="tiny", prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4


def test_every_file_that_the_guide_names_is_there() -> None:
    guide = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(integration/[\w/]+\.py)`", guide))
    assert {"integration/legacy_service.py", "integration/service.py"} < named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
