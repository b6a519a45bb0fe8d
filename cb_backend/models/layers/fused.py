"""Rewrites understood decoder layers for the native CPU kernels: fewer passes over memory, weights packed once.

Where the native decoder knows all that the layers do, they become one call per step (whole.py); else each layer gets
fused parts (single.py). What a layer does is read off its modules (features.py), and each replacement is compared with
the layer's own forward on a few tokens before the layer's weights are dropped, one layer after the other: a layer that
is not understood, or gives something else, keeps its own modules. A fused model cannot be saved. The arithmetic and its
roundings are those of transformers; only sums inside matrix products may be ordered differently.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from cb_kernels.cpu import UnsupportedShape
from cb_kernels.cpu.decoder import Decoder
from torch import nn

from ...attention.batch import RaggedBatch
from ...attention.cpu import NativeAttention
from ...attention.hook import AttentionCall
from ..support import kv_geometry
from . import whole
from .features import LayerFeatures, NotFused, read_features
from .observed import Observed, difference, observe, probe_batch
from .products import drop_weights
from .single import FusedLayer

if TYPE_CHECKING:
    from cb_kernels.cpu import Library
    from transformers import PreTrainedModel

_log = logging.getLogger("cb_backend")


@dataclass(slots=True)
class FusionReport:
    """How many layers run how, and why the others do not."""

    total: int = 0
    whole: int = 0  # in the one native call
    single: int = 0  # one by one, of fused parts
    not_whole: str | None = None
    not_fused: Counter[str] = field(default_factory=Counter)  # reason -> layers

    @property
    def fused(self) -> int:
        return self.whole + self.single

    def __str__(self) -> str:
        parts: list[str] = []
        if self.whole:
            parts.append(f"{self.whole} as one call")
        if self.single:
            parts.append(f"{self.single} one by one" + (f" ({self.not_whole})" if self.not_whole else ""))
        parts += [f"{count} not fused: {reason}" for reason, count in self.not_fused.items()]
        return f"{self.total} decoder layers: " + "; ".join(parts)


def fuse_model(model: PreTrainedModel, library: Library) -> FusionReport:
    """Rewrites the model's understood layers in place. Afterwards the model runs with the backend `cpu` only."""
    report = FusionReport()
    body: Any = model.base_model
    layers = getattr(body, "layers", None)
    text: Any = model.config.get_text_config(decoder=True)
    report.total = len(layers) if isinstance(layers, nn.ModuleList) else text.num_hidden_layers
    if not isinstance(layers, nn.ModuleList) or report.total != text.num_hidden_layers:
        report.not_fused[f"{type(model).__name__} holds its layers in another way"] = report.total
    else:
        _fuse(model, body, list(layers), library, report)
    _log.info("%s for the native CPU kernels (%s)", report, library.isa)
    return report


@dataclass(frozen=True, slots=True)
class _Understood:
    """A layer that may be replaced."""

    index: int  # in the list of layers
    features: LayerFeatures
    call: AttentionCall
    seen: Observed
    rotary: tuple[torch.Tensor, torch.Tensor]

    @property
    def rotated(self) -> int:
        return self.rotary[0].shape[-1] if self.features.uses_rope else self.features.head_dim


@torch.inference_mode()
def _fuse(model: PreTrainedModel, body: Any, layers: list[nn.Module], library: Library, report: FusionReport) -> None:
    read: dict[int, LayerFeatures] = {}
    for index, layer in enumerate(layers):
        try:
            read[index] = read_features(layer)
        except NotFused as reason:
            report.not_fused[f"{type(layer).__name__}: {reason}"] += 1
    if not read:
        return
    text: Any = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or 1
    batch = probe_batch(kv_geometry(model, type(model).__name__), model.dtype, text.vocab_size, longest)
    backend = NativeAttention(library)
    observed = observe(body, layers, batch, backend)
    understood: list[_Understood] = []
    for index, features in read.items():
        try:
            understood.append(_understand(index, features, observed[index]))
        except NotFused as reason:
            report.not_fused[f"{features.kind}: {reason}"] += 1
    done = 0
    if len(understood) == len(layers):
        done = _as_one_call(body, understood, library, batch, report)
    for item in understood[done:]:
        _one_by_one(layers[item.index], item, library, batch, backend, report)


def _understand(index: int, features: LayerFeatures, seen: Observed) -> _Understood:
    if seen.output is None or seen.output.shape != seen.hidden.shape or seen.rotary is None:
        raise NotFused("it takes or gives other tensors than hidden states and rotary factors")
    if len(seen.calls) != 1 or seen.calls[0].layer != features.layer_idx:
        raise NotFused(f"it calls attention {len(seen.calls)} times")
    cos, sin = seen.rotary
    if cos.shape != sin.shape or cos.dim() != 3 or not 0 < cos.shape[-1] <= features.head_dim or cos.shape[-1] % 4:
        raise NotFused(f"its rotary factors are {tuple(cos.shape)}")
    return _Understood(index, features, seen.calls[0], seen, (cos, sin))


def _as_one_call(
    body: Any, items: list[_Understood], library: Library, batch: RaggedBatch, report: FusionReport
) -> int:
    """Puts layers from the first on into one native call, as far as each gives what it gave itself; how many."""
    dtype = items[0].seen.hidden.dtype
    calls = [item.call for item in items]
    report.not_whole = whole.obstacle([item.features for item in items], calls, library, dtype)
    first = items[0].rotary
    if report.not_whole is None and any(not torch.equal(item.rotary[0], first[0]) for item in items):
        report.not_whole = "layers with rotary embeddings of their own"
    if report.not_whole is not None:
        return 0
    decoder = Decoder(library, whole.shape_of(items[0].features), (), dtype)
    for index, item in enumerate(items):
        got = item.seen.hidden.clone()
        try:
            decoder.append(whole.layer_weights(item.features, item.call, item.rotated))
            whole.run_decoder(decoder, got, item.rotary, batch, only=index)
            wrong = difference(got, item.seen)
        except (NotFused, UnsupportedShape) as error:
            report.not_whole, wrong = str(error), float("inf")
        if wrong > 1:
            report.not_whole = report.not_whole or "its result differs there"
            _log.warning("%s %d differs as part of one native call (%.3g)", item.features.kind, index, wrong)
            if len(decoder) > index:
                decoder.pop()
            break
        drop_weights(item.features.linears)
    done = len(decoder)
    if done:
        rest = [] if done == len(items) else [*(whole.Done() for _ in range(done - 1)), *list(body.layers)[done:]]
        body.layers = nn.ModuleList([whole.WholeDecoder(decoder), *rest])
        report.whole = done
    return done


def _one_by_one(
    layer: Any,
    item: _Understood,
    library: Library,
    batch: RaggedBatch,
    backend: NativeAttention,
    report: FusionReport,
) -> None:
    """Replaces one layer's forward, if that gives what the layer gave itself."""
    batch.scratch.clear()
    got = item.seen.hidden.clone()
    try:
        fused = FusedLayer(item.features, item.call, item.rotated, library)
        fused(got, position_embeddings=item.rotary, cb_batch=batch, cb_backend=backend)
    except (NotFused, UnsupportedShape) as error:
        report.not_fused[f"{item.features.kind}: {error}"] += 1
        return
    wrong = difference(got, item.seen)
    if wrong > 1:
        _log.warning(
            "%s %d keeps its own modules: fused, its result is %.3g times as far from its own as roundings explain",
            item.features.kind, item.index, wrong,
        )  # fmt: skip
        report.not_fused[f"{item.features.kind}: its forward does something that its modules do not say"] += 1
        return
    drop_weights(item.features.linears)
    layer.forward = fused
    report.single += 1
