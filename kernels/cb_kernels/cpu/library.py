"""The native kernels as functions of tensors.

`load()` gives the one `Library` of the process or None. Every function writes where it is told, checks what it is given
once per distinct shape, and uses `torch.get_num_threads()` threads of torch's own OpenMP pool. Results do not depend on
the number of threads; a row of attention does not depend on the other rows of its batch or on how its prompt was cut.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from cb_kernels.cpu import binding

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256

logger = logging.getLogger(__name__)


class UnsupportedShape(ValueError):
    """These tensors are not for the native kernel: use the torch backend. The message names the field at fault."""


def supports(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether attention of this head dim and dtype can run natively."""
    return dtype in DTYPES and 8 <= head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


@functools.cache
def load() -> Library | None:
    """The native library, or None after one warning that says why things are slower."""
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = Library(binding.Native(str(torch_library)))
    except binding.LoadError as error:
        logger.warning("native CPU kernels are off, attention on the CPU will be several times slower: %s", error)
        return None
    if not library.native.has_threads:
        logger.warning("torch's OpenMP runtime was not found: native CPU kernels use one thread")
    logger.info("native CPU kernels: %s, %s", library.isa, library.native.path)
    return library


class Library:
    """All native operations. Made by `load()`."""

    def __init__(self, native: binding.Native) -> None:
        self.native = native
        self.isa = native.isa

    def batch(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens: torch.Tensor) -> Batch:
        """Prepares one step's ragged batch; see `Batch`."""
        return Batch(self.native, block_tables, seq_lens, cu_seqlens)

    def write_kv(
        self, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Copies k, v [num_tokens, num_kv_heads, head_dim] to `slots` int64 [num_tokens]; -1 skips a token."""
        write = _kv_write(k, v, k_cache, v_cache, slots)
        self.native.kv_write(ctypes.addressof(write), torch.get_num_threads())

    def rotary_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Rotates q [num_tokens, num_heads, head_dim] and k in place (Llama's halves), then does `write_kv`.

        cos, sin: [num_tokens, head_dim] in q's dtype. bf16 products are rounded as `apply_rotary_pos_emb` rounds them.
        """
        write = _kv_write(k, v, k_cache, v_cache, slots)
        if not (q.dtype == k.dtype == cos.dtype == sin.dtype):
            raise UnsupportedShape(
                f"q {q.dtype}, k {k.dtype}, cos {cos.dtype} and sin {sin.dtype} must be of one dtype"
            )
        if q.stride(2) != 1 or cos.stride(1) != 1 or sin.stride() != cos.stride():
            raise UnsupportedShape("q, cos and sin must be contiguous over head_dim, cos and sin of equal strides")
        if cos.shape != (q.shape[0], q.shape[2]) or sin.shape != cos.shape or q.shape[2] != k.shape[2]:
            raise UnsupportedShape(f"cos {tuple(cos.shape)} must be [num_tokens, head_dim] of q {tuple(q.shape)}")
        write.q, write.cos, write.sin = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
        write.q_token, write.q_head, write.cos_token = q.stride(0), q.stride(1), cos.stride(0)
        write.num_heads = q.shape[1]
        self.native.kv_write(ctypes.addressof(write), torch.get_num_threads())

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Root-mean-square norm of x [rows, size], or of x + residual, which is then left in `residual`."""
        out = torch.empty_like(x)
        _check_rows("x", x, weight.dtype)
        if weight.shape != (x.shape[1],) or not weight.is_contiguous():
            raise UnsupportedShape(f"weight {tuple(weight.shape)} must be contiguous [{x.shape[1]}]")
        norm = binding.RmsNorm(
            x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.stride(0), 0, out.stride(0),
            x.shape[0], x.shape[1], DTYPES[x.dtype], eps,
        )  # fmt: skip
        if residual is not None:
            _check_rows("residual", residual, x.dtype)
            if residual.shape != x.shape:
                raise UnsupportedShape(f"residual {tuple(residual.shape)} must have the shape of x {tuple(x.shape)}")
            norm.residual, norm.residual_row = residual.data_ptr(), residual.stride(0)
        self.native.rms_norm(ctypes.addressof(norm), torch.get_num_threads())
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for x [rows, 2 * size] = gate and up side by side; gives [rows, size]."""
        _check_rows("x", x, x.dtype)
        size = x.shape[1] // 2
        if size * 2 != x.shape[1] or size % 8:
            raise UnsupportedShape(f"x has {x.shape[1]} columns: two halves of a multiple of 8 are needed")
        out = x.new_empty(x.shape[0], size)
        gate = binding.SiluMul(
            x.data_ptr(), out.data_ptr(), x.stride(0), out.stride(0), x.shape[0], size, DTYPES[x.dtype]
        )
        self.native.silu_mul(ctypes.addressof(gate), torch.get_num_threads())
        return out

    def multiplies_bf16(self, weight: torch.Tensor) -> bool:
        """Whether `linear_f32` takes this weight [n, depth] natively, without a float32 copy of it."""
        return (
            self.isa == "amx"
            and weight.dtype == torch.bfloat16
            and weight.stride(1) == 1
            and weight.shape[0] % 16 == 0
            and weight.shape[1] % 2 == 0
        )

    def linear_f32(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """float32 x @ weight^T of bf16 x [rows, depth] and weight [n, depth], never rounded to bf16 on the way.

        Where the CPU has no tiles: torch, in float32, with a copy of the weight at every call; see `panels.py`.
        """
        if self.multiplies_bf16(weight) and x.dtype == weight.dtype and x.stride(1) == 1 and x.shape[0] > 0:
            out = torch.empty(x.shape[0], weight.shape[0])
            call = binding.Linear(
                x.data_ptr(), weight.data_ptr(), out.data_ptr(), None, x.stride(0), weight.stride(0), out.stride(0),
                x.shape[0], weight.shape[0], x.shape[1],
            )  # fmt: skip
            if self.native.linear(ctypes.addressof(call), torch.get_num_threads()) == 0:
                return out
        return torch.nn.functional.linear(x.float(), weight.float())


class Batch:
    """One step's ragged batch, prepared once for all layers.

    Args:
        block_tables: int32 [num_seqs, max_blocks]; entries past a sequence's last key are never read.
        seq_lens: int32 [num_seqs], keys visible to each sequence's last query row.
        cu_seqlens: int32 [num_seqs + 1] over query rows.

    The three tensors must stay as they are while the batch is in use.
    """

    def __init__(
        self, native: binding.Native, block_tables: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens: torch.Tensor
    ) -> None:
        for name, tensor in (("block_tables", block_tables), ("seq_lens", seq_lens), ("cu_seqlens", cu_seqlens)):
            if tensor.dtype != torch.int32 or tensor.device.type != "cpu":
                raise UnsupportedShape(f"{name} must be int32 on the CPU, not {tensor.dtype} on {tensor.device}")
        if block_tables.shape[0] != seq_lens.shape[0] or cu_seqlens.shape[0] != seq_lens.shape[0] + 1:
            raise UnsupportedShape(
                f"block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)} and "
                f"cu_seqlens {tuple(cu_seqlens.shape)} do not describe one batch"
            )
        self._native = native
        self._attend = native.attend
        self._tensors = (block_tables.contiguous(), seq_lens.contiguous(), cu_seqlens.contiguous())
        self._threads = torch.get_num_threads()
        self._layers: dict[tuple[object, ...], tuple[int, int, binding.Attention]] = {}
        self._plans: dict[tuple[int, int, int, int], int] = {}

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """One layer's attention into `out`; see `paged_attention`."""
        plan, call = self.prepare(q, k_cache, v_cache, out, scale=scale, window=window, softcap=softcap, sinks=sinks)
        self._attend(plan, call, q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), self._threads)

    def prepare(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Addresses of the work list and of the call's description, good for all layers of these shapes and strides."""
        key = (
            q.stride(), out.stride(), k_cache.stride(), v_cache.stride(), q.shape, k_cache.shape, q.dtype,
            scale, window, softcap, None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        prepared = self._layers.get(key)
        if prepared is None:
            prepared = self._layers[key] = self._prepare(q, k_cache, v_cache, out, scale, window, softcap, sinks)
        return prepared[0], prepared[1]

    def _prepare(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> tuple[int, int, binding.Attention]:
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
        if not supports(head_dim, q.dtype):
            raise UnsupportedShape(
                f"head_dim {head_dim} in {q.dtype}: needed is a multiple of 8 up to {MAX_HEAD_DIM}, float32 or bfloat16"
            )
        if not (q.dtype == k_cache.dtype == v_cache.dtype == out.dtype):
            raise UnsupportedShape(f"q {q.dtype}, cache {k_cache.dtype}, {v_cache.dtype} and out {out.dtype} differ")
        if num_heads % num_kv_heads:
            raise UnsupportedShape(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if out.shape != q.shape or k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim:
            raise UnsupportedShape(
                f"shapes do not agree: q {tuple(q.shape)}, out {tuple(out.shape)}, k_cache {tuple(k_cache.shape)}, "
                f"v_cache {tuple(v_cache.shape)}"
            )
        if k_cache.stride() != v_cache.stride() or {q.stride(2), out.stride(2), k_cache.stride(3)} != {1}:
            raise UnsupportedShape("q, out and the caches must be contiguous over head_dim, caches of equal strides")
        if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (num_heads,)):
            raise UnsupportedShape(f"sinks must be float32 [{num_heads}], not {sinks.dtype} {tuple(sinks.shape)}")
        tables, seq_lens, cu_seqlens = self._tensors
        layer = binding.Attention(
            sinks=None if sinks is None else sinks.data_ptr(),
            block_tables=tables.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            cu_seqlens=cu_seqlens.data_ptr(),
            q_token=q.stride(0),
            q_head=q.stride(1),
            out_token=out.stride(0),
            out_head=out.stride(1),
            kv_block=k_cache.stride(0),
            kv_head=k_cache.stride(1),
            kv_token=k_cache.stride(2),
            num_seqs=seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            max_blocks=tables.shape[1],
            window=window,
            dtype=DTYPES[q.dtype],
            scale=scale,
            softcap=softcap,
        )
        address = ctypes.addressof(layer)
        what = (num_heads, num_kv_heads, head_dim, window)
        if what not in self._plans:
            plan = self._native.plan(address, self._threads)
            if plan is None:
                raise MemoryError(f"no memory for the attention plan of {seq_lens.shape[0]} sequences")
            self._plans[what] = plan
        return self._plans[what], address, layer

    def __del__(self) -> None:
        for plan in getattr(self, "_plans", {}).values():
            self._native.plan_free(plan)


def _kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> binding.KvWrite:
    if not (k.dtype == v.dtype == k_cache.dtype == v_cache.dtype) or k.dtype not in DTYPES:
        raise UnsupportedShape(f"k {k.dtype}, v {v.dtype} and the caches must be of one dtype, float32 or bfloat16")
    if k.shape != v.shape or k.shape[1:] != (k_cache.shape[1], k_cache.shape[3]) or k_cache.shape != v_cache.shape:
        raise UnsupportedShape(f"k {tuple(k.shape)}, v {tuple(v.shape)}, cache {tuple(k_cache.shape)} do not agree")
    if {k.stride(2), v.stride(2), k_cache.stride(3)} != {1} or k_cache.stride() != v_cache.stride():
        raise UnsupportedShape("k, v and the caches must be contiguous over head_dim, the caches of equal strides")
    if slots.dtype != torch.int64 or slots.shape != (k.shape[0],) or not slots.is_contiguous():
        raise UnsupportedShape(f"slots must be contiguous int64 [{k.shape[0]}], not {slots.dtype} {tuple(slots.shape)}")
    return binding.KvWrite(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        slots=slots.data_ptr(),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        kv_block=k_cache.stride(0),
        kv_head=k_cache.stride(1),
        kv_token=k_cache.stride(2),
        num_tokens=k.shape[0],
        num_kv_heads=k.shape[1],
        head_dim=k.shape[2],
        block_size=k_cache.shape[2],
        dtype=DTYPES[k.dtype],
    )


def _check_rows(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype != dtype or x.dtype not in DTYPES or x.shape[1] % 8:
        raise UnsupportedShape(
            f"{name} must be rows of a multiple of 8 contiguous float32 or bfloat16, not {x.dtype} {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
