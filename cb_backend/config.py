"""What an operator can set, with units, defaults and reasons.

`EngineConfig` is the whole public configuration. Every field can also be set for the shipped service by an
environment variable: `CB_` + the field name in capitals, nested fields joined by two underscores
(`CB_NUM_KV_BLOCKS=500`, `CB_ADMISSION__RISK=0.05`); `bento/loading.py` reads them.
This module imports neither torch nor bentoml, so that a bad value is reported before anything heavy loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*$", re.IGNORECASE)
_UNIT = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: Any) -> int:
    """Bytes from `4294967296`, `"4GiB"`, `"512MB"` or `"0"`.

    Raises:
        ValueError: the value is not a size: negative, boolean, NaN or with an unknown unit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"must be a number of bytes or a size such as '4GiB', not {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"must not be negative, got {value}")
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"must be a size such as '4GiB', '512MiB' or '0', not {value!r}")
    number, unit = match.groups()
    return int(float(number) * _UNIT[unit.lower().removesuffix("b")])


ToolCallFormat = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_args",
    "granite",
    "phi4",
    "qwen3_coder",
    "glm",
    "minimax_m2",
    "kimi_k2",
    "deepseek_v3",
    "deepseek_v3_1",
    "harmony",
    "pythonic",
    "llama4",
]
ByteSize = Annotated[int, BeforeValidator(parse_size)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


class AdmissionConfig(_Section):
    """When a waiting request may take memory (docs/admission.md)."""

    policy: Literal["forecast", "worst_case", "prompt"] = Field(
        "forecast",
        description="`forecast`: admit when the forecast peak of memory fits with probability 1 - risk. "
        "`worst_case`: admit when prompt + max_tokens of all requests fit. `prompt`: admit when the prompt fits.",
    )
    risk: float = Field(
        0.01, gt=0.0, lt=1.0, description="Accepted probability that an admission later overflows the KV pool."
    )
    refuse_late: bool = Field(
        True, description="Refuse a request at once when the forecast says that its deadline cannot be met."
    )
    curves_file: str | None = Field(
        None, description="JSON file that keeps the observed output lengths over a restart; absent: start blind."
    )


class EngineConfig(_Section):
    """Configuration of one engine (one model, one KV pool, one thread). Frozen; sizes are bytes, lengths are tokens.

    Sizes may be written as text (`"4GiB"`, `"512MB"`). Defaults of None are resolved when the engine starts, from the
    model and the machine; the log says to what.

    Raises:
        pydantic.ValidationError: a value is outside its range, or a name is no field.
    """

    model: str = Field(description="Directory, BentoML model tag or Hugging Face id.")
    tokenizer: str | None = Field(None, description="Where the tokenizer is, if not beside the model.")
    served_model_name: str | None = Field(None, description="Id that HTTP clients use; default: the model's name.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="`auto`: the checkpoint's; float32 on a CPU without fast bf16."
    )
    device: str = Field("auto", description="`auto`: CUDA if present, else CPU. Otherwise a torch device.")
    max_model_len: int | None = Field(
        None, gt=0, description="Longest prompt + output in tokens; default: what the model was trained for."
    )
    block_size: int = Field(32, ge=1, le=1024, description="Tokens in one KV block.")
    num_kv_blocks: int | None = Field(None, gt=0, description="Blocks in the KV pool; default: from memory.")
    kv_cache_memory: ByteSize | None = Field(
        None, description="Size of the KV pool; default: what the device has left (see `gpu_memory_utilization`)."
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="Share of the free device memory that the KV pool may take (GPU only)."
    )
    swap_space: ByteSize = Field(
        2**32, description="Host memory for the KV of preempted requests; `0` turns swapping off."
    )
    max_num_batched_tokens: int = Field(512, ge=1, description="Token budget m of one step.")
    max_num_seqs: int = Field(256, ge=1, description="Most sequences running at once.")
    enable_prefix_caching: bool = Field(True, description="Share the KV of equal prompt beginnings.")
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    preemption: Literal["auto", "swap", "recompute"] = Field(
        "auto", description="How a preempted request comes back; `auto`: the cheaper by measured cost."
    )
    max_queue_size: int = Field(1024, ge=1, description="Waiting requests before new ones get 429.")
    attention_backend: Literal["auto", "triton", "cpu", "torch", "reference"] = Field(
        "auto", description="`auto`: triton on a GPU; on a CPU the native kernel, or torch where it is absent."
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description="`auto`: the model's dtype. `fp8_e4m3`: half the memory of 16 bits, with a scale per head that is "
        "measured at the start; triton backend only.",
    )
    cuda_graphs: bool = Field(
        False,
        description="Experimental, no GPU has proved it yet: replay decode steps as CUDA graphs (triton backend only).",
    )
    overlap: bool | None = Field(
        None, description="Plan and launch a step while the one before it computes; default: on a GPU only."
    )
    allow_request_template: bool = Field(
        False, description="Let a chat request bring a template of its own; it runs in transformers' sandbox, untimed."
    )
    tool_call_format: ToolCallFormat | None = Field(
        None,
        description="How the model writes tool calls (docs/openai.md); default: as its chat template shows.",
    )
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads; default and most: the physical cores this process may use."
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds the requests that bring no seed of their own.")

    @field_validator("model")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a directory, a BentoML model tag or a Hugging Face id")
        return value

    def replace(self, assignments: Mapping[str, str]) -> EngineConfig:
        """A copy with dotted fields set from text, as `--set admission.policy=prompt` gives them.

        Raises:
            pydantic.ValidationError: a value is bad, or a name is no field.
        """
        values = self.model_dump()
        for dotted, raw in assignments.items():
            _set_by_path(values, dotted.split("."), raw)
        return type(self)(**values)


def _set_by_path(values: dict[str, Any], path: list[str], raw: str) -> None:
    """Sets `values[path[0]][path[1]]...` to `raw`, read as JSON where it is JSON (`true`, `3`), else as text."""
    for key in path[:-1]:
        values = values.setdefault(key, {})
    try:
        values[path[-1]] = json.loads(raw)
    except ValueError:
        values[path[-1]] = raw
