"""One decoder layer of fused parts: q/k/v and gate/up as one product each, norms with the residual sum, rotary with the
K/V write, the gated activation. What has no native kernel (a norm, an activation) stays the module's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...attention.batch import RaggedBatch
from ...attention.hook import AttentionBackend, AttentionCall
from .features import LayerFeatures, NotFused, RMSNorm
from .products import computes_in, merged_linear, product, stacked
from .rotary import reorder_heads, reordering, widen

if TYPE_CHECKING:
    from cb_kernels.cpu import Library


class FusedLayer:
    """Stands in for a decoder layer's `forward`. Reads the weights and leaves them in place.

    Args:
        call: what the layer's own forward asks of attention.
        rotated: how many numbers of a head are rotated.
    """

    def __init__(self, features: LayerFeatures, call: AttentionCall, rotated: int, library: Library) -> None:
        self.library = library
        self.features = features
        self.call = call
        self.qkv = product(*qkv_weights(features, rotated), library, computes_in(features.down))
        self.head_norms = head_norms(features, rotated)
        self.out = merged_linear([features.out], library)
        self.gate_up = merged_linear(features.gate_up, library)
        self.down = merged_linear([features.down], library)
        self.native_gate = features.is_silu and features.intermediate_size % 8 == 0

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cb_batch: RaggedBatch,
        cb_backend: AttentionBackend,
        **ignored: Any,
    ) -> torch.Tensor:
        """hidden_states [1, T, hidden_size], which it overwrites with its result."""
        f, library = self.features, self.library
        hidden = hidden_states[0]
        qkv = self.qkv(hidden if f.before_attention is None else self._norm(f.before_attention, hidden))
        heads = qkv.view(-1, f.num_heads + 2 * f.num_kv_heads, f.head_dim)
        q, k, v = heads.split([f.num_heads, f.num_kv_heads, f.num_kv_heads], dim=1)
        if self.head_norms is not None:
            width = -1 if f.norms_whole_heads else f.head_dim
            q, k = (
                self._norm(norm, x.reshape(x.shape[0] if width < 0 else -1, *((-1,) if width < 0 else (width,)))).view(
                    x.shape
                )
                for x, norm in zip((q, k), self.head_norms, strict=True)
            )
        if f.uses_rope:
            cos, sin = self._rotary(position_embeddings, cb_batch)
            k_cache, v_cache = cb_batch.storage.layers[self.call.layer]
            library.rotary_write_kv(q, k, v, cos, sin, k_cache, v_cache, cb_batch.slots)
        else:
            cb_backend.write(k, v, cb_batch, self.call.layer)
        attended = cb_backend.attend(q, cb_batch, self.call)
        normed = self._add(self.out(attended.view(attended.shape[0], -1)), f.after_attention, hidden, f.before_mlp)
        gated = self.gate_up(normed)
        if self.native_gate:
            gated = library.silu_and_mul(gated)
        else:
            gate, up = gated.chunk(2, -1)
            gated = f.activation(gate) * up
        self._add(self.down(gated), f.after_mlp, hidden, None)
        return hidden_states

    def _add(
        self, part: torch.Tensor, after: RMSNorm | None, hidden: torch.Tensor, following: RMSNorm | None
    ) -> torch.Tensor:
        """Adds a part's result to `hidden` in place; gives what the `following` norm makes of the sum."""
        if after is not None:
            part = self._norm(after, part)
        if self.features.residual_multiplier != 1.0:
            part = part * self.features.residual_multiplier
        if following is not None and following.native is not None:
            return self.library.rms_norm(part, *following.native, residual=hidden)  # hidden += part
        hidden += part
        return hidden if following is None else self._norm(following, hidden)

    def _norm(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return norm.module(x) if norm.native is None else self.library.rms_norm(x, *norm.native)

    def _rotary(
        self, factors: tuple[torch.Tensor, torch.Tensor], batch: RaggedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = factors[0][0], factors[1][0]
        if cos.shape[1] == self.features.head_dim:
            return cos, sin
        key = ("rotary", cos.data_ptr())
        if key not in batch.scratch:
            batch.scratch[key] = widen(cos, sin, self.features.head_dim)
        return batch.scratch[key]  # type: ignore[no-any-return]


def qkv_weights(f: LayerFeatures, rotated: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of q, k and v side by side, heads ordered for the native rotary."""
    weight, bias = stacked(f.qkv)
    order = reordering(rotated, f.head_dim)
    if order is None:
        return weight, bias
    sizes = [(f.num_heads + f.num_kv_heads) * f.head_dim, f.num_kv_heads * f.head_dim]

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        qk, v = rows.split(sizes)
        return torch.cat([reorder_heads(qk, order, f.num_heads + f.num_kv_heads), v])

    return reorder(weight), None if bias is None else reorder(bias)


def head_norms(f: LayerFeatures, rotated: int) -> tuple[RMSNorm, RMSNorm] | None:
    """The norms of q and k for heads ordered for the native rotary.

    Raises:
        NotFused: they would have to be reordered and are not native.
    """
    order = reordering(rotated, f.head_dim)
    if f.head_norms is None or order is None:
        return f.head_norms
    moved: list[RMSNorm] = []
    for norm, heads in zip(f.head_norms, (f.num_heads, f.num_kv_heads), strict=True):
        if norm.native is None:
            raise NotFused("its norms of q and k are not native and its rotary embedding is partial")
        weight, epsilon = norm.native
        weight = reorder_heads(weight, order, heads if f.norms_whole_heads else 1)
        moved.append(RMSNorm(norm.module, (weight, epsilon)))
    return moved[0], moved[1]
