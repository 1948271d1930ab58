"""Time the host's work for one decode step: prints JSON with the median and 99th percentile in milliseconds.

Runs `schedule`, the packing of the model's input and `update` with depth-1 overlap, as the engine does, on a full batch of greedy
requests that all decode; no device takes part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time

from jaxserve.config import SchedulerConfig
from jaxserve.engine.input_batch import Bucket, InputLayout
from jaxserve.engine.page_manager import PageManager
from jaxserve.engine.scheduler import Scheduler
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams


def percentiles(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {name: round(1e3 * ordered[int(q * (len(ordered) - 1))], 4) for name, q in (("median_ms", 0.5), ("p99_ms", 0.99))}


def decoding_scheduler(num_rows: int, num_prompt_tokens: int, max_tokens: int, page_size: int) -> Scheduler:
    """A scheduler whose `num_rows` requests are all admitted in its first step."""
    length = num_prompt_tokens + max_tokens
    pages = PageManager(num_rows * (length // page_size + 2) + 1, page_size)
    config = SchedulerConfig(max_model_len=length, max_num_seqs=num_rows, max_num_batched_tokens=num_rows * num_prompt_tokens)
    scheduler = Scheduler(config, pages)
    for i in range(num_rows):
        scheduler.add(Request(f"request-{i}", [1] * num_prompt_tokens, SamplingParams(), max_tokens, frozenset((0,))))
    return scheduler


def measure(num_rows: int, num_steps: int, num_prompt_tokens: int = 512, page_size: int = 16) -> dict[str, dict[str, float]]:
    max_tokens = num_steps + 10
    scheduler = decoding_scheduler(num_rows, num_prompt_tokens, max_tokens, page_size)
    layout = InputLayout(Bucket(num_rows, num_rows, True), scheduler.page_manager.num_pages_for(num_prompt_tokens + max_tokens), page_size)
    sampled, prev_rows = [7] * num_rows, {f"request-{i}": i for i in range(num_rows)}
    in_flight = scheduler.schedule()
    times: dict[str, list[float]] = {"schedule": [], "pack": [], "update": [], "total": []}
    for _ in range(num_steps):
        clock = [time.perf_counter()]
        scheduled = scheduler.schedule()
        clock.append(time.perf_counter())
        if not scheduled or not in_flight:
            raise RuntimeError("a step is empty, although all requests have tokens left")
        layout.pack(scheduled, prev_rows)
        clock.append(time.perf_counter())
        scheduler.update(in_flight, sampled)
        clock.append(time.perf_counter())
        in_flight = scheduled
        for name, seconds in zip(times, [*(b - a for a, b in itertools.pairwise(clock)), clock[-1] - clock[0]], strict=True):
            times[name].append(seconds)
    return {name: percentiles(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256, help="decoding requests in the batch")
    parser.add_argument("--steps", type=int, default=1000, help="steps to time")
    args = parser.parse_args()
    if args.rows < 1 or args.steps < 1:
        parser.error("--rows and --steps must be at least 1")
    result = {"rows": args.rows, "steps": args.steps, "python": platform.python_version(), **measure(args.rows, args.steps)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
