"""Where a service's configuration comes from, and what it is while its engine comes up, fails or is closed early."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bentoml
import pytest

from cb_backend.bento.loading import ConfigError, Loading, configured
from cb_backend.errors import ModelError, RequestError


class SlowEngine:
    """Starts when it is allowed to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.allowed = threading.Event()
        self.started = False
        self.closed = False
        self._failure = failure

    def start(self) -> Any:
        assert self.allowed.wait(10)
        if self._failure is not None:
            raise self._failure
        self.started = True
        return self

    def close(self) -> None:
        self.closed = True

    @property
    def is_ready(self) -> bool:
        return self.started and not self.closed

    is_alive = is_ready


def refusal(loading: Loading) -> RequestError:
    with pytest.raises(RequestError) as caught:
        loading.ready_engine()
    return caught.value


def test_the_environment_wins_over_the_code_field_by_field() -> None:
    environ = {"CB_MAX_NUM_SEQS": "8", "CB_ADMISSION__RISK": "0.05", "CB_UNKNOWN_WORD": "1", "HOME": "/"}
    config = configured("here", {"max_num_seqs": 64, "admission": {"policy": "prompt"}, "seed": 3}, environ)
    assert (config.model, config.max_num_seqs, config.seed) == ("here", 8, 3)
    assert (config.admission.policy, config.admission.risk) == ("prompt", 0.05)
    assert configured("here", {}, {"CB_MODEL": "there"}).model == "there"


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("name:latest", "name:latest"),
        (Path("/models/x"), "/models/x"),
        (bentoml.models.BentoModel("name:latest"), "name:latest"),
        (bentoml.models.HuggingFaceModel("owner/name"), "owner/name"),
        (SimpleNamespace(tag="name:v1", path="/store"), "name:v1"),
    ],
)
def test_a_model_may_be_named_in_each_of_bentomls_ways(model: Any, reference: str) -> None:
    assert configured(model, {}, {}).model == reference


def test_a_service_without_a_model_or_with_a_bad_value_says_so_in_one_line() -> None:
    with pytest.raises(ConfigError, match="CB_MODEL"):
        configured(None, {}, {})
    with pytest.raises(ConfigError, match=r"^engine configuration: 'block_size': .*\(got 0\)$"):
        configured("here", {}, {"CB_BLOCK_SIZE": "0"})


def test_it_is_alive_but_not_ready_while_it_loads() -> None:
    engine = SlowEngine()
    loading = Loading(lambda: engine)  # type: ignore[arg-type,return-value]
    assert (loading.is_alive, loading.is_ready) == (True, False)
    error = refusal(loading)
    assert (error.status, error.code, error.retry_after) == (503, "not_ready", 5.0)
    engine.allowed.set()
    loading.wait()
    assert loading.is_ready
    assert loading.ready_engine() is engine
    loading.close()
    assert engine.closed
    assert refusal(loading).code == "not_ready"


@pytest.mark.parametrize("failure", [ModelError("no such model"), RuntimeError("out of memory")])
def test_a_failure_is_told_to_probes_and_clients(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine = SlowEngine(failure)
    engine.allowed.set()
    loading = Loading(lambda: engine)  # type: ignore[arg-type,return-value]
    loading.wait()
    assert (loading.is_alive, loading.is_ready) == (False, False)
    error = refusal(loading)
    assert (error.status, error.code) == (503, "load_failed")
    assert str(failure) in error.message
    assert [record.exc_info is None for record in caplog.records] == [isinstance(failure, ModelError)]


def test_an_engine_that_is_closed_while_it_loads_is_stopped_when_it_has_loaded() -> None:
    engine = SlowEngine()
    loading = Loading(lambda: engine)  # type: ignore[arg-type,return-value]
    loading.close()
    assert not engine.closed
    engine.allowed.set()
    loading.wait()
    assert engine.closed
