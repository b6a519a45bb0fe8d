"""An engine that comes up in the background, so that probes are answered while a model loads. Knows nothing of HTTP."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..config import EngineConfig
from ..errors import RequestError
from ..params import request_error

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger("cb_backend")

RETRY_SECONDS = 5.0


class ConfigError(ValueError):
    """The service's configuration is wrong; one line that names the field."""


def configured(model: Any, fields: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> EngineConfig:
    """The configuration of a service or runner, with the `CB_*` variables over what its code says.

    Args:
        model: a directory, a store tag or a hub id, or one of BentoML's `BentoModel` and `HuggingFaceModel`.
        fields: the other fields of `EngineConfig`.

    Raises:
        ConfigError: a value is bad, or there is no model.
    """
    environ = os.environ if environ is None else environ
    values = {"model": environ.get("CB_MODEL") or _reference(model), **fields}
    if values["model"] is None:
        raise ConfigError("no model: set the class attribute `model`, or CB_MODEL")
    set_here = {
        key[3:].lower().replace("__", "."): raw
        for key, raw in environ.items()
        if key.startswith("CB_") and key[3:].lower().split("__")[0] in EngineConfig.model_fields
    }
    try:
        return EngineConfig(**values).replace(set_here)
    except ValidationError as error:
        raise ConfigError(f"engine configuration: {request_error(error)}") from None


def _reference(model: Any) -> str | None:
    """What `EngineConfig.model` says for a class attribute."""
    if model is None or isinstance(model, str):
        return model
    for attribute in ("tag", "model_id"):  # BentoModel or a stored model; HuggingFaceModel
        if (name := getattr(model, attribute, None)) is not None:
            return str(name)
    return str(os.fspath(model))


class Loading:
    """Loads one engine on a thread of its own.

    Args:
        make: returns an engine that is not started; called on the thread, so it may import what is slow to import.

    Attributes:
        error: why loading failed, in one line; None while it did not.
    """

    def __init__(self, make: Callable[[], Engine]) -> None:
        self.error: str | None = None
        self._make = make
        self._engine: Engine | None = None
        self._closed = False
        self._draining = False
        self._lock = threading.Lock()  # guards closing against the end of loading
        self._thread = threading.Thread(target=self._load, name="cb-load", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.is_ready and not self._draining

    @property
    def is_alive(self) -> bool:
        return self.error is None and (self._engine is None or self._engine.is_alive)

    def ready_engine(self) -> Engine:
        """
        Raises:
            RequestError: 503: it is loading, failed to load, has stopped or died.
        """
        engine = self._engine
        if self._draining:
            raise RequestError("the server is stopping", status=503, code="stopping", retry_after=RETRY_SECONDS)
        if engine is not None and engine.is_ready:
            return engine
        if self.error is not None:
            raise RequestError(
                f"the model could not be loaded: {self.error}", status=503, code="load_failed", retry_after=60.0
            )
        state = "is loading" if self._thread.is_alive() else "is not running"
        raise RequestError(f"the model {state}", status=503, code="not_ready", retry_after=RETRY_SECONDS)

    @property
    def is_idle(self) -> bool:
        """No request is open."""
        return self._engine is None or self._engine.is_idle

    def count_refusal(self, error: RequestError) -> None:
        """Counts a request that was refused before the engine saw it; without an engine there is nowhere to count."""
        if self._engine is not None:
            self._engine.count_refusal(error)

    def drain(self) -> None:
        """From now on every new request is refused; those begun go on."""
        self._draining = True

    def wait(self) -> None:
        """Returns when loading has ended, well or not."""
        self._thread.join()

    def close(self) -> None:
        """Ends every request and stops the engine; one that is still loading is stopped when it has loaded."""
        with self._lock:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.close()

    def _load(self) -> None:
        from ..errors import ModelError

        try:
            engine = self._make().start()
            # Modules and model are a million objects that live as long as the process: a full collection that walks
            # them stops event loop and engine for most of a second, and a burst of requests sets off several.
            gc.collect()
            gc.freeze()
        except (ModelError, ConfigError) as error:
            self.error = str(error)
            logger.error("the model could not be loaded: %s", error)
            return
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            logger.exception("the model could not be loaded")
            return
        with self._lock:
            self._engine = engine
            closed = self._closed
        if closed:
            engine.close()
