"""All layers of a Llama-like decoder as one native call per step, in float32 or, where the CPU multiplies it, bf16.

For a decode, most of the time between two matrix products is spent starting the next one; see `src/decoder.cpp`. The
weights are reordered for the product once; in float32 they are kept in 16 bits where that loses nothing, see
`panels.py`. A row's result does not depend on the other rows, their number, or the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cb_kernels.cpu import binding
from cb_kernels.cpu.library import DTYPES, Batch, Library, UnsupportedShape, supports
from cb_kernels.cpu.panels import PackedMatrix, PackedMemory

_PANEL = 32  # rows and columns that the product works on at once

Norm = tuple[torch.Tensor, float]  # weight, epsilon


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, as torch's modules hold it: [out features, in features].

    All bf16 for a decoder in bf16; float32, bf16 or float16 for one in float32.

    `qkv` is q, k and v stacked. `head_norms` are the norms of each query and key head, or None. `window`: keys a row
    sees, itself included; 0: all.
    """

    input_norm: Norm
    middle_norm: Norm
    head_norms: tuple[Norm, Norm] | None
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    scale: float
    window: int


def runs_decoder(library: Library, shape: DecoderShape, dtype: torch.dtype) -> bool:
    """Whether this CPU and these sizes allow it, with activations and K/V of `dtype`."""
    sizes = (shape.hidden_size, shape.intermediate_size, shape.q_size, shape.qkv_size)
    if dtype == torch.bfloat16:
        return library.native.has_product and all(size % 16 == 0 for size in sizes)
    return dtype == torch.float32 and supports(shape.head_dim, dtype) and shape.hidden_size % 8 == 0


