"""What a server needs of its machine, asked before anything is started: an address, a home with room, its models.

Each check raises `Unfit` with one line that says what is wrong and what to do. Nothing here imports torch or, with its
settings and its home, bentoml.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..versions import VersionError, check_versions
from .guard import GuardSettings, SettingsError

logger = logging.getLogger("cb_backend")

# BentoML maps its metrics into memory, from files in its home. A write that finds no room there kills the worker with
# SIGBUS, not with an error. They take less than 1 MiB.
ROOM = 4 << 20


class Unfit(RuntimeError):
    """This machine cannot serve as it is. The message is one line: what is wrong, and what to do."""


def home_of(environ: Mapping[str, str] = os.environ) -> Path:
    """BentoML's home, as BentoML finds it."""
    return Path(os.path.expandvars(environ.get("BENTOML_HOME") or "~/bentoml")).expanduser()


def check_home(home: Path) -> None:
    """Makes BentoML's home where it is missing.

    Raises:
        Unfit: it cannot be made, or its file system is full.
    """
    try:
        for folder in ("bentos", "models", "envs", "tmp"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
    except OSError as error:
        raise Unfit(f"{home}: {error.strerror}; set BENTOML_HOME to a directory that you can write to") from None
    # Where it is read-only, BentoML keeps its metrics in the system's folder for temporary files.
    if free < ROOM and os.access(home, os.W_OK):
        raise Unfit(
            f"{home}: {free >> 10} KiB are free, {ROOM >> 10} KiB are needed for metrics; mount a larger tmpfs there, "
            "or set BENTOML_HOME to a directory with more room"
        )


def check_address(host: str, port: int) -> None:
    """Binds the address and lets go of it again, by the rules that BentoML binds it with.

    Raises:
        Unfit: another process listens there, or this one may not.
    """
    if not 0 <= port <= 65535:
        raise Unfit(f"port {port} is not one of 0 to 65535: set --port (make: PORT=)")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = {
                errno.EADDRINUSE: f"port {port} is in use: stop what listens there, or set --port (make: PORT=)",
                errno.EACCES: f"port {port} is for root: set --port above 1023 (make: PORT=)",
                errno.EADDRNOTAVAIL: f"{host} is no address of this machine: set --host (make: HOST=)",
            }
            raise Unfit(what.get(error.errno or 0, f"{host}:{port}: {error.strerror or error}")) from None


def check_models(target: str, home: Path) -> None:
    """That the models of a Bento are there. Says nothing of a service that is no Bento: its models are its own matter.

    Args:
        target: what `bentoml serve` is given: a Bento's folder or tag, or a service.

    Raises:
        Unfit: the Bento names a model that is neither beside it nor in the store.
    """
    folder = _bento_folder(target, home)
    if folder is None:
        return
    about = yaml.safe_load((folder / "bento.yaml").read_text(encoding="utf-8"))
    services = about.get("services") or []
    for model in (about.get("models") or []) + [model for service in services for model in service.get("models") or []]:
        tag = str(model["tag"])
        stores = (folder / "models", home / "models")
        # BentoML fetches what comes from a hub.
        if model.get("registry", "bentoml") == "bentoml" and not any(
            (store / Path(*tag.split(":"))).is_dir() for store in stores
        ):
            raise Unfit(
                f"model {tag} of this Bento is not in {home / 'models'}: run `bentoml models export {tag} FILE` where "
                "the Bento was built and `bentoml models import FILE` here"
            )


def _bento_folder(target: str, home: Path) -> Path | None:
    """Where a Bento is; None for what is none, or is not here."""
    name, _, version = target.partition(":")
    entry = home / "bentos" / name
    if version in ("", "latest") and (entry / "latest").is_file():
        version = (entry / "latest").read_text(encoding="utf-8").strip()
    candidates = [Path(target).expanduser()] + ([entry / version] if version else [])
    return next((folder for folder in candidates if (folder / "bento.yaml").is_file()), None)


def _address(options: Mapping[str, Any]) -> tuple[str, int]:
    """Where `bentoml serve` will listen: what it was told, else what BentoML's or the service's configuration says."""
    from .compat import http_address

    host, port = options.get("host"), options.get("port")
    configured_host, configured_port = http_address()
    return host or configured_host, configured_port if port is None else port


def check_guard(host: str) -> str | None:
    """That the guard's settings are right; returns a warning where strangers could use the server.

    Raises:
        Unfit: a variable of the guard is wrong.
    """
    try:
        settings = GuardSettings.from_environment()
    except SettingsError as error:
        raise Unfit(str(error)) from None
    if settings.keys or host in ("localhost", "::1") or host.startswith("127."):
        return None
    return (
        f"{host} is open to the network and no key is asked for: every client that reaches it is served; set "
        "CB_API_KEYS or --host 127.0.0.1, or put a proxy with authentication before it (docs/security.md)"
    )


def before_serving() -> None:
    """The checks that any way to `bentoml serve` goes through, in the process that is about to bind the address.

    Raises:
        BentoMLException: BentoML's command line prints its message as the last line.
    """
    import click
    from bentoml.exceptions import BentoMLException

    context = click.get_current_context(silent=True)
    if context is None or context.info_name != "serve":
        return
    try:
        check_versions()
        check_home(home_of())
        host, port = _address(context.params)
        check_address(host, port)
        if warning := check_guard(host):
            logger.warning(warning)
    except (Unfit, VersionError) as error:
        raise BentoMLException(str(error)) from None
