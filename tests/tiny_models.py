"""Small random-weight models of several architectures, with a tokenizer trained here: no network, a second each.

Every directory looks like one that `save_pretrained` wrote. Weights are seeded and larger than usual at initialization,
so that greedy continuations vary instead of repeating one token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

VOCAB_SIZE = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = (
    "A request joins the batch between two forward passes and leaves it as soon as it ends.",
    "The cache of keys and values lies in blocks, and a table says which blocks a sequence owns.",
    "Grüße aus Köln, 東京 und São Paulo: 🙂 naïve café, 12 345.67 €.",
    "def forward(self, tokens):\n    return self.head(self.layers(tokens))\n",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_layer=3,
        n_embd=64,
        n_head=4,
        n_positions=1024,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,
    ),
    "qwen3": lambda: Qwen3Config(**{**_COMMON, "head_dim": 32}),
    "gemma2": lambda: Gemma2Config(
        **{**_COMMON, "sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}
    ),
    "gemma3": lambda: Gemma3TextConfig(**{**_COMMON, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "mistral": lambda: MistralConfig(**{**_COMMON, "sliding_window": 24}),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a chat template and ChatML's special tokens; every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def build_model(architecture: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model of `ARCHITECTURES` with its tokenizer to `directory`, and returns that."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).to(dtype)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory
