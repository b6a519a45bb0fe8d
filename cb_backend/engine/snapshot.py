"""What other threads may know of the engine: frozen numbers that the engine thread publishes.

The engine thread makes a new `EngineSnapshot` after each step and after messages, before it tells the requests that
ended; a thread that knows of an end therefore finds it in the snapshot. Every other thread reads the newest snapshot
and nothing else: an attribute that refers to an immutable value needs no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..request import FinishReason
from ..scheduling.admission import Admission
from ..scheduling.scheduler import Scheduler
from ..scheduling.wait_forecast import WaitForecast, WaitForecaster
from .choices import Choices


@dataclass(slots=True)
class HostTime:
    """Where the engine thread's time went, seconds since the start. `device` includes waiting for the device."""

    plan: float = 0.0
    device: float = 0.0
    settle: float = 0.0


class EngineSnapshot(NamedTuple):
    """Numbers of one moment. `received`: requests that had reached the engine thread by then, since the start."""

    received: int
    step: int
    running: int
    waiting: int
    swapped: int
    kv_blocks: int
    kv_blocks_available: int  # cached ones included
    kv_blocks_cached: int
    block_size: int
    bytes_per_block: int
    host_blocks: int
    host_blocks_used: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    counters: Mapping[str, int]  # the scheduler's; what never happened is not in it
    plan_seconds: float
    device_seconds: float
    settle_seconds: float
    swap_seconds_per_block: float
    recompute_seconds_per_token: float
    admissions_judged: int
    admissions_overflowed: int
    admission_reserve_deviations: float
    forecast: WaitForecast

    @property
    def kv_blocks_used(self) -> int:
        return self.kv_blocks - self.kv_blocks_available

    def stats(self, unread: int = 0) -> dict[str, float]:
        """As `Engine.stats()` gives them; `unread`: requests that are sent and not in this snapshot."""
        count = self.counters.get
        return {
            "running": self.running,
            "waiting": self.waiting + unread,
            "swapped": self.swapped,
            "steps": self.step,
            "kv_blocks": self.kv_blocks,
            "kv_blocks_used": self.kv_blocks_used,
            "kv_blocks_cached": self.kv_blocks_cached,
            "kv_blocks_free": self.kv_blocks_available - self.kv_blocks_cached,
            "host_blocks": self.host_blocks,
            "host_blocks_used": self.host_blocks_used,
            "block_size": self.block_size,
            "bytes_per_block": self.bytes_per_block,
            "prefix_queried_tokens": self.prefix_queried_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "computed_tokens": count("computed_tokens", 0),
            "generated_tokens": count("generated_tokens", 0),
            "recomputed_tokens": count("recomputed_tokens", 0),
            "preemptions_swap": count("preemptions_swap", 0),
            "preemptions_recompute": count("preemptions_recompute", 0),
            "swapped_bytes": count("swapped_blocks", 0) * self.bytes_per_block,
            **{f"finished_{reason.value}": count(f"finished_{reason.value}", 0) for reason in FinishReason},
            "seconds_per_step": self.forecast.seconds_per_step,
            "plan_seconds": self.plan_seconds,
            "device_seconds": self.device_seconds,
            "settle_seconds": self.settle_seconds,
            "swap_seconds_per_block": self.swap_seconds_per_block,
            "recompute_seconds_per_token": self.recompute_seconds_per_token,
            "admissions_judged": self.admissions_judged,
            "admissions_overflowed": self.admissions_overflowed,
            "admission_reserve_deviations": self.admission_reserve_deviations,
        }


class SnapshotSource:
    """Makes snapshots, on the engine thread.

    Args:
        scheduler: with its pools.
        choices: which wait for their prompt too.
        admission: for the forecast of waiting times; None: every request is taken to end with its next step.
        bytes_per_block: size of a KV block.
    """

    def __init__(
        self, scheduler: Scheduler, choices: Choices, admission: Admission | None, bytes_per_block: int
    ) -> None:
        self._scheduler = scheduler
        self._choices = choices
        self._reserve = None if admission is None else admission.reserve
        self._bytes_per_block = bytes_per_block
        self._forecaster = None
        if admission is not None:
            pool_tokens = scheduler.pool.num_blocks * scheduler.pool.block_size
            self._forecaster = WaitForecaster(admission.curves, pool_tokens, scheduler.budget)

    def take(self, received: int, time: HostTime, seconds_per_step: float) -> EngineSnapshot:
        scheduler, reserve = self._scheduler, self._reserve
        pool, host, cost = scheduler.pool, scheduler.host, scheduler.preemption.cost
        running = len(scheduler.running)
        if self._forecaster is None:
            forecast = WaitForecast(seconds_per_step, 1.0 / max(1, running), scheduler.budget, {})
        else:
            forecast = self._forecaster.forecast(running, seconds_per_step)
        return EngineSnapshot(
            received,
            scheduler.step,
            running,
            self._choices.num_waiting,
            scheduler.num_swapped,
            pool.num_blocks,
            pool.available,
            pool.num_cached,
            pool.block_size,
            self._bytes_per_block,
            host.num_blocks,
            host.num_used,
            pool.queried_tokens,
            pool.hit_tokens,
            MappingProxyType(dict(scheduler.counters)),
            time.plan,
            time.device,
            time.settle,
            cost.swap_seconds_per_block,
            cost.recompute_seconds_per_token,
            0 if reserve is None else reserve.judged,
            0 if reserve is None else reserve.overflowed,
            0.0 if reserve is None else reserve.z,
            forecast,
        )
