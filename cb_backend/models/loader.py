"""Loads a model: from what the operator wrote to weights on the device and everything the engine asks about them.

Weights come from safetensors only; code that a checkpoint brings is never run. Attention goes through transformers'
attention interface under the name given: the paged one of attention.py, or one of transformers' own to compare with.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cb_kernels.cpu
import torch
from cb_kernels.cpu.binding import ISA_VARIABLE

from ..attention.hook import IMPLEMENTATION, register
from ..config import EngineConfig
from ..errors import ModelError, first_line
from ..kv.storage import KVGeometry
from .intact import check_weights
from .narrow import compute_in_float32
from .source import ModelSource, resolve_model
from .support import causal_lm_class, kv_geometry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["KVGeometry", "LoadedModel", "ModelError", "ModelSource", "load_model", "load_tokenizer", "resolve_model"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float32}
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}

_log = logging.getLogger("cb_backend")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: in eval mode, without gradients, on `device`.

    `tokenizer` is None if there is none: requests then bring token ids. `vocab_size` counts the rows of the output
    embedding, which may be more than the tokenizer's. `max_model_len` is in tokens, prompt and output together. On a
    CPU a float32 model may hold its weights in the checkpoint's 16 bits, see narrow.py.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    name: str
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    geometry: KVGeometry


def load_model(config: EngineConfig, *, attn_implementation: str = IMPLEMENTATION) -> LoadedModel:
    """Finds, checks and loads `config.model`; everything that can be refused is refused before weights are read.

    Raises:
        ModelError: there is no such model or it cannot be served, with the reason and what to do.
    """
    started = time.monotonic()
    source = resolve_model(config.model, config.tokenizer)
    name = config.served_model_name or source.name
    device = choose_device(config.device)
    with _quiet():
        hf_config, declared_dtype = _read_config(source.path, name)
        causal_lm_class(hf_config, name)
        max_model_len = _max_model_len(hf_config, config.max_model_len, name)
        checkpoint = _checkpoint_dtype(source.path, declared_dtype)
        dtype = choose_dtype(config.dtype, checkpoint, device)
        tokenizer = load_tokenizer(source)
        narrow = attn_implementation == IMPLEMENTATION and _stays_narrow(source.path, checkpoint, dtype, device)
        model = _load_weights(source.path, hf_config, checkpoint if narrow else dtype, attn_implementation, name)
        if narrow:
            compute_in_float32(model)
    geometry = kv_geometry(model, name)
    model.eval().requires_grad_(False).to(device)
    output = model.get_output_embeddings()
    if output is None or not hasattr(output, "weight"):
        raise ModelError(f"'{name}' ({hf_config.model_type}) has no output embedding to sample from")
    vocab_size = output.weight.shape[0]
    _log.info("loaded %s (%s on %s) in %.1f s", name, dtype, device, time.monotonic() - started)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model, tokenizer, vocab_size),
        vocab_size=vocab_size,
        geometry=geometry,
    )


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast | None:
    """The tokenizer of `source`, or None where it has none.

    Raises:
        ModelError: its files are there but cannot be read.
    """
    if source.tokenizer_path is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source.tokenizer_path), trust_remote_code=False)
    except Exception as error:  # json, tokenizers' own Exception, KeyError for a missing field...
        raise ModelError(f"cannot read the tokenizer in {source.tokenizer_path}: {first_line(error)}") from error


def choose_device(device: str) -> torch.device:
    """`auto` is CUDA if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device '{device}' is not a torch device; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        what = (
            f"torch {torch.__version__} is built without CUDA: install a CUDA build"
            if torch.version.cuda is None
            else f"torch sees no GPU: give this container one (`docker run --gpus all`) and its host a driver for CUDA "
            f"{torch.version.cuda}"
        )
        raise ModelError(f"device '{device}': {what}, or set device to 'cpu'")
    return chosen


