"""Runs our engine and other commands in turn on the same work and prints medians and ratios.

    python -m integration.benchmarks.compare --model DIR --workload FILE [--dtype bfloat16] [--repeat 5] \
        --peer static='python -m integration.benchmarks.peer_transformers static --model DIR --workload FILE' \
        --peer vllm='VLLM/bin/python -m integration.benchmarks.peer_vllm --model DIR --workload FILE'

A peer is any command that prints a JSON object with the figures as its last line that holds one; text before the `{`
is skipped. `--ours COMMAND` compares another command of ours than `offline`, for example `serving` with its figures
(`--figure itl_p99_s`). Machines are noisy: runs alternate (ours, peer, ours, peer, ...), ratios are taken pair by pair,
and `foreign_cpu` (cores that others kept busy) is shown where a command reports it.

`--pin CORE` gives every command one core and one thread: then `out_tok_per_cpu_s` is the figure that stays true on a
busy machine. `--busy CORE` keeps a neighbour busy on that core while each command runs. `--loaded` starts every command
once, with all of them loaded side by side, and lets them run in turn: more pairs in the same time, closer together.
Commands must then know `--gated` and `--repeat`, as `offline` and the peers here do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from .loaded import Loaded, figures_in
from .neighbour import neighbour

Figures = dict[str, Any]


def run(command: list[str], figures: Sequence[str], limit: float) -> Figures:
    """Runs a command to its end and reads its last JSON object that has all of `figures`.

    Raises:
        RuntimeError: it failed, took longer than `limit` seconds, or printed no such object.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{shlex.join(command)} was not done after {limit:.0f} s") from None
    for line in reversed(done.stdout.splitlines()):
        found = figures_in(line, figures)
        if found is not None:
            return found
    wanted = ", ".join(figures)
    raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode} and no {wanted}:\n{done.stderr[-2000:]}")


def ours(args: argparse.Namespace) -> list[str]:
    if args.ours is not None:
        return shlex.split(args.ours)
    command = [sys.executable, "-m", "integration.benchmarks.offline", "--json", "--model", args.model]
    command += ["--workload", args.workload, "--dtype", args.dtype]
    for item in args.set:
        command += ["--set", item]
    return command


def table(results: dict[str, list[Figures]], figure: str) -> str:
    """Medians of one figure in Markdown, and ours over the others', pair by pair."""
    own = [found[figure] for found in results["ours"]]
    lines = [
        f"| engine | {figure}, median | min | max | ours / engine, median of pairs | foreign cores, most |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        values = [found[figure] for found in runs]
        ratio = median(a / b if b else math.nan for a, b in zip(own, values, strict=False))
        foreign = max(found.get("foreign_cpu", float("nan")) for found in runs)
        numbers = " | ".join(f"{value:.4g}" for value in (median(values), min(values), max(values)))
        lines.append(f"| {name} | {numbers} | {ratio:.2f} | {foreign:.2f} |")
    return "\n".join(lines)


def pin(core: int) -> None:
    """This process and all that it starts later: one core, one thread."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"


def turn(
    command: list[str], figures: Sequence[str], args: argparse.Namespace, stack: ExitStack
) -> Callable[[], Figures]:
    """What one run of the command is. A loaded one is ready then: one loads after the other, none beside a run."""
    if not args.loaded:
        return partial(run, command, figures, args.limit)
    return partial(stack.enter_context(Loaded(command, args.repeat, args.limit)).run, figures)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integration.benchmarks.compare")
    parser.add_argument("--model")
    parser.add_argument("--workload")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of our EngineConfig")
    parser.add_argument("--ours", metavar="COMMAND", help="instead of offline with the options above")
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--figure", action="append", help="may be repeated; default: out_tok_s")
    parser.add_argument("--pin", type=int, metavar="CORE", help="run everything with one thread on this core")
    parser.add_argument("--busy", type=int, metavar="CORE", help="keep this core busy beside every run")
    parser.add_argument("--loaded", action="store_true", help="start every command once, for all its runs")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--save", type=Path, help="write all that the commands reported, as JSON")
    args = parser.parse_args(argv)
    if args.ours is None and (args.model is None or args.workload is None):
        parser.error("--model and --workload are needed, unless --ours names a command")

    commands = {"ours": ours(args)}
    for peer in args.peer:
        name, _, command = peer.partition("=")
        commands[name] = shlex.split(command)
    if args.pin is not None:
        pin(args.pin)
    figures = args.figure or ["out_tok_s"]
    results: dict[str, list[Figures]] = {name: [] for name in commands}
    with ExitStack() as stack:
        turns = {name: turn(command, figures, args, stack) for name, command in commands.items()}
        for round_number in range(args.repeat):
            for name in commands:
                with nullcontext() if args.busy is None else neighbour(args.busy, args.limit):
                    found = turns[name]()
                results[name].append(found)
                values = ", ".join(f"{figure} {found[figure]}" for figure in figures)
                print(f"round {round_number + 1}/{args.repeat} {name}: {values}", file=sys.stderr, flush=True)
                if args.save is not None:
                    args.save.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    print("\n\n".join(table(results, figure) for figure in figures))


if __name__ == "__main__":
    main()
