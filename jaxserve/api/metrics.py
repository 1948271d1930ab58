"""Prometheus metrics: what requests went through, measured here, and the engine's own counters, read when scraped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.request import FinishReason, RequestOutput

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)

# (EngineStats field, metric, help) of the counters and gauges that are copied as they are
_COUNTERS = (
    ("num_preemptions", "num_preemptions", "requests put back to the queue because the page pool was full"),
    ("num_steps", "engine_steps", "steps of the engine"),
    ("scheduled_tokens", "scheduled_tokens", "tokens computed in steps"),
    ("padded_tokens", "padded_tokens", "padding computed in steps beside the scheduled tokens"),
    ("compiles", "compiles", "programs compiled"),
    ("compiles_after_ready", "compiles_after_ready", "programs compiled while serving; anything but 0 is a fault"),
    ("compile_seconds", "compile_seconds", "time spent compiling programs"),
    ("host_seconds", "host_gap_seconds", "host time of steps in which the device had nothing to do"),
)
_GAUGES = (
    ("num_requests_running", "num_requests_running", "sequences that are being computed"),
    ("num_requests_waiting", "num_requests_waiting", "sequences that wait for their first step"),
    ("weights_bytes", "weights_bytes", "device memory of the weights"),
    ("kv_cache_bytes", "kv_cache_bytes", "device memory of the page pool"),
)


class Metrics:
    """All metrics of one server in a registry of their own, each with the label model_name."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix, self._model_name = prefix, model_name
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests that got their first token")
        self.generation_tokens = self._counter("generation_tokens", "generated tokens sent to clients")
        self.rejections = self._counter("admission_rejections", "requests refused because the queue was full")
        finished = Counter(prefix + "request_success", "finished sequences", ["model_name", "finished_reason"], registry=self.registry)
        self.finished = {r: finished.labels(model_name, r.value) for r in FinishReason}
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "from arrival to the first token", _TTFT)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "between tokens of a sequence", _ITL)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "from arrival to the end of a sequence, aborts left out", _LATENCY)
        self.queue_time = self._histogram("request_queue_time_seconds", "from arrival to the first step", _LATENCY)

    def watch(self, stats: Any) -> None:
        """Serve the fields of an EngineStats from now on."""
        self.registry.register(_EngineCollector(stats, self._prefix, self._model_name))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(self._prefix + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(self._prefix + name, help, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model_name)


class _EngineCollector(Collector):
    """Turns EngineStats into metric families at each scrape."""

    def __init__(self, stats: Any, prefix: str, model_name: str) -> None:
        self._stats, self._prefix, self._model_name = stats, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for attribute, name, help in table:
                family = kind(self._prefix + name, help, labels=["model_name"])
                family.add_metric([self._model_name], getattr(self._stats, attribute))
                yield family
        used, free, total = self._stats.pages_used, self._stats.pages_free, self._stats.pages_total
        usage = GaugeMetricFamily(self._prefix + "kv_cache_usage_perc", "used share of the page pool, 0 to 1", labels=["model_name"])
        usage.add_metric([self._model_name], used / total if total else 0.0)
        yield usage
        pages = GaugeMetricFamily(self._prefix + "pages", "pages of the pool by state", labels=["model_name", "state"])
        pages.add_metric([self._model_name, "used"], used)
        pages.add_metric([self._model_name, "free"], free)
        yield pages

    def describe(self) -> list[Metric]:
        return []  # the names are known only to collect(); registering must not read the engine


class PromptTracker:
    """Measures one prompt and its n sequences; close() counts those that did not finish as aborted."""

    def __init__(self, metrics: Metrics, n: int, arrival_s: float) -> None:
        self._metrics, self._arrival_s = metrics, arrival_s
        self._started = False
        self._last_s: dict[int, float] = {}  # index -> time of its last token, while it is unfinished
        self._unfinished = set(range(n))

    def add(self, output: RequestOutput) -> None:
        """Count what is new in `output`."""
        now, metrics = time.monotonic(), self._metrics
        if not self._started:
            self._started = True
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.time_to_first_token.observe(now - self._arrival_s)
        for choice in output.outputs:
            if choice.token_ids:
                metrics.generation_tokens.inc(len(choice.token_ids))
                last = self._last_s.get(choice.index)
                if last is not None:
                    metrics.inter_token_latency.observe(now - last)
                self._last_s[choice.index] = now
            if choice.finish_reason is not None:
                self._unfinished.discard(choice.index)
                metrics.finished[choice.finish_reason].inc()
                if choice.finish_reason is not FinishReason.ABORT:
                    metrics.e2e_latency.observe(now - self._arrival_s)

    def forget(self) -> None:
        """The engine refused the prompt: it counts as nothing."""
        self._unfinished.clear()

    def close(self) -> None:
        for _ in self._unfinished:
            self._metrics.finished[FinishReason.ABORT].inc()
        self._unfinished.clear()