def choose_dtype(wanted: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and K/V.

    `auto` keeps the checkpoint's, except on a CPU: 16-bit there means bfloat16 where the CPU multiplies it natively
    (no CPU does float16 well), and float32 where it would be emulated: the native kernels keep the weights in the
    checkpoint's 16 bits all the same.
    """
    if wanted != "auto":
        return _DTYPES[wanted]
    if device.type != "cpu" or checkpoint == torch.float32:
        return checkpoint
    return torch.bfloat16 if cpu_has_fast_bf16() else torch.float32


def cpu_has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has bfloat16 dot products (x86: AVX512-BF16 or AMX; Arm: BF16). False where this is unknown.

    An instruction set that `CB_CPU_ISA` forces counts in place of the CPU's.
    """
    library = cb_kernels.cpu.load() if os.environ.get(ISA_VARIABLE) else None
    if library is not None:
        return library.native.has_product
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(value.split())
    return False


def _read_config(path: Path, name: str) -> tuple[Any, str | None]:
    """transformers' configuration of the model, and the dtype that config.json names, if any."""
    from transformers import AutoConfig

    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        text = raw.get("text_config") or {}
        wanted = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path / 'config.json'} is not a JSON object: {first_line(error)}") from None
    if wanted is not None and wanted not in _DTYPES:
        raise ModelError(f"'{name}': dtype {wanted!r} in {path / 'config.json'} is none of {', '.join(_DTYPES)}")
    try:
        return AutoConfig.from_pretrained(str(path), trust_remote_code=False), wanted
    except Exception as error:  # transformers validates with several libraries, each with its own errors
        raise ModelError(
            f"transformers cannot read {path / 'config.json'} (model type {raw.get('model_type')!r}): "
            f"{first_line(error)}"
        ) from error


def _checkpoint_dtype(path: Path, declared: str | None) -> torch.dtype:
    """What config.json says; where it says nothing, the dtype of the first tensor."""
    if declared is not None:
        return _DTYPES[declared]
    from safetensors import SafetensorError, safe_open

    weights = sorted(path.glob("*.safetensors"))[0]
    try:
        with safe_open(weights, framework="pt") as file:
            stored = [file.get_slice(key).get_dtype() for key in list(file.keys())[:1]]
    except SafetensorError as error:
        raise ModelError(f"cannot read {weights}: {first_line(error)}") from error
    return _DTYPES[_SAFETENSORS_DTYPES.get(stored[0], "float32") if stored else "float32"]


def _stays_narrow(path: Path, checkpoint: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a float32 model on a CPU is loaded in the 16 bits of its checkpoint: all of it must be of that dtype."""
    if device.type != "cpu" or dtype != torch.float32 or checkpoint not in (torch.bfloat16, torch.float16):
        return False
    from safetensors import SafetensorError, safe_open

    try:
        for file in path.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                stored = {opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118
            if not all(_SAFETENSORS_DTYPES.get(name) == str(checkpoint).removeprefix("torch.") for name in stored):
                return False
    except SafetensorError:
        return False  # loading says what is wrong
    return True


def _load_weights(path: Path, config: Any, dtype: torch.dtype, attn_implementation: str, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    register()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # torn files, sizes that do not match, a class that needs another package
        raise ModelError(f"cannot load the weights of '{name}' from {path}: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the checkpoint of '{name}' in {path} lacks {len(missing)} weights, e.g. {missing[0]}; it is incomplete "
            "or of another architecture than its config.json says"
        )
    check_weights(model, report["unexpected_keys"], path, name)
    return model


def _max_model_len(config: Any, wanted: int | None, name: str) -> int:
    context = _context_length(config.get_text_config(decoder=True))
    if context is None:
        if wanted is None:
            raise ModelError(f"'{name}' does not say how long its context is; set max_model_len")
        return wanted
    if wanted is not None and wanted > context:
        raise ModelError(
            f"max_model_len {wanted} is more than the {context} positions that '{name}' was trained for; "
            "a longer context needs rope scaling in its config.json (rope_type 'yarn')"
        )
    return wanted or context


def _context_length(config: Any) -> int | None:
    """Positions that the model takes, with the rope scaling that its configuration states.

    YaRN and linear interpolation stretch an original context by their factor; where linear interpolation does not state
    the original, `max_position_embeddings` is the stretched one (Gemma 3). With dynamic scaling the frequencies change
    with the length beyond the original, which cached keys cannot follow: it ends there. All others state what they
    reach in `max_position_embeddings`.
    """
    stated = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "full_attention" in rope:  # one set per kind of layer
        rope = rope["full_attention"]
    kind = rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings")
    if kind == "dynamic" and original is not None:
        return int(original)
    if kind == "yarn" or (kind == "linear" and original is not None):
        original = original or stated
        return None if original is None else int(original * rope.get("factor", 1.0))
    return None if stated is None else int(stated)


def _eos_token_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Ids that end a generation: from generation_config, else from the configuration, else from the tokenizer."""
    text = model.config.get_text_config(decoder=True)
    for owner in (model.generation_config, model.config, text, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if value is None:
            continue
        ids = [value] if isinstance(value, int) else list(value)
        return frozenset(i for i in ids if 0 <= i < vocab_size)
    return frozenset()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers in a log file; a person at a terminal sees them."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    if sys.stderr.isatty() or not shown:
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
