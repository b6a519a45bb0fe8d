"""Every option of the commands changes what they do."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cb_backend import Engine
from integration.benchmarks import compare, offline, peer_transformers, peer_vllm, serving, telemetry_cost
from integration.benchmarks.server import started

ROOT = Path(__file__).parents[2]
SMALL = ["--dtype", "float32", "--set", "num_kv_blocks=60"]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Requests of 2, 3 and 4 tokens."""
    requests = [{"prompt_token_ids": list(range(5, 15 + i)), "max_tokens": 2 + i} for i in range(3)]
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"requests": requests}), encoding="utf-8")
    return path


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_offline_runs_the_first_requests_again_and_keeps_their_ids(tiny_llama, workload, tmp_path, capsys):
    kept = tmp_path / "ids.json"
    options = ["--model", str(tiny_llama), "--workload", str(workload), *SMALL, "--json"]
    offline.main([*options, "--first", "2", "--repeat", "2", "--save", str(kept), "--set", "max_num_seqs=1"])
    figures = objects(capsys.readouterr().out)
    assert [(run["out_tok"], run["steps"]) for run in figures] == [(5, 5)] * 2, "one after the other"
    assert [len(ids) for ids in json.loads(kept.read_text())] == [2, 3]


def test_gated_runs_wait_for_a_line_each(tiny_llama, workload, capsys, monkeypatch):
    options = ["--model", str(tiny_llama), "--workload", str(workload), "--first", "1", "--repeat", "2", "--gated"]
    for command in ([offline.main, *SMALL, "--json"], [peer_transformers.main, "--dtype", "float32"]):
        main, *rest = command
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
        main([*(["single"] if main is peer_transformers.main else []), *options, *rest])
        lines = [line for line in capsys.readouterr().out.splitlines() if line == "ready" or line.startswith("{")]
        assert [line == "ready" for line in lines] == [True, False] * 2
        assert sys.stdin.read() == "", "every run took a line"


def test_offline_lets_the_engine_see_all_requests_at_once(tiny_llama, workload):
    requests = json.loads(workload.read_text())["requests"]
    sizes: list[int] = []
    watching = SimpleNamespace(
        on_added=lambda request: None,
        on_step=lambda plan, *times: sizes.append(len(plan.assignments)),
        on_finished=lambda request, delta: None,
    )
    with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=60) as engine:
        engine.core.observers.append(watching)
        offline.run(engine, requests, in_one_step=True)
    assert [size for size in sizes if size] == [3, 3, 2, 1]


@pytest.mark.parametrize("mode", peer_transformers.MODES)
def test_transformers_does_the_first_requests_in_the_named_way(tiny_llama, workload, capsys, mode):
    options = ["--model", str(tiny_llama), "--workload", str(workload), "--dtype", "float32", "--first", "2"]
    peer_transformers.main([mode, *options])
    [figures] = objects(capsys.readouterr().out)
    assert (figures["mode"], figures["out_tok"]) == (mode, 5)


def test_vllm_gets_every_option(workload, capsys, monkeypatch):
    made: list[dict[str, Any]] = []

    class LLM:
        def __init__(self, **fields: Any) -> None:
            made.append(fields)

        def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p.max_tokens)]) for p in params]

    played = ModuleType("vllm")
    played.LLM, played.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", played)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    options = ["--model", "DIR", "--workload", str(workload), "--first", "1", "--repeat", "2", "--dtype", "float16"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    peer_vllm.main([*options, "--gated", "--threads", "1", "--max-num-seqs", "7", "--max-num-batched-tokens", "99"])
    text = capsys.readouterr().out
    assert [run["out_tok"] for run in objects(text)] == [2, 2] and text.splitlines().count("ready") == 2
    [fields] = made
    wanted = {"model": "DIR", "dtype": "float16", "max_num_seqs": 7, "max_num_batched_tokens": 99}
    assert {name: fields[name] for name in wanted} == wanted
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_telemetry_cost_runs_its_pairs_in_turn(tiny_llama, workload, capsys):
    options = ["--model", str(tiny_llama), "--workload", str(workload), "--pairs", "2"]
    telemetry_cost.main([*options, *SMALL, "--set", "max_num_seqs=1"])
    text = capsys.readouterr().out
    assert [run["telemetry"] for run in objects(text)] == ["on", "off", "off", "on"]
    assert {run["steps"] for run in objects(text)} == {9}, "one after the other"
    assert [line.split(":")[0] for line in text.splitlines()[-2:]] == ["throughput", "cpu"]
    with pytest.raises(ValidationError, match="dtype"):
        telemetry_cost.main([*options, "--dtype", "int3"])


