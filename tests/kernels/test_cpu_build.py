"""The native build with compilers that fail: at once, for one instruction set, or midway, leaving half a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cb_kernels.cpu import Library, binding, build

Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """`compiler(CASE)` becomes CXX: `$source` is what it compiles, `$out` its output, which it then writes."""

    def make(case: str) -> Path:
        script = tmp_path / "compiler"
        script.write_text(
            f"""#!/bin/sh
for word in "$@"; do
    case "$word" in *dispatch.cpp) source=dispatch;; *isa_*.cpp) source=${{word##*isa_}}; source=${{source%.cpp}};; esac
    [ "$before" = -o ] && out=$word
    before=$word
done
case $source in {case} esac
echo whole > "$out"
""",
            encoding="utf-8",
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
        return tmp_path / "site" / build.LIBRARY

    return make


def test_all_instruction_sets_are_in_the_library_of_a_compiler_that_knows_them(compiler: Compiler) -> None:
    target = compiler("")
    assert build.build(target) == ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
    assert target.read_text() == "whole\n"


def test_an_instruction_set_that_the_compiler_cannot_build_is_left_out(compiler: Compiler) -> None:
    target = compiler("amx) echo unknown option >&2; exit 1;;")
    assert build.build(target) == ["portable", "avx2", "avx512", "avx512_bf16"]
    assert target.is_file()


@pytest.mark.parametrize(
    "case, message",
    [
        ("portable) echo no space left >&2; exit 1;;", "no space left"),
        ("dispatch) echo half > $out; echo ld: internal error >&2; exit 1;;", "ld: internal error"),
        ("dispatch) echo half > $out; kill -9 $$;;", "compiler exit status -9"),
    ],
    ids=["first unit", "linking", "killed"],
)
def test_a_compiler_that_fails_leaves_what_was_there_and_no_half_library(
    compiler: Compiler, case: str, message: str
) -> None:
    target = compiler(case)
    target.parent.mkdir()
    target.write_text("older\n", encoding="utf-8")
    with pytest.raises(build.BuildError, match=message):
        build.build(target)
    assert [(path.name, path.read_text()) for path in target.parent.iterdir()] == [(build.LIBRARY, "older\n")]


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "absent"))
    with pytest.raises(build.BuildError, match=f"cannot run the C\\+\\+ compiler '{tmp_path / 'absent'}'"):
        build.build(tmp_path / build.LIBRARY)


def test_a_library_of_other_sources_gives_way_to_the_one_in_the_cache(
    native_kernels: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = native_kernels.native.path

    def install(name: str, content: bytes) -> Path:  # each in a folder of its own: a loaded file must stay as it is
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(binding, "__file__", str(folder / "binding.py"))
        if content:
            (folder / build.LIBRARY).write_bytes(content)
        return folder / build.LIBRARY

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install("absent", b"")
    with pytest.raises(binding.LoadError, match="not built"):
        binding._load()
    current = install("current", built.read_bytes())
    assert binding._load()[0] == current
    install("stale", built.read_bytes().replace(build.source_hash().encode(), b"0" * 16))
    with pytest.raises(binding.LoadError, match="built from other sources"):
        binding._load()
    build.cache_directory().mkdir(parents=True)
    shutil.copy(built, build.cache_directory() / build.LIBRARY)
    assert binding._load()[0] == build.cache_directory() / build.LIBRARY
