"""`bentoml serve` exports to a real trace back end; the traces are read back from it and checked."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.telemetry.collector import tracing
from tests.telemetry.external.conftest import phoenix_command
from tests.telemetry.external.serving import FAULT, MODEL, Process, Served, free_port, wait_until

pytestmark = [pytest.mark.needs_phoenix, pytest.mark.timeout(300)]

CHATS = 20
SERVER = "POST /v1/chat/completions"


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phoenix")
    port = free_port()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
        "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    }
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    process = Process([str(phoenix_command()), "serve"], folder / "log", environment, folder)
    process.wait_ready(f"http://127.0.0.1:{port}/healthz", 120)
    yield f"http://127.0.0.1:{port}"
    process.stop()


class Chats:
    """What the clients did: `ids` of the ones that were served, by what happened to them."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = defaultdict(int)


async def chat(url: str, number: int, chats: Chats, client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Count to {number} and tell why."}],
        "max_tokens": 48,
        "ignore_eos": True,
        "stream": True,
        "seed": number,
    }
    if number == 0:
        body["timeout"] = 0.05
    if number == 1:
        body["max_tokens"] = -1
    if number == 3:
        body["n"] = 2
    if number == 4:
        body["response_format"] = {"type": "json_object"}  # breaks, see faulty_service.py
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            chats.outcomes[f"http {answer.status_code}"] += 1
            return
        async for line in answer.aiter_lines():
            if number == 2 and line.startswith("data: "):
                chats.outcomes["left"] += 1
                return
            if '"error"' in line:
                assert FAULT in line, line
                chats.outcomes["error"] += 1
                return
    chats.outcomes["served"] += 1


async def talk(url: str) -> Chats:
    chats = Chats()
    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(chat(url, number, chats, client) for number in range(CHATS)))
    return chats


@pytest.fixture(scope="module")
def spans(phoenix, tmp_path_factory, demo_model_path) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("served")
    service = Served(
        folder,
        demo_model_path,
        service="tests.telemetry.external.faulty_service:LLM",
        config=tracing(phoenix),
        OTEL_RESOURCE_ATTRIBUTES="openinference.project.name=cb",
        CB_BLOCK_SIZE="16",
        CB_NUM_KV_BLOCKS="60",
        CB_ADMISSION__POLICY="prompt",
        CB_NUM_THREADS="2",
        OMP_NUM_THREADS="2",
    )
    try:
        chats = asyncio.run(talk(service.url))
        service.wait_idle()
        preempted = service.metric("cb_preemptions_total")
    finally:
        service.stop()  # at once: the last spans have to be flushed by the service
    assert [chats.outcomes[what] for what in ("http 400", "left", "error")] == [1, 1, 1], dict(chats.outcomes)
    assert preempted > 0

    def all_there() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = []
        cursor = None
        while True:
            params = {"limit": 1000, **({"cursor": cursor} if cursor else {})}
            page = httpx.get(f"{phoenix}/v1/projects/cb/spans", params=params, timeout=30).json()
            found += page.get("data", [])
            cursor = page.get("next_cursor")
            if not cursor:
                break
        return found if sum(span["name"] == SERVER for span in found) == CHATS else None

    return wait_until(all_there, 30, f"there are not {CHATS} server spans")


def trees(spans):
    """(server span, request span or None, its children) of each trace."""
    by_trace = defaultdict(list)
    for span in spans:
        by_trace[span["context"]["trace_id"]].append(span)
    found = []
    for members in by_trace.values():
        (server,) = [span for span in members if span["name"] == SERVER]
        requests = [span for span in members if span["parent_id"] == server["context"]["span_id"]]
        request = requests[0] if requests else None
        children = [s for s in members if request is not None and s["parent_id"] == request["context"]["span_id"]]
        assert len(members) == 1 + len(requests) + len(children), "an orphan"
        assert len(requests) <= 1, [span["name"] for span in requests]
        found.append((server, request, children))
    return found


def seconds(span) -> float:
    start, end = (datetime.fromisoformat(span[key]) for key in ("start_time", "end_time"))
    return (end - start).total_seconds()


def test_each_chat_is_a_tree_without_orphans_or_chunk_spans(spans):
    found = trees(spans)
    assert len(found) == CHATS
    assert sum(request is None for _server, request, _children in found) == 1  # refused: the server's span alone
    assert {span["name"] for span in spans} <= {
        SERVER,
        f"chat {MODEL}",
        "queued",
        "prefill",
        "decode",
        "preempted",
        "resumed",
        "compile grammar",
    }


def test_phases_add_up_to_the_request_and_the_request_lies_in_the_servers_span(spans):
    for server, request, children in trees(spans):
        if request is None or request["attributes"].get("gen_ai.request.choice.count"):
            continue
        assert sum(map(seconds, children)) == pytest.approx(seconds(request), rel=0.02, abs=0.001)
        assert server["start_time"] <= request["start_time"]


def test_spans_carry_what_happened(spans):
    requests = [request for _server, request, _children in trees(spans) if request is not None]
    reasons = [tuple(request["attributes"]["gen_ai.response.finish_reasons"]) for request in requests]
    assert reasons.count(("abort",)) == 1
    assert reasons.count(("timeout",)) == 1
    assert reasons.count(("length", "length")) == 1
    assert reasons.count(("error",)) == 1
    assert reasons.count(("length",)) == CHATS - 5
    for request in requests:
        attributes = request["attributes"]
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.provider.name"] == "cb_backend"
        assert attributes["gen_ai.request.model"] == MODEL
        assert attributes["gen_ai.usage.input_tokens"] > 0
        failed = {"timeout": "timeout", "error": "engine_error"}.get(attributes["gen_ai.response.finish_reasons"][0])
        assert request["status_code"] == ("ERROR" if failed else "UNSET")
        assert attributes.get("error.type") == failed
        if attributes["gen_ai.response.finish_reasons"] == ["length"]:
            assert attributes["gen_ai.usage.output_tokens"] == 48
            assert attributes["gen_ai.latency.e2e"] == pytest.approx(seconds(request), rel=0.02, abs=0.001)


def test_the_back_end_understands_usage_by_its_new_names(spans):
    served = [s for s in spans if s["attributes"].get("gen_ai.usage.output_tokens") == 48]
    assert {s["attributes"]["llm.token_count.completion"] for s in served} == {48}


def test_preemptions_show_mode_and_bytes(spans):
    lost = [span for span in spans if span["name"] == "preempted"]
    assert lost
    assert {span["attributes"]["cb.preemption.mode"] for span in lost} <= {"swap", "recompute"}
    for span in lost:
        swapped = span["attributes"]["cb.preemption.mode"] == "swap"
        assert (span["attributes"]["cb.kv.bytes"] > 0) == swapped


def test_prefill_chunks_are_events(spans):
    for span in spans:
        if span["name"] == "prefill":
            assert [event["name"] for event in span["events"]] == ["chunk"] * len(span["events"])
