"""Prometheus scrapes the service through a load in which three in ten clients leave."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import yaml

from cb_backend.telemetry.metrics.table import METRICS
from tests.telemetry.external.conftest import ROOT
from tests.telemetry.external.serving import MODEL, Process, Served, free_port, wait_until
from tests.telemetry.test_integration_files import dashboard

pytestmark = [pytest.mark.needs_prometheus, pytest.mark.timeout(240)]

REQUESTS = 60


@pytest.fixture(scope="module")
def served(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("served")
    sizes = {"CB_BLOCK_SIZE": "16", "CB_NUM_KV_BLOCKS": "60", "CB_ADMISSION__POLICY": "prompt"}
    service = Served(folder, tiny_llama, CB_TIMELINE="1", **sizes)
    yield service
    service.stop()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, served):
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((ROOT / "integration/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{served.port}"]}]
    config["rule_files"] = [str(ROOT / "integration/prometheus" / name) for name in config["rule_files"]]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    process = Process(
        [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], folder / "log", {}, folder
    )
    process.wait_ready(f"http://127.0.0.1:{port}/-/ready", 30)
    yield Queries(f"http://127.0.0.1:{port}")
    process.stop()


class Queries:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, query: str) -> list[dict]:
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=10).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def number(self, query: str) -> float:
        return sum(float(series["value"][1]) for series in self.ask(query))


async def load(url: str) -> dict[str, int]:
    """Sends the requests, leaves three in ten in the middle, and returns what the clients themselves saw."""
    seen = {"finished": 0, "left": 0, "tokens": 0}
    places = asyncio.Semaphore(12)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        leaves = number % 10 < 3
        body = {
            "model": MODEL,
            "prompt": [5 + (number * 7 + i) % 90 for i in range(8)],
            "max_tokens": 900 if leaves else 200 + 3 * number,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "request_class": "load",
        }
        async with places, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            events = 0
            async for line in answer.aiter_lines():
                events += line.startswith("data: {")
                if leaves and events == 3:
                    seen["left"] += 1
                    return
                if '"usage":{' in line.replace(" ", ""):
                    seen["tokens"] += httpx.Response(200, content=line[6:]).json()["usage"]["completion_tokens"]
            seen["finished"] += 1

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(one(client, number) for number in range(REQUESTS)))
    return seen


@pytest.fixture(scope="module")
def seen(served, prometheus) -> dict[str, int]:
    counted = asyncio.run(load(served.url))
    served.wait_idle()
    done = counted["finished"] + counted["left"]
    # One scrape later Prometheus knows what the service knows.
    wait_until(lambda: prometheus.number("sum(cb_requests_finished_total)") == done, 10, "not scraped")
    return counted


def test_counts_agree_with_the_clients_own(seen, served, prometheus):
    assert (seen["finished"], seen["left"]) == (REQUESTS * 7 // 10, REQUESTS * 3 // 10)
    number = prometheus.number
    whole = number('sum(cb_requests_finished_total{reason="length",request_class="load"})')
    aborted = number('sum(cb_requests_finished_total{reason="abort",request_class="load"})')
    assert whole + aborted == REQUESTS
    # A request may have ended while its client was leaving.
    assert seen["finished"] <= whole <= seen["finished"] + seen["left"] // 3
    assert number("cb_client_disconnects_total") == aborted
    assert number("sum(gen_ai_server_request_duration_seconds_count)") == REQUESTS
    assert number("sum(gen_ai_server_time_to_first_token_seconds_count)") == whole
    # The clients that left do not know how many tokens were made for them.
    assert number('cb_tokens_total{kind="generated"}') >= seen["tokens"] + 3 * seen["left"]


def test_gauges_return_to_zero(seen, served, prometheus):
    served.wait_idle()
    names = "cb_requests_running|cb_requests_waiting|cb_requests_swapped|cb_host_blocks_used|vllm:num_requests_.*"
    query = f'{{__name__=~"{names}|vllm:kv_cache_usage_perc"}}'
    wait_until(lambda: all(float(s["value"][1]) == 0 for s in prometheus.ask(query)), 10, "not zero")
    assert len(prometheus.ask(query)) == 7
    assert prometheus.number('cb_kv_blocks{state="used"}') == 0
    assert prometheus.number("sum(cb_kv_blocks)") == 60


def test_no_gauge_was_ever_negative_and_the_load_was_seen(seen, prometheus):
    for metric in METRICS:
        if metric.kind == "gauge":
            assert prometheus.ask(f"min_over_time({metric.name}[5m]) < 0") == [], metric.name
    assert prometheus.number("max_over_time(cb_requests_running[5m])") > 1
    assert prometheus.number("max_over_time(vllm:kv_cache_usage_perc[5m])") > 0.1


def test_the_gateways_aliases_are_single_series_with_their_colon(seen, prometheus):
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert len(prometheus.ask(name)) == 1
    (info,) = prometheus.ask("vllm:cache_config_info")
    assert (info["metric"]["block_size"], info["metric"]["num_gpu_blocks"]) == ("16", "60")


def test_every_query_of_the_dashboard_runs(seen, prometheus):
    empty = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            if not prometheus.ask(query):
                empty.add(panel["title"])
    assert empty == set()


def test_the_timeline_page_of_the_service_shows_the_same_load(seen, served):
    page = httpx.get(f"{served.url}/cb/timeline", follow_redirects=True)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    recording = httpx.get(f"{served.url}/cb/timeline/data").json()
    assert recording["last_step"] >= len(recording["steps"]) > 100
    assert {row["class"] for row in recording["rows"]} == {"load"}
