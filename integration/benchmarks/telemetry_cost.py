"""What watching costs: a workload with all observers of a service, and with none, in turn on one engine.

    python -m integration.benchmarks.telemetry_cost --model DIR --workload tests/data/w64.json [--pairs 4]

`on` is what `bentoml serve` has at a sample rate of 1: traces (exported over OTLP to a collector in another process,
which decodes nothing), metrics with their refresh, log lines, flight recorder. `off` takes the observers off the same
engine, so that both have the same weights, pool and threads. Pairs alternate their order; the first run of all is
discarded. Prints each run's output tokens per second, and the cost: 1 - on / off, as the median of the pairs. Runs of
one kind differ by a percent on a quiet machine, so `cpu` is the finer figure: CPU seconds of the whole process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from cb_backend import Engine, EngineConfig
from cb_backend.telemetry import setup

from .meter import load_workload
from .offline import measure, run


class _Sink(BaseHTTPRequestHandler):
    """A collector that takes everything."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def serve_sink() -> None:
    """Prints its port and takes exports until it is ended."""
    server = HTTPServer(("127.0.0.1", 0), _Sink)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def provider(endpoint: str) -> Any:
    """As BentoML makes it: everything is sampled, and exported in batches."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = TracerProvider()
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return made


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.telemetry_cost")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="any EngineConfig field")
    args = parser.parse_args(argv)

    config = EngineConfig(model=args.model, dtype=args.dtype, enable_prefix_caching=False)
    config = config.replace(dict(item.split("=", 1) for item in args.set))
    requests = load_workload(args.workload)
    logging.getLogger("cb_backend.request").setLevel(logging.INFO)
    logging.getLogger("cb_backend.request").addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115
    sink = subprocess.Popen(
        [sys.executable, "-c", f"from {__spec__.name} import serve_sink; serve_sink()"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = sink.stdout.readline().strip() if sink.stdout else ""
        spans = provider(f"http://127.0.0.1:{port}/v1/traces")
        engine = Engine(config)
        engine.observe = partial(setup.service, provider=spans)
        with engine:
            _alternate(engine, requests, args.pairs, spans)
    finally:
        sink.terminate()
        sink.wait()


def _alternate(engine: Engine, requests: list[dict[str, Any]], pairs: int, spans: Any) -> None:
    observers = list(engine.core.observers)
    runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    run(engine, requests)
    for number in range(pairs):
        for kind in ("on", "off") if number % 2 == 0 else ("off", "on"):
            # Between two runs the engine is idle, and its thread does not read the list.
            engine.core.observers[:] = observers if kind == "on" else []
            spans.force_flush()  # what the run before left is not this one's
            figures = measure(engine, requests)[0]
            runs[kind].append(figures)
            print(json.dumps({"telemetry": kind, **figures}), flush=True)
    engine.core.observers[:] = observers
    for figure, name in (("out_tok_s", "throughput"), ("out_tok_per_cpu_s", "cpu")):
        ratios = [1 - on[figure] / off[figure] for on, off in zip(runs["on"], runs["off"], strict=True)]
        shown = ", ".join(f"{ratio:+.2%}" for ratio in ratios)
        print(f"{name}: {median(ratios):+.2%} (pairs: {shown})")


if __name__ == "__main__":
    main()
