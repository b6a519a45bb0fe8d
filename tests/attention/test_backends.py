"""Which attention backend an engine gets, and what it says about one that it cannot have."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import cb_kernels.cpu
import pytest
import torch

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.attention.capabilities import AttentionNeeds, Capabilities
from cb_backend.attention.reference import ReferenceAttention
from cb_backend.attention.registry import BACKENDS, choose_backend
from cb_backend.attention.triton import TritonAttention
from cb_backend.errors import ModelError
from cb_backend.kv.storage import KVGeometry


def loaded(head_dim=64, num_heads=4, **fields) -> AttentionNeeds:
    """What a float32 model on a CPU asks for, with some fields changed."""
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=head_dim, num_heads=num_heads)
    dtype = fields.pop("dtype", torch.float32)
    plain = {"kv_dtype": dtype, "device": torch.device("cpu")}
    return AttentionNeeds(geometry, dtype, **plain | fields)


def choose(name, needs):
    return choose_backend(name, needs).name


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


def test_a_backend_that_cannot_be_had_names_the_one_to_use(monkeypatch, capability):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelError, match="needs a GPU; use attention_backend ('cpu' or )?'torch'$"):
        choose("triton", loaded())
    with pytest.raises(ModelError, match="does not run on cuda; use attention_backend 'triton' or 'torch'$"):
        choose("cpu", loaded(device=torch.device("cuda")))
    monkeypatch.setattr(cb_kernels.cpu, "load", lambda: None)
    with pytest.raises(ModelError, match="not built.*; use attention_backend 'torch'$"):
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
    with pytest.raises(
        ModelError, match="from 8 to 256 that are multiples of 8, not 12; use attention_backend 'torch'$"
    ):
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


def test_a_gpu_takes_triton(monkeypatch, capability):
    capability(9, 0)
    monkeypatch.setattr(TritonAttention, "create", lambda needs: TritonAttention())
    assert choose("auto", loaded(device=CUDA)) == "triton"
    assert choose("torch", loaded(device=CUDA)) == "torch"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"head_dim": 320}, "'triton' takes head dims from 1 to 256, not 320; use .*'torch'"),
        ({"num_heads": 258}, "'triton' takes up to 128 query heads per K/V head, not 258 over 2; use .*'torch'"),
        (
            {"dtype": torch.float64},
            "'triton' takes bfloat16, float16 or float32, not float64; use .*'torch'",
        ),
    ],
    ids=["head dim", "heads", "dtype"],
)
def test_a_model_that_the_kernels_cannot_serve_names_the_backend_that_can(capability, fields, message):
    with pytest.raises(ModelError, match=message):
        choose("auto", loaded(device=CUDA, **fields))


def test_a_gpu_too_old_for_the_kernels_names_the_backend_that_runs(capability):
    capability(7, 5)
    with pytest.raises(
        ModelError, match="need compute capability 8.0, this GPU has 7.5; use attention_backend 'torch'"
    ):
        choose("auto", loaded(device=CUDA))


def test_a_float8_cache_without_hardware_for_it_names_the_option(capability):
    capability(8, 0)
    with pytest.raises(ModelError, match="fp8 K/V cache needs sm_90 or newer.*kv_cache_dtype='auto'"):
        choose("triton", loaded(device=CUDA, kv_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("name, device", [("auto", "cpu"), ("torch", "cuda"), ("reference", "cpu"), ("cpu", "cpu")])
def test_a_float8_cache_needs_the_triton_backend(name, device):
    with pytest.raises(
        ModelError, match="kv_cache_dtype 'fp8_e4m3' needs attention_backend 'triton'.*use kv_cache_dty"
    ):
        choose(name, loaded(device=torch.device(device), kv_dtype=torch.float8_e4m3fn))


class Dummy(ReferenceAttention):
    """A backend that nothing in the project knows of."""

    capabilities = Capabilities(
        name="dummy",
        devices=frozenset({"cpu"}),
        auto_devices=frozenset({"cpu"}),
        dtypes=(torch.float32,),
        head_dims=range(4, 33, 4),
        softcap=False,
    )
    name = capabilities.name


@pytest.fixture
def dummy(monkeypatch):
    """The dummy as the fastest of all."""
    rest = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"dummy": Dummy} | rest)
    yield
    BACKENDS.clear()
    BACKENDS.update(rest)


@pytest.mark.usefixtures("dummy", "capability")
def test_a_registered_backend_is_chosen_and_refused_by_what_it_declares():
    small: dict[str, Any] = {"head_dim": 16}
    assert choose("dummy", loaded(**small)) == choose("auto", loaded(**small)) == "dummy"
    assert choose("auto", loaded(head_dim=64)) != "dummy"
    for fields, message in (
        ({"head_dim": 14}, "'dummy' takes head dims from 4 to 32 that are multiples of 4, not 14; use .*'torch'"),
        (small | {"dtype": torch.bfloat16}, "'dummy' takes float32, not bfloat16; use .*'torch'"),
        (small | {"device": CUDA}, "'dummy' does not run on cuda; use attention_backend 'triton' or 'torch'"),
        (small | {"softcap": True}, "'dummy' has no soft-capped scores, which this model's layers ask for; use "),
        (small | {"kv_dtype": torch.float8_e4m3fn}, "'fp8_e4m3' needs attention_backend 'triton'.* has 'dummy'"),
    ):
        with pytest.raises(ModelError, match=message):
            choose("dummy", loaded(**fields))


@pytest.mark.usefixtures("dummy")
def test_an_engine_runs_on_a_backend_that_it_does_not_know(tiny_llama, tiny_gemma2):
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    outputs = []
    for name in ("auto", "torch"):
        with Engine(model=str(tiny_llama), dtype="float32", num_kv_blocks=4, attention_backend=name) as engine:
            assert engine.parts.backend_name == ("dummy" if name == "auto" else "torch")
            outputs.append(engine.generate(prompt, params)[0].token_ids)
    assert outputs[0] == outputs[1]
    with Engine(model=str(tiny_gemma2), dtype="float32", num_kv_blocks=4) as engine:
        assert engine.parts.backend_name != "dummy", "its layers cap their scores"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match="'magic' is none of auto, triton, cpu, torch, reference"):
        choose("magic", loaded())


def test_the_configuration_names_every_shipped_backend():
    assert set(get_args(EngineConfig.model_fields["attention_backend"].annotation)) == {"auto", *BACKENDS}


def test_what_is_declared_is_data():
    for name, backend in BACKENDS.items():
        assert backend.capabilities.name == name
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.capabilities.name = "other"  # type: ignore[misc]
