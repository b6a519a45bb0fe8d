"""Three families of tokenizers trained here: byte-level BPE, metaspace BPE with byte fallback, unigram."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import normalizers as norm
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Hello! I am here to help. The quick brown fox jumps over the lazy dog.",
    "Paris is the capital of France, and Köln lies on the Rhine.",
    "naïve café, 東京 is big, e\u0301 combining; 🙂 smile 👩‍👩‍👧 family 🦙🔥",
    "def main():\n    return 42\n",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
FAMILIES = ("byte_level", "metaspace", "unigram")


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    made = {"byte_level": _byte_level, "metaspace": _metaspace, "unigram": _unigram}[family]()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """Like Llama 2: spaces as U+2581, unknown characters as byte tokens, the first space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=tokens, limit_alphabet=60, show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    rebuilt = Tokenizer.from_str(tokenizer.to_str())
    rebuilt.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _without_special_bytes(rebuilt)


def _without_special_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The byte tokens are ordinary ones: only the four real special tokens may be skipped."""
    import json

    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] in SPECIAL]
    return Tokenizer.from_str(json.dumps(state))


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=220, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
