"""What the engine does with the Triton kernels beside attention: sampling, float8 K/V, graphs, warm-up, copies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cb_kernels.kv_copy.launch import copy_blocks
from cb_kernels.kv_copy.reference import reference_write_kv
from cb_kernels.paged_attention.reference import reference_attention
from transformers import AutoModelForCausalLM

from cb_backend import Engine, EngineConfig, SamplingParams
from cb_backend.attention.triton import TritonAttention
from cb_backend.engine import build as assembly
from cb_backend.execution import startup
from cb_backend.execution.executor import Executor
from cb_backend.kv.storage import KVGeometry, KVStorage
from cb_backend.kv.swap import Swap
from tests.replaying import PlayedMemory, Replaying
from tests.tiny_models import ARCHITECTURES, build_model, build_tokenizer

from .watching import Watch

PROMPTS = [[5, 6] * 7, [7] * 14, [8, 9] * 10, [30, 31, 32]]
PARAMS = [
    SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=3, seed=1, top_k=30, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(max_tokens=4, seed=2, logit_bias={9: 3.0}, min_p=0.02, prompt_logprobs=1),
    SamplingParams(max_tokens=4, seed=3, n=2, min_tokens=3, bad_words=("a",), response_format={"type": "json_object"}),
]


@pytest.fixture(autouse=True, scope="module")
def short_calibration() -> Iterator[None]:
    """The interpreter needs milliseconds for each tile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "_CALIBRATION_TOKENS", 32)
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single layer, for the same reason."""
    path = tmp_path_factory.mktemp("llama")
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path


def run(path: Path, count: int = 4, **fields: object) -> tuple[list[object], dict[str, float]]:
    config = {
        "model": str(path),
        "dtype": "float32",
        "attention_backend": "triton",
        "block_size": 16,
        "num_kv_blocks": 12,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 5,
    }
    with Engine(EngineConfig(**config | fields)) as engine:
        outputs = engine.generate(PROMPTS[:count], PARAMS[:count])
        return [told(output) for output in outputs], engine.stats()


def told(output: object) -> tuple[object, ...]:
    logprobs = [(p.token_id, [i for i, _ in p.top]) for p in output.logprobs or ()]
    prompt = [p and p.token_id for p in output.prompt_logprobs or ()]
    return output.text, logprobs, prompt, [choice.token_ids for choice in output.choices]


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[object]:
    """By the reference attention and the CPU sampler."""
    return run(llama, attention_backend="reference", overlap=False)[0]


@pytest.fixture(scope="module")
def narrow(llama: Path) -> list[object]:
    """With a float8 cache, by the kernels."""
    return run(llama, kv_cache_dtype="fp8_e4m3")[0]


def test_the_kernels_sampler_gives_what_the_cpus_gives(llama: Path, plain: list[object]) -> None:
    assert run(llama, overlap=False)[0] == plain


def test_shortage_changes_nothing_while_steps_overlap(llama: Path, plain: list[object]) -> None:
    outputs, stats = run(llama, overlap=True, num_kv_blocks=5, admission={"policy": "prompt"})
    assert outputs == plain
    assert stats["preemptions_swap"] + stats["preemptions_recompute"] > 0


def test_launching_a_step_waits_for_no_tensor(
    llama: Path, plain: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled ids go to the next step on the device: nothing between two launches needs to know them.

    The last request stays out: its grammar's mask is a tensor of the host, which the watch cannot tell from others.
    """
    watch = Watch(monkeypatch)
    launch = Executor.launch

    def watched(self: Executor, plan: object) -> object:
        with watch.watching():
            return launch(self, plan)

    monkeypatch.setattr(Executor, "launch", watched)
    assert run(llama, 3, overlap=True)[0] == plain[:3]
    launched = {name for name, *_ in watch.seen}
    assert {"paged_attention_kernel", "write_kv_kernel", "sample_kernel", "adjust_logits_kernel"} <= launched


class Checking(Replaying):
    """Compares what each replay launches with what the capture launched."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def record(self, run: object) -> tuple[object, torch.Tensor]:
        traces: list[list[object]] = []

        def watched() -> torch.Tensor:
            self.watch.seen = []
            with self.watch.watching():
                hidden = run()
            traces.append(self.watch.seen)
            assert traces[-1] == traces[0], "a replay launches something else than the capture did"
            assert any(name == "paged_attention_kernel" for name, *_ in traces[0])
            return hidden

        return super().record(watched)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_every_replay_launches_the_same_at_the_same_addresses(
    llama: Path, plain: list[object], narrow: list[object], monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str
) -> None:
    eager = plain if kv_cache_dtype == "auto" else narrow
    recorder = Checking(Watch(monkeypatch))
    monkeypatch.setattr(assembly, "prepare", functools.partial(assembly.prepare, recorder=lambda: recorder))
    assert run(llama, cuda_graphs=True, overlap=True, kv_cache_dtype=kv_cache_dtype)[0] == eager
    assert recorder.recorded == 4  # 1, 2, 4 and 5 sequences
    assert recorder.replays >= 2


def test_a_gpus_pool_is_what_a_played_card_has_left(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs included; the step that is measured samples as many rows as may sample."""
    block = 16 * 2 * 2 * 16 * 4  # tokens, K and V, heads, head dim, float32
    card = PlayedMemory(total=60 * block, used=30 * block, step=8 * block)
    prepare = functools.partial(assembly.prepare, device_memory=card, recorder=Replaying)
    monkeypatch.setattr(assembly, "prepare", prepare)
    _, stats = run(llama, num_kv_blocks=None, gpu_memory_utilization=0.5, cuda_graphs=True)
    assert stats["kv_blocks"] == 11 - 1
    assert card.log == ["peak", "free", "free", "free", "free"]


