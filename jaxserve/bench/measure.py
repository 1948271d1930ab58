"""One timed run of a workload through the engine's own loop."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.workload import Prompt
from jaxserve.sampling_params import SamplingParams

_names = itertools.count()


@dataclass
class Timeline:
    """One request: its tokens and when each came, in seconds after the run began."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times_s)]


@dataclass(frozen=True)
class Run:
    """What one run gave; counters are the engine's over this run alone."""

    duration_s: float
    timelines: list[Timeline]
    counters: dict[str, float]


def measure(engine: Any, prompts: Sequence[Prompt], max_tokens: int | None = None) -> Run:
    """Add all prompts at once, greedy and past end-of-sequence tokens, and step until all are done. Text is not made.

    `max_tokens` caps every output, for a warm-up over the same shapes. ValueError when a prompt cannot fit.
    """
    requests = []
    for prompt in prompts:
        count = prompt.max_tokens if max_tokens is None else min(max_tokens, prompt.max_tokens)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count)
        try:
            requests += engine.make_requests(prompt.token_ids, params, f"bench-{next(_names)}")
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}: {error}") from error
    timelines = {request.request_id: Timeline() for request in requests}
    before, began = dataclasses.asdict(engine.stats), time.perf_counter()
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        outputs, now = engine.step(), time.perf_counter() - began
        for output in outputs:
            if output.token_id is not None:
                timelines[output.request_id].token_ids.append(output.token_id)
                timelines[output.request_id].times_s.append(now)
    duration = time.perf_counter() - began
    after = dataclasses.asdict(engine.stats)
    counters = {name: value - before[name] for name, value in after.items() if isinstance(value, int | float)}
    _check(requests, timelines)
    return Run(duration, [timelines[request.request_id] for request in requests], counters)


def _check(requests: Sequence[Any], timelines: dict[str, Timeline]) -> None:
    for request in requests:
        made = len(timelines[request.request_id].token_ids)
        if made != request.max_tokens:
            raise RuntimeError(f"request {request.request_id} gave {made} tokens, not {request.max_tokens}: the engine lost some")
