"""The engine's own numbers as Prometheus metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # only for the types: this package answers before JAX is imported
    from jaxserve.engine.compile_counter import CompileCounter
    from jaxserve.engine.llm_engine import LLMEngine


class EngineCollector(Collector):
    """Reads an LLMEngine and a CompileCounter at each scrape; plain attribute reads, safe beside the engine's thread."""

    def __init__(self, llm: LLMEngine, compiles: CompileCounter, prefix: str, model_name: str) -> None:
        self._llm, self._compiles, self._prefix, self._model_name = llm, compiles, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        for name, help, value in self._counters():
            yield self._family(CounterMetricFamily, name, help, value)
        for name, help, value in self._gauges():
            yield self._family(GaugeMetricFamily, name, help, value)
        pool = self._llm.page_manager
        states = {"free": pool.num_free_pages, "used": pool.num_usable_pages - pool.num_free_pages}
        yield self._labelled("pages", "pages of the KV pool by state", "state", states)
        ledger = self._llm.ledger
        memory = {"weights": ledger.weights_bytes, "kv_pool": ledger.pool_bytes, "program_temporaries": self._llm.runner.stats.temp_bytes}
        yield self._labelled("memory_bytes", "device memory by use", "use", memory)

    def describe(self) -> list[Metric]:
        """Nothing: the registry would otherwise scrape once to learn the names."""
        return []

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        stats, compiles, scheduler = self._llm.stats, self._compiles, self._llm.scheduler
        yield "num_preemptions", "sequences put back to the queue because the pool was full", scheduler.num_preemptions
        yield "engine_steps", "steps of the engine", stats.num_steps
        yield "scheduled_tokens", "tokens computed in steps", stats.scheduled_tokens
        yield "padded_tokens", "places of the steps' programs that held no token", stats.padded_tokens
        yield "host_seconds", "time of steps spent in Python: schedule, pack, dispatch, update", stats.host_seconds
        yield "device_wait_seconds", "time of steps spent waiting for the device", stats.wait_seconds
        yield "compiles", "programs compiled in this process", compiles.count
        yield "compiles_after_ready", "programs compiled while serving; anything but 0 is a fault", compiles.count_after_ready
        yield "compile_seconds", "time spent compiling, summed over threads", compiles.seconds

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        scheduler, pool = self._llm.scheduler, self._llm.page_manager
        used = pool.num_usable_pages - pool.num_free_pages
        yield "num_requests_running", "sequences that are being computed", scheduler.num_running
        yield "num_requests_waiting", "sequences that wait for their first step or for free pages", scheduler.num_waiting
        yield "kv_cache_usage_perc", "used share of the KV pool, 0 to 1", used / pool.num_usable_pages

    def _family(self, kind: Any, name: str, help: str, value: float) -> Metric:
        family = kind(self._prefix + name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _labelled(self, name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, help, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