def test_a_float8_cache_is_read_and_written_as_the_references_do(
    llama: Path, plain: list[object], narrow: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self, k, v, batch, layer):
        reference_write_kv(k, v, *batch.storage.layers[layer], batch.slots, **self._scales_of(layer))

    def attend(self, q, batch, call):
        assert batch.storage.layers[call.layer][0].dtype == torch.float8_e4m3fn or self._scales is None
        shape = batch.block_tables, batch.seq_lens, batch.cu_seqlens
        scales = self._scales_of(call.layer)
        return reference_attention(q, *batch.storage.layers[call.layer], *shape, scale=call.scale, **scales)

    monkeypatch.setattr(TritonAttention, "write", write)
    monkeypatch.setattr(TritonAttention, "attend", attend)
    assert run(llama, kv_cache_dtype="fp8_e4m3")[0] == narrow
    assert narrow != plain, "float8 rounds, so a random model's outputs differ somewhere"


def test_a_float8_cache_has_measured_scales_and_a_quarter_of_the_bytes(llama: Path) -> None:
    fields = {"model": str(llama), "dtype": "float32", "attention_backend": "triton", "num_kv_blocks": 4}
    with Engine(**fields, kv_cache_dtype="fp8_e4m3") as engine, Engine(**fields) as wide:
        scales = engine.core.executor.backend._scales
        assert scales.k.shape == scales.v.shape == (1, 2)
        assert len(set(scales.k.flatten().tolist() + scales.v.flatten().tolist())) == 4
        assert 4 * engine.stats()["bytes_per_block"] == wide.stats()["bytes_per_block"]
        prompt = SamplingParams(max_tokens=0, prompt_logprobs=0)
        narrow, exact = (e.generate([[5, 6, 7, 8] * 3], prompt)[0].prompt_logprobs[1:] for e in (engine, wide))
    # Relative rounding of 2^-4 in K and V moves log-probabilities of this model, whose logits span tens, by little.
    errors = [abs(a.logprob - b.logprob) for a, b in zip(narrow, exact, strict=True)]
    assert 0 < max(errors) < 1.0


@pytest.mark.parametrize("architecture, kinds", [("llama", 1), ("gemma2", 2)])
def test_every_kernel_is_compiled_before_the_first_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, architecture: str, kinds: int
) -> None:
    path = build_model(architecture, tmp_path / architecture)
    caplog.set_level(logging.INFO, logger="cb_backend")
    with Engine(model=str(path), dtype="float32", attention_backend="triton", num_kv_blocks=4):
        pass
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("compiled ")]
    pieces = ["decode, split keys", "decode, whole keys", "prefill"]
    each = [f"attention: {piece}" for piece in pieces]
    if kinds > 1:
        each = [f"attention: {p} (kind of layer {k} of {kinds})" for k in range(1, kinds + 1) for p in pieces]
    due = ["writing K/V", *each, "sampling"]
    assert [line.removeprefix("compiled ").rsplit(" (", 1)[0] for line in said] == due


@pytest.fixture
def pool() -> Iterator[KVStorage]:
    geometry = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=16, num_heads=1)
    storage = KVStorage(geometry, 6, 8, 4, torch.float32, torch.device("cpu"), copy_blocks)
    storage.device.copy_(torch.randn(storage.device.shape))
    yield storage


def test_small_blocks_are_gathered_and_scattered_by_the_kernel(
    pool: KVStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    before = pool.device.clone()
    with watch.watching():
        pool.swap.out([(5, 0), (2, 3)])
    pool.device[2].zero_()
    pool.device[5].zero_()
    with watch.watching():
        pool.swap.into([(3, 2), (0, 5)])
    assert torch.equal(pool.device, before)
    assert [name for name, *_ in watch.seen if name == "copy_blocks_kernel"] == ["copy_blocks_kernel"] * 2


def test_large_blocks_are_copied_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the kernel is for small blocks")

    device, host = torch.randn(3, 2**14), torch.zeros(2, 2**14)
    Swap(device, host, None, refuse).out([(1, 0), (2, 1)])
    assert torch.equal(host, device[1:])