def script(folder: Path, code: str) -> str:
    path = folder / "command.py"
    path.write_text(code, encoding="utf-8")
    return f"{sys.executable} {path}"


NEIGHBOURS = """
import json, os
from pathlib import Path
lines = []
for entry in Path("/proc").iterdir():
    try:
        lines.append((entry / "cmdline").read_bytes().decode().split("\\0"))
    except OSError:
        pass
found = [line for line in lines if "integration.benchmarks.neighbour" in line]
print(json.dumps({"a": [line[line.index("--core") + 1] for line in found if line[-2] == "77.0"]}))
"""


@pytest.mark.parametrize("busy", [[], ["--busy", "0"]], ids=["alone", "busy"])
def test_compare_runs_beside_a_neighbour_if_asked_to(tmp_path, busy):
    command = script(tmp_path, NEIGHBOURS)
    kept = tmp_path / "kept.json"
    options = ["--ours", command, "--peer", f"same={command}", "--figure", "a", "--repeat", "1", "--limit", "77"]
    with pytest.raises(TypeError):  # a list has no median
        compare.main([*options, "--save", str(kept), *busy])
    assert json.loads(kept.read_text())["same"] == [{"a": ["0"] if busy else []}]


def test_compare_ends_at_a_command_that_takes_longer_than_the_limit(tmp_path):
    command = script(tmp_path, "import time; time.sleep(60)")
    with pytest.raises(RuntimeError, match="was not done after 1 s"):
        compare.main(["--ours", command, "--peer", f"x={command}", "--limit", "1"])


@pytest.mark.parametrize(
    "option",
    [
        ["--requests", "5"],
        ["--rate", "3"],
        ["--prompt-scale", "500"],
        ["--output-scale", "4"],
        ["--most-tokens", "8"],
        ["--seed", "1"],
    ],
    ids=lambda option: option[0],
)
def test_an_option_of_the_load_changes_a_traces_jobs(workload, option):
    trace = ROOT / "tests/data/traces/azure_conv_2023.csv"
    options = ["--url", "http://x", "--workload", str(workload), "--trace", str(trace)]
    options += ["--requests", "20", "--prompt-scale", "50"]
    plain = serving.jobs_of(serving.parse(options))
    changed = serving.jobs_of(serving.parse([*options, *option]))
    assert changed != plain
    assert len(changed) == (5 if option[0] == "--requests" else 20)


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer("application/json", {"data": [{"id": "first"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        print("ASKED", json.dumps([self.path, body]), flush=True)
        chunk = {"choices": [{"index": 0, "text": "x", "delta": {"content": "x"}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        self.answer("text/event-stream", chunk, usage)

    def answer(self, kind, *contents):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        lines = [json.dumps(content) for content in contents]
        if not kind.endswith("json"):
            lines = [f"data: {line}\\n\\n" for line in [*lines, "[DONE]"]]
        self.wfile.write("".join(lines).encode())

    def log_message(self, *args): ...

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_serving_starts_the_server_logs_it_and_sends_what_is_asked_for(
    tiny_llama, workload, tmp_path, free_port, capsys
):
    log, url = tmp_path / "server.log", f"http://127.0.0.1:{free_port}"
    options = ["--url", url, "--workload", str(workload), "--requests", "1", "--server-log", str(log)]
    options += ["--start", f"{script(tmp_path, SERVER)} {free_port}", "--chat", "--tokenizer", str(tiny_llama)]
    serving.main([*options, "--model", "mine", "--extra", '{"stop": "z"}'])
    [figures] = objects(capsys.readouterr().out)
    assert figures["failed"] == 0
    assert figures["start_s"] > 0
    asked = [json.loads(line.removeprefix("ASKED ")) for line in log.read_text().splitlines()]
    path, body = asked[-1]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["stop"], body["max_tokens"]) == ("mine", "z", 2)
    assert "ignore_eos" not in body
    assert [message["role"] for message in body["messages"]] == ["user"]
    with pytest.raises(OSError, match="refused"):  # it is gone
        socket.create_connection(("127.0.0.1", free_port))


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path, free_port):
    command = script(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with (
        pytest.raises(RuntimeError, match=r"did not answer .* within 1 s:\nloading"),
        started(command, f"http://127.0.0.1:{free_port}", log=tmp_path / "log", limit=1.0),
    ):
        pass
