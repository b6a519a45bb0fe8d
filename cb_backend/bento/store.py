"""The BentoML model store: find, list and add models. `python -m cb_backend.bento.models` is its command line.

An entry is a plain Hugging Face directory beside BentoML's model.yaml, as BentoML has always written them, so old
entries and ours look alike. Entries appear in the store by one rename: an interrupted import leaves nothing behind.
Pickles are neither opened nor copied.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelError
from ..models.source import MODEL_PATTERNS, check_model_files


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One model in the store; `path` is its directory."""

    name: str
    version: str
    path: Path

    @property
    def tag(self) -> str:
        return f"{self.name}:{self.version}"


def store_path() -> Path:
    """Where BentoML keeps models: `$BENTOML_HOME/models`."""
    from . import compat

    return compat.store_path()


def find(tag: str) -> StoreEntry | None:
    """The entry of a tag (`name`, `name:latest`, `name:version` or the beginning of a version), or None."""
    import bentoml
    from bentoml.exceptions import BentoMLException

    try:
        model = bentoml.models.get(tag)
    except (BentoMLException, ValueError):  # absent, or not even a valid tag
        return None
    return StoreEntry(model.tag.name, str(model.tag.version), Path(model.path))


def entries() -> list[StoreEntry]:
    """All entries, by name and then by version."""
    import bentoml

    if not store_path().is_dir():
        return []
    models = bentoml.models.list()
    return [StoreEntry(model.tag.name, str(model.tag.version), Path(model.path)) for model in models]


def add(directory: Path, name: str) -> StoreEntry:
    """Copies the model in `directory` into the store as a new version of `name`.

    Raises:
        ModelError: it has no config.json or no safetensors, or `name` cannot be a tag, or the store cannot be written.
    """
    import bentoml

    from .compat import ModelStore

    check_model_files(directory)
    files = sorted({file for pattern in MODEL_PATTERNS for file in directory.glob(pattern) if file.is_file()})
    store = store_path()
    try:
        tag = bentoml.Tag.from_taglike(name)
        staging_root = store.parent / "tmp"
        staging_root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="cb-import-", dir=staging_root) as staging:
            staged = ModelStore(staging)
            with bentoml.models.create(tag, labels={"format": "safetensors"}, _model_store=staged) as model:
                for file in files:
                    shutil.copy2(file, model.path_of(file.name))
            return _publish(Path(staging), store, model.tag.name, str(model.tag.version))
    except OSError as error:
        raise ModelError(
            f"cannot write to the model store {store}: {error.strerror or error}; set BENTOML_HOME to a directory"
            " that you can write to"
        ) from error
    except ValueError as error:
        raise ModelError(f"'{name}' cannot be a name in the model store: {error}") from error


def _publish(staging: Path, store: Path, name: str, version: str) -> StoreEntry:
    target = store / name / version
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise ModelError(f"model {name}:{version} is in the store already")
    os.rename(staging / name / version, target)
    # BentoML reads the newest version's name from a file of its own; a rename replaces it whole.
    latest = staging / "latest"
    latest.write_text(version, encoding="utf-8")
    os.replace(latest, target.parent / "latest")
    return StoreEntry(name, version, target)


def say(message: str) -> None:
    """Progress goes to standard error: standard output is for results."""
    print(f"== {message}", file=sys.stderr, flush=True)