class Decoder:
    """The layers, ready to run. Keeps its own copy of the matrices.

    Args:
        dtype: of activations and K/V, float32 or bf16.

    Raises:
        UnsupportedShape: see `runs_decoder`.
    """

    def __init__(
        self,
        library: Library,
        shape: DecoderShape,
        layers: Iterable[LayerWeights],
        dtype: torch.dtype,
    ) -> None:
        if not runs_decoder(library, shape, dtype):
            raise UnsupportedShape(f"no native decoder for {shape} in {dtype} on {library.isa}")
        self.library = library
        self.shape = shape
        self.dtype = dtype
        self._memory = PackedMemory()
        self._calls: list[tuple[float, int]] = []  # distinct (scale, window)
        self._held: list[object] = []  # what the structures point to
        self._made = [self._layer(layer) for layer in layers]
        self._use_layers()
        self._rows = 0

    def __len__(self) -> int:
        return len(self._made)

    def append(self, layer: LayerWeights) -> None:
        """Adds a layer behind the last one."""
        self._made.append(self._layer(layer))
        self._use_layers()

    def pop(self) -> None:
        """Takes the last layer off again."""
        self._made.pop()
        self._use_layers()

    def _use_layers(self) -> None:
        self._layers = (binding.DecoderLayer * len(self._made))(*self._made)
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []  # those that the layers point to

    def _layer(self, layer: LayerWeights) -> binding.DecoderLayer:
        def hold(tensor: torch.Tensor | None, dtype: torch.dtype = self.dtype) -> int | None:
            if tensor is None:
                return None
            tensor = tensor.to(dtype).contiguous()
            self._held.append(tensor)
            return tensor.data_ptr()

        attention = (layer.scale, layer.window)
        if attention not in self._calls:
            self._calls.append(attention)
        q_norm, k_norm = layer.head_norms or ((None, 0.0), (None, 0.0))
        run = self.library.native.panel // 2 if self.dtype == torch.float32 else _PANEL // 2
        gate_up = self.pack(_interleave(layer.gate, layer.up, run))
        gate_up.n = 2 * self.shape.intermediate_size
        return binding.DecoderLayer(
            input_norm=hold(layer.input_norm[0]),
            middle_norm=hold(layer.middle_norm[0]),
            q_norm=hold(q_norm[0]),
            k_norm=hold(k_norm[0]),
            qkv=self.pack(layer.qkv),
            out=self.pack(layer.out),
            gate_up=gate_up,
            down=self.pack(layer.down),
            qkv_bias=hold(layer.qkv_bias, torch.float32),
            out_bias=hold(layer.out_bias, torch.float32),
            attention=self._calls.index(attention),
            input_eps=layer.input_norm[1],
            middle_eps=layer.middle_norm[1],
            head_eps=q_norm[1],
        )

    def pack(self, weight: torch.Tensor) -> binding.Panels:
        """weight [n, depth] in the order of the product, in memory that all matrices share."""
        if self.dtype == torch.float32:
            matrix = PackedMatrix(self.library, weight, self._memory)
            self._held.append(matrix)
            return matrix.panels
        if weight.dtype != torch.bfloat16:
            raise UnsupportedShape(f"a weight of the decoder in bfloat16 must be so too, not {weight.dtype}")
        n, depth = weight.shape
        weight = weight.contiguous()
        packed = self._memory.take(-(-n // _PANEL) * -(-depth // _PANEL) * _PANEL**2, weight.dtype)
        self._held.append(packed)
        self.library.native.pack_weight(weight.data_ptr(), weight.stride(0), n, depth, packed.data_ptr())
        return binding.Panels(packed.data_ptr(), n, depth, DTYPES[weight.dtype])

    def __call__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        batch: Batch,
        caches: list[tuple[torch.Tensor, torch.Tensor]],
        *,
        only: int | None = None,
    ) -> float:
        """Runs all layers on `hidden` [rows, hidden_size], in place, and writes K and V of its rows.

        Args:
            cos, sin: [rows, head_dim]; all of the decoder's dtype.
            slots: int64 [rows], see `Library.write_kv`.
            batch: the step's ragged batch over these rows.
            caches: K and V of each layer (there may be more), [num_blocks, num_kv_heads, block_size, head_dim], all of
                equal strides.
            only: the one layer to run; None: all.

        Returns:
            Seconds that the thread that other processes hindered most did not run.
        """
        rows, shape = hidden.shape[0], self.shape
        for name, tensor in (("hidden", hidden), ("cos", cos), ("sin", sin)):
            width = shape.hidden_size if name == "hidden" else shape.head_dim
            if tensor.dtype != self.dtype or tensor.shape != (rows, width) or tensor.stride(1) != 1:
                wanted = f"{self.dtype} [{rows}, {width}]"
                raise UnsupportedShape(f"{name} must be {wanted}, not {tensor.dtype} {tuple(tensor.shape)}")
        if slots.dtype != torch.int64 or slots.shape != (rows,) or not slots.is_contiguous():
            raise UnsupportedShape(f"slots must be contiguous int64 [{rows}], not {slots.dtype} {tuple(slots.shape)}")
        if caches is not self._caches:
            self._use_caches(caches)
        if rows > self._rows:
            self._make_scratch(rows)
        q = self._qkv[:rows, : shape.q_size].unflatten(1, (shape.num_heads, shape.head_dim))
        attended = self._attended[:rows, : shape.q_size].unflatten(1, (shape.num_heads, shape.head_dim))
        prepared = [batch.prepare(q, *caches[0], attended, scale=scale, window=window) for scale, window in self._calls]
        count = len(prepared)
        plans = (ctypes.c_void_p * count)(*(plan for plan, _ in prepared))
        attentions = (ctypes.c_void_p * count)(*(attention for _, attention in prepared))
        call = binding.Decoder(
            layers=ctypes.addressof(self._layers) + (only or 0) * ctypes.sizeof(binding.DecoderLayer),
            attentions=ctypes.addressof(attentions),
            plans=ctypes.addressof(plans),
            hidden=hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            normed=self._normed.data_ptr(),
            qkv=self._qkv.data_ptr(),
            attended=self._attended.data_ptr(),
            gated=self._gated.data_ptr(),
            projected=self._projected.data_ptr(),
            hidden_row=hidden.stride(0),
            cos_row=cos.stride(0),
            normed_row=self._normed.stride(0),
            qkv_row=self._qkv.stride(0),
            attended_row=self._attended.stride(0),
            gated_row=self._gated.stride(0),
            projected_row=self._projected.stride(0),
            num_layers=len(self._layers) if only is None else 1,
            rows=rows,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=caches[0][0].shape[2],
            dtype=DTYPES[self.dtype],
        )
        kept_back = ctypes.c_double()
        failed = self.library.native.decode(
            ctypes.addressof(call), torch.get_num_threads(), ctypes.addressof(kept_back)
        )
        if failed:
            raise UnsupportedShape(f"{self.library.native.isa} has no native decoder in {self.dtype}")
        hidden += self._projected[:rows, : shape.hidden_size]
        return kept_back.value

    def _use_caches(self, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        strides = {tensor.stride() for pair in caches for tensor in pair}
        if len(caches) < len(self._layers) or len(strides) != 1:
            raise UnsupportedShape(f"{len(caches)} caches with strides {strides} for {len(self._layers)} layers")
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=False):
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        self._caches = caches

    def _make_scratch(self, rows: int) -> None:
        """Rows and columns padded to what the product reads; the padding columns stay 0.

        A row is an odd number of cache lines: at 48 lines, all rows of a panel would share a sixteenth of the cache.
        """
        self._rows = -(-rows // _PANEL) * _PANEL
        line = 64 // self.dtype.itemsize

        def make(columns: int) -> torch.Tensor:
            lines = -(-columns // _PANEL) * _PANEL // line
            return torch.zeros(self._rows, (lines | 1) * line, dtype=self.dtype)

        self._normed = make(self.shape.hidden_size)
        self._qkv = make(self.shape.qkv_size)
        self._attended = make(self.shape.q_size)
        self._gated = make(self.shape.intermediate_size)
        self._projected = make(self.shape.hidden_size)


def _interleave(gate: torch.Tensor, up: torch.Tensor, run: int) -> torch.Tensor:
    """`run` rows of gate, `run` of up, `run` of gate, ...: what a gated product expects; the last runs end in zeros."""
    pad = (0, 0, 0, -gate.shape[0] % run)
    gate, up = (torch.nn.functional.pad(weight, pad) if pad[3] else weight for weight in (gate, up))
    return torch.stack([gate.unflatten(0, (-1, run)), up.unflatten(0, (-1, run))], dim=1).flatten(0, 2)
