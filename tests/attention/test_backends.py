"""Which attention backend an engine gets, and what it says about one that it cannot have."""

from __future__ import annotations

from dataclasses import dataclass

import cb_kernels.cpu
import pytest
import torch

from cb_backend import EngineConfig
from cb_backend.attention import registry as backends
from cb_backend.attention.registry import choose_backend
from cb_backend.attention.triton import TritonAttention
from cb_backend.errors import ModelError
from cb_backend.kv.storage import KVGeometry


@dataclass
class Loaded:
    """The part of a `LoadedModel` that the choice looks at."""

    geometry: KVGeometry
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


def loaded(head_dim=64, **fields) -> Loaded:
    return Loaded(KVGeometry(num_layers=2, num_kv_heads=2, head_dim=head_dim, num_heads=4), **fields)


def choose(name, model, **fields):
    return choose_backend(EngineConfig(model="m", attention_backend=name, **fields), model).name


def test_a_cpu_takes_the_native_kernels_where_they_are_built_and_fit(monkeypatch):
    built = cb_kernels.cpu.load() is not None
    assert choose("auto", loaded()) == ("cpu" if built else "torch")
    assert choose("auto", loaded(head_dim=12)) == "torch"
    assert choose("auto", loaded(dtype=torch.float16)) == "torch"
    monkeypatch.setattr(cb_kernels.cpu, "load", lambda: None)
    assert choose("auto", loaded()) == "torch"


def test_a_named_backend_is_taken():
    assert choose("torch", loaded()) == "torch"
    assert choose("reference", loaded()) == "reference"


def test_a_backend_that_cannot_be_had_names_the_one_to_use(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelError, match="needs a GPU; on a CPU use 'cpu' or 'torch'"):
        choose("triton", loaded())
    with pytest.raises(ModelError, match="does not run on cuda.*use 'triton' or 'torch'"):
        choose("cpu", loaded(device=torch.device("cuda")))
    monkeypatch.setattr(cb_kernels.cpu, "load", lambda: None)
    with pytest.raises(ModelError, match="not built.*or use 'torch'"):
        choose("cpu", loaded())


def test_a_missing_or_old_triton_is_named(monkeypatch):
    from cb_kernels import targets

    def absent(name):
        raise targets.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(targets.metadata, "version", absent)
    with pytest.raises(ModelError, match="not installed"):
        choose("triton", loaded())
    monkeypatch.setattr(targets.metadata, "version", lambda name: "3.3.1")
    with pytest.raises(ModelError, match="too old: 3.4 or newer"):
        choose("triton", loaded())


@pytest.mark.usefixtures("native_kernels")
def test_the_native_backend_refuses_a_head_dim_it_cannot_do():
    with pytest.raises(ModelError, match="multiples of 8.*not 12.*use 'torch'"):
        choose("cpu", loaded(head_dim=12))


CUDA = torch.device("cuda")


@pytest.fixture
def capability(monkeypatch):
    """A played GPU: its compute capability can be set."""

    def give(*numbers):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: numbers)

    give(9, 0)
    return give


def test_a_gpu_takes_triton(monkeypatch):
    monkeypatch.setattr(backends, "_triton", lambda config, model: TritonAttention())
    assert choose("auto", loaded(device=CUDA)) == "triton"
    assert choose("torch", loaded(device=CUDA)) == "torch"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"head_dim": 320}, "head_dim must be between 1 and 256 for the Triton kernel, got 320; use .*'torch'"),
        ({"dtype": torch.float64}, "dtype must be bfloat16, float16 or float32.*use attention_backend='torch'"),
    ],
    ids=["head dim", "dtype"],
)
def test_a_model_that_the_kernels_cannot_serve_names_the_backend_that_can(capability, fields, message):
    with pytest.raises(ModelError, match=message):
        choose("auto", loaded(device=CUDA, **fields))


def test_a_gpu_too_old_for_the_kernels_names_the_backend_that_runs(capability):
    capability(7, 5)
    with pytest.raises(
        ModelError, match="need compute capability 8.0, this GPU has 7.5; use attention_backend='torch'"
    ):
        choose("auto", loaded(device=CUDA))


def test_a_float8_cache_without_hardware_for_it_names_the_option(capability):
    capability(8, 0)
    with pytest.raises(ModelError, match="fp8 K/V cache needs sm_90 or newer.*kv_cache_dtype='auto'"):
        choose("triton", loaded(device=CUDA), kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("name, device", [("auto", "cpu"), ("torch", "cuda"), ("reference", "cpu"), ("cpu", "cpu")])
def test_a_float8_cache_needs_the_triton_backend(name, device):
    with pytest.raises(
        ModelError, match="kv_cache_dtype 'fp8_e4m3' needs attention_backend 'triton'.*use kv_cache_dty"
    ):
        choose(name, loaded(device=torch.device(device)), kv_cache_dtype="fp8_e4m3")
