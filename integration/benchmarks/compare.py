"""Runs our engine and other commands in turn on the same work and prints medians and ratios.

    python -m integration.benchmarks.compare --model DIR --workload FILE [--dtype bfloat16] [--repeat 5] \
        --peer static='python -m integration.benchmarks.peer_transformers static --model DIR --workload FILE' \
        --peer vllm='/path/to/vllm-env/bin/python peer_vllm.py DIR bfloat16 FILE'

A peer is any command that prints a JSON object with the figure (`out_tok_s`) as its last line that holds one; text
before the `{` is skipped. Machines are noisy: runs alternate (ours, peer, ours, peer, ...), the ratio is taken pair by
pair, and `foreign_cpu` (cores that others kept busy) is shown where a command reports it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from statistics import median
from typing import Any


def run(command: list[str], figure: str) -> dict[str, Any]:
    """Runs a command to its end and reads its last JSON object that has `figure`.

    Raises:
        RuntimeError: it failed, or printed no such object.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    for line in reversed(done.stdout.splitlines()):
        start = line.find("{")
        if start >= 0:
            try:
                found = json.loads(line[start:])
            except ValueError:
                continue
            if figure in found:
                return found
    raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode} and no {figure}:\n{done.stderr[-2000:]}")


def ours(args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "integration.benchmarks.offline", "--json", "--model", args.model]
    command += ["--workload", args.workload, "--dtype", args.dtype]
    for item in args.set:
        command += ["--set", item]
    return command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.compare")
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of our EngineConfig")
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--figure", default="out_tok_s", help="larger is better")
    args = parser.parse_args(argv)

    commands = {"ours": ours(args)}
    for peer in args.peer:
        name, _, command = peer.partition("=")
        commands[name] = shlex.split(command)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for round_number in range(args.repeat):
        for name, command in commands.items():
            found = run(command, args.figure)
            results[name].append(found)
            print(f"round {round_number + 1}/{args.repeat} {name}: {found[args.figure]}", file=sys.stderr, flush=True)

    print(f"| engine | {args.figure}, median | min | max | ours / engine, median of pairs | foreign cores, most |")
    print("|---|---|---|---|---|---|")
    own = [found[args.figure] for found in results["ours"]]
    for name, runs in results.items():
        values = [found[args.figure] for found in runs]
        ratio = median(a / b for a, b in zip(own, values, strict=True))
        foreign = max((found.get("foreign_cpu", float("nan")) for found in runs), default=float("nan"))
        print(
            f"| {name} | {median(values):.1f} | {min(values):.1f} | {max(values):.1f} | {ratio:.2f} | {foreign:.2f} |"
        )


if __name__ == "__main__":
    main()
