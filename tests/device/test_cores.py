"""How many threads an engine takes on which machine, what the log says of it, and that every choice works."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cb_kernels.cpu import load

from cb_backend import Engine, SamplingParams
from cb_backend.device.cores import choose_threads, usable_cores, wanted_threads

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(files, cpus)`: a root folder with those files under it, and the affinity mask."""

    def make(files: dict[str, str], cpus: int = 8) -> Path:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cpus)))
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        return tmp_path

    return make


def topology(pairs: list[str], name: str = "core_cpus_list") -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": siblings for cpu, siblings in enumerate(pairs)}


@pytest.mark.parametrize("text, threads", [("3", 3), (" 4,2", 4), ("", 0), ("many", 0), ("-1", 0)])
def test_omp_num_threads_is_read_where_it_can_be(text, threads):
    assert wanted_threads({"OMP_NUM_THREADS": text}) == threads
    assert wanted_threads({}) == 0


def test_every_core_is_used_where_nothing_says_otherwise(machine):
    threads = choose_threads(environ={}, root=machine({}, cpus=3))
    assert (threads.count, threads.reason) == (3, "this process may use 3 physical cores")


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_two_logical_cpus_of_one_physical_core_are_one(machine, name):
    assert usable_cores(machine(topology(["0,2", "1,3", "0,2", "1,3"], name), cpus=4)).count == 2


def test_the_configuration_wins_over_the_environment_and_both_over_the_machine(machine):
    root = machine({}, cpus=8)
    assert choose_threads(3, {"OMP_NUM_THREADS": "5"}, root).count == 3
    assert choose_threads(None, {"OMP_NUM_THREADS": "5"}, root).count == 5
    assert choose_threads(None, {"OMP_NUM_THREADS": "5"}, root).reason == "OMP_NUM_THREADS"


def test_more_threads_than_cores_are_cut_and_the_reason_says_so(machine):
    threads = choose_threads(64, {}, machine({}, cpus=2))
    assert threads.count == 2
    assert threads.reason == "num_threads asks for 64, but this process may use 2 physical cores"


def test_a_container_limited_to_one_core_gets_one_thread(machine):
    root = machine({"sys/fs/cgroup/cpu.max": "100000 100000"}, cpus=8)
    assert choose_threads(None, {}, root).count == 1
    assert choose_threads(4, {}, root).reason == "num_threads asks for 4, but the cgroup allows 1 of 8 cores"


def test_half_a_core_is_still_one_thread(machine):
    assert choose_threads(None, {}, machine({"sys/fs/cgroup/cpu.max": "50000 100000"})).count == 1


def test_an_engine_asked_for_more_threads_than_cores_works_and_says_in_one_line_what_it_took(tiny_llama, caplog):
    cores = usable_cores().count
    with (
        caplog.at_level(logging.INFO, "cb_backend"),
        Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=8, swap_space=0, num_threads=99) as engine,
    ):
        [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert output.usage.completion_tokens == 4
    [line] = [message for message in caplog.messages if message.startswith("CPU: ")]
    assert line.startswith(f"CPU: {cores} thread")
    assert "num_threads asks for 99, but " in line


PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from cb_backend import Engine, SamplingParams
with Engine(model=sys.argv[1], dtype="float32", num_kv_blocks=8, swap_space=0) as engine:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    [output] = engine.generate([list(range(5, 45))], greedy)
print(output.token_ids)
"""


def generate(model: Path, **environment: str) -> tuple[str, str]:
    """Generated ids and the CPU line of the log, of an engine in a process with these variables."""
    known = {key: value for key, value in os.environ.items() if key not in {"OMP_NUM_THREADS", "CB_CPU_ISA"}}
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={**known, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    [line] = [line for line in done.stderr.splitlines() if line.startswith("CPU: ")]
    return done.stdout, line


@pytest.fixture(scope="module")
def tokens_of_this_machine(tiny_llama) -> str:
    ids, _ = generate(tiny_llama)
    return ids


def test_one_thread_of_the_users_gives_the_same_tokens(tiny_llama, tokens_of_this_machine):
    library = load()
    instructions = library.isa if library else "torch's own"
    ids, line = generate(tiny_llama, OMP_NUM_THREADS="1")
    assert ids == tokens_of_this_machine
    assert line == f"CPU: 1 thread (OMP_NUM_THREADS), instructions: {instructions}"


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_a_cpu_without_avx2_or_avx512_gives_the_same_tokens(isa, tiny_llama, tokens_of_this_machine, native_kernels):
    ids, line = generate(tiny_llama, CB_CPU_ISA=isa, OMP_NUM_THREADS="1")
    assert ids == tokens_of_this_machine
    assert line == f"CPU: 1 thread (OMP_NUM_THREADS), instructions: {isa}"
