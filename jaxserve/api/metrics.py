"""Prometheus metrics: what requests went through, measured here, and the engine's own counters, read when scraped."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from jaxserve.api.engine_metrics import EngineCollector
from jaxserve.request import FinishReason, Request, RequestOutput

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LATENCY = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)


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
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "from arrival to the end of a sequence, aborts left out", _LATENCY
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "from arrival to the first step", _LATENCY)

    def watch(self, llm: Any, compiles: Any) -> None:
        """Serve the numbers of an LLMEngine and a CompileCounter from now on."""
        self.registry.register(EngineCollector(llm, compiles, self._prefix, self._model_name))

    def on_finish(self, request: Request) -> None:
        """Take the queue time of a sequence that ended."""
        if request.scheduled_time_s is not None:
            self.queue_time.observe(request.scheduled_time_s - request.arrival_time_s)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(self._prefix + name, help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(self._prefix + name, help, ["model_name"], registry=self.registry, buckets=buckets)
        return made.labels(self._model_name)


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
