"""Which attention backend an engine gets, and what it says about one that it cannot have."""

from __future__ import annotations

from dataclasses import dataclass

import cb_kernels.cpu
import pytest
import torch

from cb_backend import EngineConfig
from cb_backend.kv.storage import KVGeometry
from cb_backend.model.backends import choose_backend
from cb_backend.model.loader import ModelError


@dataclass
class Loaded:
    """The part of a `LoadedModel` that the choice looks at."""

    geometry: KVGeometry
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


def loaded(head_dim=64, **fields) -> Loaded:
    return Loaded(KVGeometry(num_layers=2, num_kv_heads=2, head_dim=head_dim, num_heads=4), **fields)


def choose(name, model):
    return choose_backend(EngineConfig(model="m", attention_backend=name), model).name


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
