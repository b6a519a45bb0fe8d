"""Finding a model: directory, then BentoML tag, then Hugging Face id; pickles are never opened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import bentoml
import pytest

from cb_backend.bento import store as bentoml_store
from cb_backend.config import EngineConfig
from cb_backend.errors import ModelError
from cb_backend.models import source
from cb_backend.models.loader import load_model
from cb_backend.models.source import ModelSource, resolve_model


@pytest.fixture
def store(bentoml_home: Path) -> Path:
    return bentoml_home / "models"


def old_entry(store: Path, name: str, model: Path, *, tokenizer: bool) -> Path:
    """An entry as BentoML's transformers framework wrote it: plain files, its own model.yaml, and a pickle."""
    path = store / name / "v1"
    path.mkdir(parents=True)
    for file in model.iterdir():
        if tokenizer or not file.name.startswith(("tokenizer", "special", "chat_template")):
            shutil.copy2(file, path)
    poison(path / "pretrained.v2.pkl")
    (path / "model.yaml").write_text(
        f"name: {name}\nversion: v1\nmodule: bentoml.transformers\nlabels: {{}}\noptions: {{}}\nmetadata: {{}}\n"
        "context:\n  framework_name: transformers\n  framework_versions: {transformers: 4.57.0}\n"
        "  bentoml_version: 1.4.0\n  python_version: 3.11.7\nsignatures:\n  __call__: {batchable: false}\n"
        "api_version: v2\ncreation_time: '2024-05-01T10:00:00+00:00'\n"
    )
    (store / name / "latest").write_text("v1")
    return path


def poison(path: Path) -> None:
    """Puts a link to nothing where the pickle was: opening it raises FileNotFoundError."""
    path.symlink_to(path.with_name("pickle-was-opened"))


def test_a_directory_is_its_own_name(tiny_llama: Path) -> None:
    assert resolve_model(str(tiny_llama)) == ModelSource(tiny_llama, tiny_llama, "llama", "directory")


def test_a_directory_wins_over_a_tag_of_the_same_name(
    tiny_llama: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bentoml_store.add(tiny_llama, "twin")
    shutil.copytree(tiny_llama, tmp_path / "twin")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("twin").kind == "directory"


def test_a_tag_is_found_with_and_without_its_version(tiny_llama: Path, store: Path) -> None:
    entry = bentoml_store.add(tiny_llama, "by-tag")
    expected = ModelSource(entry.path, entry.path, "by-tag", "bentoml")
    assert resolve_model("by-tag") == expected
    assert resolve_model("by-tag:latest") == expected
    assert resolve_model(entry.tag) == expected


def test_a_path_into_the_store_is_named_after_the_model(tiny_llama: Path, store: Path) -> None:
    entry = bentoml_store.add(tiny_llama, "by-path")
    assert resolve_model(str(entry.path)).name == "by-path"


def test_a_path_into_the_hub_cache_is_named_after_the_repository(tiny_llama: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny-chat" / "snapshots" / "0123abcd"
    shutil.copytree(tiny_llama, snapshot)
    assert resolve_model(str(snapshot)).name == "acme/tiny-chat"


def test_a_hub_id_is_downloaded_without_pickles(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, list[str]] = {}

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked[repo_id] = allow_patterns
        return str(tiny_llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("acme/tiny") == ModelSource(tiny_llama, tiny_llama, "acme/tiny", "hub")
    assert asked == {"acme/tiny": list(source.MODEL_PATTERNS)}
    assert not [p for p in asked["acme/tiny"] if p in ("*", "*.bin", "*.pt", "*.pkl", "*.py")]


def test_an_entry_of_old_bentoml_loads_and_its_pickle_stays_shut(tiny_llama: Path, store: Path) -> None:
    path = old_entry(store, "old-pipeline", tiny_llama, tokenizer=True)
    with pytest.raises(FileNotFoundError):
        (path / "pretrained.v2.pkl").read_bytes()
    assert resolve_model("old-pipeline") == ModelSource(path, path, "old-pipeline", "bentoml")
    loaded = load_model(EngineConfig(model="old-pipeline", device="cpu"), attn_implementation="eager")
    assert (loaded.name, loaded.vocab_size) == ("old-pipeline", 512)
    assert loaded.tokenizer is not None


def test_an_entry_without_tokenizer_takes_one_from_another_tag(tiny_llama: Path, store: Path) -> None:
    path = old_entry(store, "old-bare", tiny_llama, tokenizer=False)
    assert resolve_model("old-bare").tokenizer_path is None
    other = bentoml_store.add(tiny_llama, "old-tokenizer")
    assert resolve_model("old-bare", tokenizer="old-tokenizer:latest") == ModelSource(
        path, other.path, "old-bare", "bentoml"
    )


def test_a_tokenizer_reference_without_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^tokenizer '.*' at .* has none of: tokenizer\.json"):
        resolve_model(str(tiny_llama), tokenizer=str(tmp_path))


def test_what_is_nowhere_lists_where_was_looked(bentoml_home: Path) -> None:
    with pytest.raises(ModelError) as error:
        resolve_model("no-such-model")
    message = str(error.value)
    assert message.startswith("no model 'no-such-model'; looked in: directory ")
    assert f"BentoML model store {bentoml_home / 'models'}" in message
    assert "Hugging Face hub" in message


def test_a_path_that_is_not_there_is_not_asked_of_the_hub() -> None:
    with pytest.raises(ModelError, match=r"^no model '\./nowhere': there is no directory /.*nowhere$"):
        resolve_model("./nowhere")


def test_without_bentoml_the_message_says_how_to_get_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"bentoml is not installed: pip install 'cb-backend\[bento\]'"):
        resolve_model("some-tag:latest")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "pretrained.v2.pkl"])
def test_weights_that_exist_only_as_pickles_are_refused(tiny_llama: Path, tmp_path: Path, file: str) -> None:
    shutil.copy2(tiny_llama / "config.json", tmp_path)
    (tmp_path / file).write_bytes(b"\x80\x04cposix\nsystem\n")
    with pytest.raises(ModelError, match=rf"exist only as pickles \({file}\)"):
        resolve_model(str(tmp_path))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no config\.json in "):
        resolve_model(str(tmp_path))


def test_a_directory_without_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copy2(tiny_llama / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"^no \*\.safetensors in "):
        resolve_model(str(tmp_path))


def test_bentoml_itself_reads_what_was_added(tiny_llama: Path, store: Path) -> None:
    entry = bentoml_store.add(tiny_llama, "readable")
    model = bentoml.models.get("readable:latest")
    assert (str(model.tag), Path(model.path)) == (entry.tag, entry.path)
    assert json.loads((entry.path / "config.json").read_text())["model_type"] == "llama"
