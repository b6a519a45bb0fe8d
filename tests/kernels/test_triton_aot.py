"""Every shipped Triton configuration compiles for every target without a GPU, and passes the gates of `cb_kernels.aot`.

A process of its own compiles, since Triton's mode and caches belong to a whole process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cb_kernels.aot import broken_gates, one_of_each, shipped
from cb_kernels.compiled import Report, Variant
from cb_kernels.paged_attention.configs import CONFIGS
from cb_kernels.targets import TARGETS

KERNELS = Path(__file__).parents[2] / "kernels"


# Where `make test` puts a second Triton, which CUDA builds of an earlier torch bring.
TRITON_36 = Path(sys.prefix) / "triton36"


@pytest.fixture(scope="module", params=["installed", "3.6"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of the installed Triton every shipped configuration; of a second to save time one of each kernel and feature."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    path = [str(KERNELS), environment.get("PYTHONPATH")]
    command = [sys.executable, "-m", "cb_kernels.aot", "--json"]
    if request.param == "3.6":
        if not (TRITON_36 / "triton").is_dir():
            missing = f"no Triton 3.6 in {TRITON_36}: run `make {TRITON_36}/triton/__init__.py`"
            if os.environ.get("CI"):
                pytest.fail(missing)
            pytest.skip(missing)
        path.insert(0, str(TRITON_36))
        command.append("--one-of-each")  # `make kernels-report` compiles all
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    assert request.param == "installed" or rows[0]["triton"].startswith("3.6."), rows[0]["triton"]
    return rows


def attention(reports: list[dict[str, Any]], target: str, phase: str, dtype: str = "bf16") -> list[dict[str, Any]]:
    """Rows of the attention kernel; never empty."""
    rows = [
        row
        for row in reports
        if row["kernel"] == "paged_attention"
        and row["target"] == target
        and (row["traits"]["phase"], row["traits"]["dtype"]) == (phase, dtype)
    ]
    assert rows
    return rows


@pytest.mark.timeout(1300)
def test_every_variant_is_reported(reports: list[dict[str, Any]]) -> None:
    variants = list(shipped(list(TARGETS)))
    if reports[0]["triton"].startswith("3.6."):
        variants = list(one_of_each(variants))
    assert [(row["target"], row["kernel"], row["config"]) for row in reports] == [
        (variant.target, variant.kernel, variant.config) for variant in variants
    ]
    assert {row["target"] for row in reports} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert len({row["triton"] for row in reports}) == 1


@pytest.mark.timeout(1300)
def test_nothing_spills_and_shared_memory_fits(reports: list[dict[str, Any]]) -> None:
    limits = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
    for row in reports:
        assert (row["spills"], row["stack"]) == (0, 0), row
        assert row["shared_bytes"] <= limits[row["target"]], row


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "target, prefill, decode",
    [("sm_80", "HMMA", "HMMA"), ("sm_90", "HGMMA", "HMMA"), ("sm_100", "UTCMMA", "HMMA"), ("gfx942", "MFMA", "MFMA")],
)
def test_attention_runs_on_the_matrix_units(
    reports: list[dict[str, Any]], target: str, prefill: str, decode: str
) -> None:
    assert {row["matrix_kind"] for row in attention(reports, target, "prefill")} == {prefill}
    assert {row["matrix_kind"] for row in attention(reports, target, "decode")} == {decode}


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_keys_and_values_come_in_16_byte_copies_with_two_tiles_in_flight(
    reports: list[dict[str, Any]], target: str, phase: str
) -> None:
    for row in attention(reports, target, phase):
        assert row["async_copies"] > 0, row
        assert row["kv_buffers"] >= 2, row


@pytest.mark.timeout(1300)
def test_noise_has_no_fused_arithmetic(reports: list[dict[str, Any]]) -> None:
    rows = [row for row in reports if row["kernel"] == "gumbel"]
    assert [row["fused"] for row in rows] == [0, 0, 0, 0]


def test_every_configuration_in_the_tables_is_compiled() -> None:
    for target, table in CONFIGS.items():
        covered = {
            (item.traits["phase"], 4 if item.traits["dtype"] == "f32" else 2, item.traits["padded_dim"])
            for item in shipped([target])
            if item.kernel == "paged_attention"
        }
        assert covered == set(table), target


def test_one_of_each_leaves_no_kernel_phase_type_or_feature_out() -> None:
    def features(variants: Iterable[Variant]) -> set[tuple[Any, ...]]:
        names = ("SINKS", "SOFTCAP", "WINDOWED", "SCALED_KV", "DECODE")
        return {(one.target, one.kernel, one.traits.get("dtype"), *map(one.constants.get, names)) for one in variants}

    everything = list(shipped(list(TARGETS)))
    some = list(one_of_each(everything))
    assert features(some) == features(everything)
    assert len(some) == 62


GOOD = Report(
    kernel="paged_attention",
    config="prefill",
    target="sm_90",
    triton="3.9.0",
    registers=200,
    spills=0,
    stack=0,
    shared_bytes=132096,
    matrix_instructions=24,
    matrix_kind="HGMMA",
    async_copies=48,
    kv_buffers=2,
    fused=9,
    num_warps=8,
    traits={"phase": "prefill", "dtype": "bf16", "kv_dtype": "bf16", "padded_dim": 128, "tile": 64},
)


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, []),
        ({"spills": 3}, ["spills 3"]),
        ({"stack": 8}, ["needs 8 bytes of stack"]),
        ({"shared_bytes": 232449}, ["uses 232449 bytes of shared memory of 232448"]),
        ({"matrix_kind": "HMMA"}, ["multiplies with HMMA instead of HGMMA"]),
        ({"async_copies": 0}, ["has no 16-byte copies"]),
        ({"kv_buffers": 1}, ["keeps 1 K/V tile in flight instead of 2"]),
        ({"kernel": "gumbel"}, ["has 9 fused multiply-adds, which change the noise's bits"]),
    ],
    ids=str,
)
def test_each_gate_closes(change: dict[str, Any], words: list[str]) -> None:
    assert broken_gates(dataclasses.replace(GOOD, **change)) == words
