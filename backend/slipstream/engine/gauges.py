"""Read what an engine's parts say of themselves: the answer to a probe, and all metrics."""

import os
from collections.abc import Collection, Mapping

from slipstream.core.sequence import Request, Sequence, SequenceStatus
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.telemetry import Telemetry
from slipstream.wire import Figures, Status


class Gauges:
    """The scheduler and the telemetry, read together; the engine's own numbers are arguments."""

    def __init__(
        self, scheduler: Scheduler, telemetry: Telemetry, fixed: Mapping[str, float]
    ) -> None:
        """`fixed` are gauges that never change."""
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._fixed = fixed

    def status(
        self,
        number: int,
        model: str,
        num_steps: int,
        age_s: float,
        bridges: list[str],
        requests: Collection[Request] = (),
    ) -> Status:
        """Return the answer to a `Ping`; `age_s` is the time since the last step, in seconds."""
        scheduler, counters = self._scheduler, self._telemetry.counters
        return Status(
            number=number,
            model=model,
            engine_pid=os.getpid(),
            kv_blocks_free=scheduler.cache.num_unused,
            kv_blocks_total=scheduler.cache.num_blocks,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            last_step_age_s=age_s,
            num_steps=num_steps,
            num_preemptions=scheduler.num_preemptions,
            bridges=bridges,
            num_prompt_tokens=round(counters["prompt_tokens"]),
            num_output_tokens=round(counters["output_tokens"]),
            num_prefix_queries=round(counters["prefix_queries"]),
            num_prefix_hits=round(counters["prefix_hits"]),
            running_adapters=_adapters(requests, SequenceStatus.RUNNING),
            waiting_adapters=_adapters(requests, SequenceStatus.WAITING),
        )

    def figures(self, requests: Collection[Request], num_dropped: int) -> Figures:
        """Return all metrics; `num_dropped` is the number of frames that were not messages."""
        scheduler, counters = self._scheduler, self._telemetry.counters
        counters["preemptions"] = scheduler.num_preemptions
        counters["dropped_messages"] = num_dropped
        for word, number in scheduler.cache.num_evicted.items():
            counters[f"evicted_blocks:{word}"] = number
        counters |= scheduler.cache.tier.counts
        counters["adapter_loads"] = scheduler.room.num_loads
        counters["adapter_evictions"] = scheduler.room.num_evictions
        counters |= scheduler.draft_counts.counters
        return self._telemetry.figures(
            {
                **self._load_of_clients(requests),
                **self._fixed,
                "cached_blocks": scheduler.cache.num_cached,
                "adapter_pages": scheduler.room.num_pages,
                "adapter_pages_free": scheduler.room.num_free,
                "adapters_on_device": scheduler.room.num_there,
                **scheduler.cache.tier.gauges(),
            }
        )

    def _load_of_clients(self, requests: Collection[Request]) -> dict[str, float]:
        """Return gauges of running and waiting work without probes; a probe has one sequence."""
        scheduler, waiting = self._scheduler, self._scheduler.waiting
        probes: list[Sequence] = []
        if self._telemetry.num_probes:
            probes = [r.sequences[0] for r in requests if r.message.is_probe]
        running = [probe for probe in probes if probe.status is SequenceStatus.RUNNING]
        idle = [probe for probe in probes if probe.status is SequenceStatus.WAITING]
        new = [probe for probe in idle if not probe.first_scheduled_ns]
        return {
            "running": scheduler.num_running - len(running),
            "waiting": scheduler.num_waiting - len(idle),
            "active_requests": len(requests) - len(probes),
            "waiting_requests": waiting.num_requests - len(new),
            "waiting_tokens": waiting.num_tokens - sum(probe.num_prompt for probe in new),
            "preempted_sequences": waiting.num_preempted - (len(idle) - len(new)),
        }


def _adapters(requests: Collection[Request], status: SequenceStatus) -> list[str]:
    """Return the names of the adapters that sequences of a status have."""
    return sorted(
        {
            request.message.adapter
            for request in requests
            if request.message.adapter and any(s.status is status for s in request.sequences)
        }
    )
