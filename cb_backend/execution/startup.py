"""Gets the device ready before the first request: backend chosen, pools sized, kernels compiled, graphs captured.

On a CPU little of this happens. On a GPU the order matters: scales of a narrow cache and the memory that a step takes
are measured on small pools that are dropped again, then the real pool takes what is left, then everything that reads
the pool's addresses is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import cb_kernels.cpu
import torch
from cb_kernels.cpu.memory import return_freed

from ..attention.capabilities import AttentionNeeds
from ..attention.hook import AttentionBackend, NarrowingBackend
from ..attention.registry import choose_backend, kv_dtype
from ..attention.scales import Extremes, KVScales
from ..config import EngineConfig
from ..device.headroom import CudaMemory, DeviceMemory, Room, measure_room, naming_shortage
from ..errors import ModelError
from ..kv.storage import KVStorage
from ..kv.swap import CopyBlocks
from ..models.layers.fused import fuse_model
from ..models.loader import LoadedModel
from ..models.narrow import widen
from ..models.packed_embeddings import pack_embeddings
from ..models.support import attention_features
from ..sampling.host import sample
from .executor import Executor, Sampler
from .graphs import CudaRecorder, Recorder, bucket_sizes
from .memory_plan import MemoryPlan, plan_memory
from .probe import probe_blocks
from .warmup import warm_up

logger = logging.getLogger("cb_backend")

_CALIBRATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ReadyDevice:
    executor: Executor
    storage: KVStorage
    memory: MemoryPlan


def prepare(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    device_memory: DeviceMemory | None = None,
    recorder: Callable[[], Recorder] | None = None,
) -> ReadyDevice:
    """Everything that touches the device before the engine thread starts.

    Args:
        device_memory, recorder: by default those of CUDA on a CUDA device, and none elsewhere. Each call of `recorder`
            makes one with memory of its own.

    Raises:
        ModelError: backend, options, model and device do not go together, or the memory does not suffice.
    """
    if loaded.device.type == "cuda":
        device_memory = device_memory or CudaMemory(loaded.device)
        recorder = recorder or (lambda: CudaRecorder(loaded.device))
    use_device(loaded.device)
    backend = choose_backend(config.attention_backend, attention_needs(config, loaded))
    if config.cuda_graphs and (recorder is None or not backend.capabilities.graph_safe):
        raise ModelError(
            f"cuda_graphs needs a GPU and attention_backend 'triton', this engine has '{backend.name}' on "
            f"{loaded.device}; set cuda_graphs to false"
        )
    library = cb_kernels.cpu.load() if backend.capabilities.fuses_layers else None
    if library is not None:
        fuse_model(loaded.model, library)
        pack_embeddings(loaded.model, library)
    widen(loaded.model)
    if library is not None:
        return_freed()
    if kv_dtype(config, loaded.dtype) != loaded.dtype:
        backend = cast(NarrowingBackend, backend).with_scales(_measure_scales(config, loaded, backend))
    sizes = bucket_sizes(min(config.max_num_seqs, config.max_num_batched_tokens)) if config.cuda_graphs else ()
    room: Room | None = None
    if device_memory is not None:
        room = measure_room(device_memory, lambda: _Trial(config, loaded, backend, recorder), sizes)
    memory = plan_memory(config, loaded, room)
    storage = _storage(config, loaded, backend, memory.num_blocks, memory.num_host_blocks)
    executor = Executor(loaded.model, storage, backend, _choose_sampler(backend, loaded.device))
    _report("compiled", warm_up(executor))
    executor.check_projection()
    if recorder is not None and sizes:
        try:
            _report("captured a decode batch of", executor.capture(recorder(), sizes, memory.max_model_len))
        except RuntimeError as error:
            raise ModelError(f"CUDA graphs cannot be captured ({error}); set cuda_graphs to false") from error
    return ReadyDevice(executor, storage, memory)


def attention_needs(config: EngineConfig, loaded: LoadedModel) -> AttentionNeeds:
    """What the model and the options ask of an attention backend."""
    return AttentionNeeds(
        geometry=loaded.geometry,
        dtype=loaded.dtype,
        kv_dtype=kv_dtype(config, loaded.dtype),
        device=loaded.device,
        max_decodes=min(config.max_num_seqs, config.max_num_batched_tokens),
        **attention_features(loaded.model),
    )


def use_device(device: torch.device) -> None:
    """Makes `device` the one that Triton's launches on this thread go to."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _report(what: str, pieces: Iterable[Any]) -> None:
    began = time.monotonic()
    for number, piece in enumerate(pieces, 1):
        logger.info("%s %s (%d, after %.1f s)", what, piece, number, time.monotonic() - began)


def _choose_sampler(backend: AttentionBackend, device: torch.device) -> Sampler:
    """The sampler that runs where the backend does."""
    if backend.capabilities.runs_triton:
        from ..sampling.device import DeviceSampler

        return DeviceSampler(device)
    return sample


def _storage(
    config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, num_host_blocks: int = 0
) -> KVStorage:
    copy_blocks: CopyBlocks | None = None
    dtype = kv_dtype(config, loaded.dtype)
    if backend.capabilities.runs_triton and config.block_size * loaded.geometry.bytes_per_token(dtype) % 4 == 0:
        from cb_kernels.kv_copy.launch import copy_blocks
    return KVStorage(loaded.geometry, num_blocks, config.block_size, num_host_blocks, dtype, loaded.device, copy_blocks)


def _measure_scales(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend) -> KVScales:
    """Runs varied tokens through the model with a cache of the model's own dtype and looks at its K and V."""
    geometry, longest = loaded.geometry, min(_CALIBRATION_TOKENS, loaded.max_model_len)
    with naming_shortage():
        storage = KVStorage(
            geometry, -(-longest // config.block_size), config.block_size, 0, loaded.dtype, loaded.device
        )
        extremes = Extremes(backend, geometry.num_layers, geometry.num_kv_heads, loaded.device)
        Executor(loaded.model, storage, extremes).run_probe(longest)
    return extremes.scales()


class _Trial:
    """The largest step and some graphs, on a pool that is just large enough."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        backend: AttentionBackend,
        recorder: Callable[[], Recorder] | None,
    ) -> None:
        self._budget = config.max_num_batched_tokens
        self._longest = min(self._budget, config.max_model_len or loaded.max_model_len)
        self._rows = min(config.max_num_seqs, self._budget)
        self._max_model_len = config.max_model_len or loaded.max_model_len
        self._recorder = None if recorder is None else recorder()
        blocks = probe_blocks(self._budget, config.block_size, self._longest)
        storage = _storage(config, loaded, backend, blocks)
        self._executor = Executor(loaded.model, storage, backend, _choose_sampler(backend, loaded.device))

    def largest_step(self) -> None:
        self._executor.run_probe(self._budget, longest=self._longest, num_samples=self._rows)

    def capture(self, size: int) -> Any:
        if self._recorder is None:
            raise RuntimeError("graphs are measured with the recorder that will make them")
        list(self._executor.capture(self._recorder, (size,), self._max_model_len))
        return self._executor.graphs
