"""What stops a server before it starts is told in one line: what is wrong, and what to do."""

from __future__ import annotations

import errno
import logging
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from bentoml_cli.serve import serve_command

from cb_backend.bento import preflight, serve
from cb_backend.bento.preflight import ROOM, Unfit, before_serving, check_address, check_guard, check_home, check_models

TAG = "mine:abcdef"


@pytest.fixture(autouse=True)
def loggers_stay_on() -> Iterator[None]:
    """BentoML's command line switches off the loggers that exist before it configures its own."""
    yield
    for name in ("cb_backend", "cb_backend.request"):
        logging.getLogger(name).disabled = False


def told(check: Any, *arguments: Any) -> str:
    with pytest.raises(Unfit) as refused:
        check(*arguments)
    return str(refused.value)


def test_a_home_is_made_where_there_is_none(tmp_path: Path) -> None:
    check_home(tmp_path / "new")
    assert {folder.name for folder in (tmp_path / "new").iterdir()} == {"bentos", "models", "envs", "tmp"}


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    assert told(check_home, home) == f"{home}: Not a directory; set BENTOML_HOME to a directory that you can write to"


def test_a_home_without_room_for_metrics_says_how_much_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=ROOM - 1024)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: full)
    assert told(check_home, tmp_path) == (
        f"{tmp_path}: 4095 KiB are free, 4096 KiB are needed for metrics; mount a larger tmpfs there, or set "
        "BENTOML_HOME to a directory with more room"
    )
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: full._replace(free=ROOM))
    check_home(tmp_path)


def test_a_home_that_is_complete_and_read_only_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_home(tmp_path)
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: full)
    monkeypatch.setattr(preflight.os, "access", lambda path, mode: False)
    check_home(tmp_path)


@pytest.mark.parametrize(("value", "home"), [(None, "/home/me/bentoml"), ("~/x", "/home/me/x"), ("$BASE/b", "/srv/b")])
def test_the_home_is_where_bentoml_looks_for_it(monkeypatch: pytest.MonkeyPatch, value: str | None, home: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("BASE", "/srv")
    assert preflight.home_of({} if value is None else {"BENTOML_HOME": value}) == Path(home)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_named(host: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = f"port {port} is in use: stop what listens there, or set --port (make: PORT=)"
        assert told(check_address, host, port) == line
    check_address(host, port)


def test_an_address_of_another_machine_is_named() -> None:
    assert told(check_address, "192.0.2.1", 3000) == "192.0.2.1 is no address of this machine: set --host (make: HOST=)"


def test_a_port_that_no_machine_has_is_named() -> None:
    assert told(check_address, "127.0.0.1", 70000) == "port 70000 is not one of 0 to 65535: set --port (make: PORT=)"


def test_a_port_for_root_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(preflight.socket, "socket", Refusing)
    assert told(check_address, "127.0.0.1", 80) == "port 80 is for root: set --port above 1023 (make: PORT=)"


def bento(home: Path, *, in_service: bool = False, registry: str = "bentoml") -> Path:
    """A Bento in `home` that takes along one model, listed by its bentofile or by its service."""
    folder = home / "bentos" / "llm" / "v1"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("v1")
    listed = [{"tag": TAG, "registry": registry}]
    about = {"models": [] if in_service else listed, "services": [{"name": "llm", "models": listed * in_service}]}
    (folder / "bento.yaml").write_text(yaml.safe_dump(about))
    return folder


@pytest.mark.parametrize("in_service", [False, True])
@pytest.mark.parametrize("target", ["llm", "llm:latest", "llm:v1", "folder"])
def test_a_model_that_a_bento_lacks_is_named_with_how_to_bring_it(
    tmp_path: Path, target: str, in_service: bool
) -> None:
    folder = bento(tmp_path, in_service=in_service)
    assert told(check_models, str(folder) if target == "folder" else target, tmp_path) == (
        f"model {TAG} of this Bento is not in {tmp_path / 'models'}: run `bentoml models export {TAG} FILE` where the "
        "Bento was built and `bentoml models import FILE` here"
    )


@pytest.mark.parametrize("where", ["the store", "the Bento"])
def test_a_model_in_the_store_or_beside_the_bento_will_do(tmp_path: Path, where: str) -> None:
    folder = bento(tmp_path)
    ((tmp_path if where == "the store" else folder) / "models" / "mine" / "abcdef").mkdir(parents=True)
    check_models("llm:latest", tmp_path)


def test_a_model_of_a_hub_and_a_service_that_is_no_bento_are_left_to_bentoml(tmp_path: Path) -> None:
    bento(tmp_path, registry="huggingface")
    check_models("llm:latest", tmp_path)
    for target in ("integration.service:LLM", "absent:v1", "."):
        check_models(target, tmp_path)


def test_serve_says_it_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bento(tmp_path)
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path))
    assert serve.main(["llm:v1", "--port", "1"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: model {TAG} of this Bento is not in {tmp_path / 'models'}: ")


def test_serve_becomes_bentomls_with_the_same_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENTOML_HOME", str(tmp_path))
    called: list[list[str]] = []
    monkeypatch.setattr(serve.os, "execv", lambda program, arguments: called.append([program, *arguments]))
    serve.main(["a:B", "--port", "1"])
    assert called == [[sys.executable, sys.executable, "-m", "bentoml", "serve", "a:B", "--port", "1"]]


def test_where_nobody_serves_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "check_home", lambda home: pytest.fail("it looked"))
    before_serving()


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ([], ("0.0.0.0", 3000)),  # BentoML's own
        (["--port", "3210"], ("0.0.0.0", 3210)),
        (["--host", "127.0.0.1"], ("127.0.0.1", 3000)),
        (["--host", "::1", "--port", "0"], ("::1", 0)),
    ],
)
def test_the_address_is_the_one_that_bentoml_will_take(
    monkeypatch: pytest.MonkeyPatch, options: list[str], address: tuple[str, int]
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(preflight, "check_home", lambda home: None)
    monkeypatch.setattr(preflight, "check_address", lambda host, port: asked.append((host, port)))
    command = serve_command.commands["serve"]
    for name in ("BENTOML_HOST", "BENTOML_PORT"):
        monkeypatch.delenv(name, raising=False)
    with command.make_context("serve", [*options, "integration.service:LLM"]):
        before_serving()
    assert asked == [address]


def test_an_open_server_without_keys_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CB_API_KEYS", raising=False)
    assert [check_guard(host) for host in ("127.0.0.1", "localhost", "::1")] == [None] * 3
    assert "CB_API_KEYS" in (check_guard("0.0.0.0") or "")
    monkeypatch.setenv("CB_API_KEYS", "secret")
    assert check_guard("0.0.0.0") is None
    monkeypatch.setenv("CB_API_KEYS", ",")
    with pytest.raises(Unfit, match="CB_API_KEYS"):
        check_guard("127.0.0.1")
