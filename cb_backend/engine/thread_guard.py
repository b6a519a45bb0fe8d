"""`CB_DEBUG_THREADS=1`: what belongs to the engine thread raises when another thread touches it.

Guarded objects get a subclass of their class that looks at the thread on each access to an attribute. Without the
variable nothing is guarded and nothing costs. Before the engine thread runs and after it has ended, any thread may
touch: there is only one then.
"""

from __future__ import annotations

import os
import threading
from typing import Any


class WrongThreadError(RuntimeError):
    """A thread touched what belongs to a running engine thread."""


def guards_threads() -> bool:
    return os.environ.get("CB_DEBUG_THREADS", "").strip().lower() in ("1", "true")


class ThreadGuard:
    """Guards the objects of one engine thread."""

    def __init__(self) -> None:
        self._owner: int | None = None  # ident of the engine thread while it runs
        self._owner_name = ""
        self._guarded: dict[type, type] = {}
        self._plain: dict[type, type] = {}

    def begin(self) -> None:
        """The calling thread is the engine's from now on."""
        self._owner_name = threading.current_thread().name
        self._owner = threading.get_ident()

    def end(self) -> None:
        """The engine thread ends: any thread may touch again."""
        self._owner = None

    def watch(self, watched: object) -> None:
        plain = type(watched)
        if plain in self._plain:
            return
        if plain not in self._guarded:
            guarded = self._subclass(plain)
            self._guarded[plain], self._plain[guarded] = guarded, plain
        watched.__class__ = self._guarded[plain]

    def release(self, watched: object) -> None:
        plain = self._plain.get(type(watched))
        if plain is not None:
            watched.__class__ = plain

    def check(self, name: str, attribute: str) -> None:
        """
        Raises:
            WrongThreadError: the calling thread is not the running engine thread.
        """
        if self._owner is not None and threading.get_ident() != self._owner:
            raise WrongThreadError(
                f"{name}.{attribute} was touched by thread {threading.current_thread().name!r}, but it belongs to the "
                f"engine thread {self._owner_name!r}: read `core.snapshot`, or use `core.call`"
            )

    def _subclass(self, plain: Any) -> type:
        check, name = self.check, plain.__name__
        read, write = plain.__getattribute__, plain.__setattr__

        def getattribute(self: object, attribute: str) -> Any:
            if attribute != "__class__":
                check(name, attribute)
            return read(self, attribute)

        def setattribute(self: object, attribute: str, value: object) -> None:
            if attribute != "__class__":
                check(name, attribute)
            write(self, attribute, value)

        members = {"__slots__": (), "__getattribute__": getattribute, "__setattr__": setattribute}
        return type(name, (plain,), {**members, "__module__": plain.__module__, "__qualname__": plain.__qualname__})
