"""Where a model is: turns what the operator wrote into a directory of Hugging Face files.

A reference is looked up as a directory, then as a name in the registered store (BentoML's, where bentoml is installed),
then as a Hugging Face id. The directory that comes out has a config.json and safetensors; pickles beside them are
never opened. This module knows nothing of how a model is built; it imports neither torch nor bentoml.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..errors import ModelError, first_line

# What a model directory may hold for us. Everything else (pickles, code, other frameworks' weights) stays where it is.
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER_PATTERNS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
TEXT_PATTERNS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
MODEL_PATTERNS = WEIGHT_PATTERNS + TOKENIZER_PATTERNS + TEXT_PATTERNS

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+/?$")


class StoredModel(Protocol):
    """An entry of a store: its name without a version, and its directory."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...


class ModelStore(Protocol):
    """Models by name. `cb_backend/bento/store.py` is one."""

    def find(self, tag: str, /) -> StoredModel | None:
        """The entry of a tag, or None."""

    def store_path(self) -> Path:
        """Where it keeps them, for messages."""


# Set by the package's top level, which knows both sides: this room stands below the one that knows BentoML.
_open_bentoml_store: Callable[[], ModelStore] | None = None


def register_bentoml_store(open_store: Callable[[], ModelStore]) -> None:
    """`open_store` is called for a name if bentoml is installed, and may import what is slow to import."""
    global _open_bentoml_store
    _open_bentoml_store = open_store


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model found on this machine.

    `name` is the id that clients use if the operator sets none: the hub id, the tag without its version, or the
    directory's name. `tokenizer_path` is None if neither the model nor the operator brings a tokenizer.
    """

    path: Path
    tokenizer_path: Path | None
    name: str
    kind: Literal["directory", "bentoml", "hub"]


def resolve_model(reference: str, tokenizer: str | None = None) -> ModelSource:
    """Finds `reference` (directory, BentoML tag or Hugging Face id; downloads the latter) and its tokenizer.

    Raises:
        ModelError: nothing is there, or what is there has no config.json or no safetensors.
    """
    path, name, kind = _locate(reference, MODEL_PATTERNS, what="model")
    _check_files(path)
    if tokenizer is not None:
        tokenizer_path, _, _ = _locate(tokenizer, TOKENIZER_PATTERNS, what="tokenizer")
        if not has_tokenizer(tokenizer_path):
            raise ModelError(f"tokenizer '{tokenizer}' at {tokenizer_path} has none of: {', '.join(_TOKENIZER_FILES)}")
        return ModelSource(path, tokenizer_path, name, kind)
    return ModelSource(path, path if has_tokenizer(path) else None, name, kind)


def has_tokenizer(path: Path) -> bool:
    return any((path / file).is_file() for file in _TOKENIZER_FILES)


def check_model_files(path: Path) -> None:
    """Raises ModelError unless `path` is a directory with a config.json and safetensors."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory")
    _check_files(path)


def _check_files(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ModelError(f"no config.json in {path}: it is not a Hugging Face model directory")
    if any(path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"the weights in {path} exist only as pickles ({', '.join(pickles[:3])}), which can run code when opened "
            "and are never read: save the model again with save_pretrained, which writes safetensors"
        )
    raise ModelError(f"no *.safetensors in {path}")


def _locate(
    reference: str, patterns: tuple[str, ...], what: str
) -> tuple[Path, str, Literal["directory", "bentoml", "hub"]]:
    directory = Path(reference).expanduser()
    if directory.is_dir():
        return directory, _directory_name(directory.resolve()), "directory"
    looked = [f"directory {directory.absolute()}"]
    if reference.startswith((".", "/", "~")):
        raise ModelError(f"no {what} '{reference}': there is no {looked[0]}")

    if "/" not in reference:  # names in the BentoML store have none
        if importlib.util.find_spec("bentoml") is None:
            looked.append("BentoML model store (bentoml is not installed: pip install 'cb-backend[bento]')")
        elif _open_bentoml_store is not None:
            store = _open_bentoml_store()
            entry = store.find(reference)
            if entry is not None:
                return entry.path, entry.name, "bentoml"
            looked.append(f"BentoML model store {store.store_path()}")

    if _HUB_ID.fullmatch(reference):
        try:
            return _download(reference, patterns), reference, "hub"
        except Exception as error:  # the hub client raises a dozen unrelated types
            looked.append(f"Hugging Face hub and its local cache ({first_line(error)})")
    raise ModelError(f"no {what} '{reference}'; looked in: {'; '.join(looked)}")


def _download(repo_id: str, patterns: tuple[str, ...]) -> Path:
    """The snapshot of a hub repository, from the local cache where it is complete. Honours HF_HUB_OFFLINE."""
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))


def _directory_name(directory: Path) -> str:
    # An entry of the BentoML store or of the hub's cache is a directory named after a version; clients want the model.
    snapshot = _HUB_SNAPSHOT.search(directory.as_posix())
    if snapshot:
        return f"{snapshot['owner']}/{snapshot['name']}"
    if (directory / "model.yaml").is_file():
        match = re.search(r"^name:\s*['\"]?([^\s'\"]+)", (directory / "model.yaml").read_text(encoding="utf-8"), re.M)
        if match:
            return match[1]
    return directory.name
