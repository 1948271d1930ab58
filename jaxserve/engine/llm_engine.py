"""LLMEngine: the whole loop on one screen. Requests in, one token a running request out of each step."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import cast

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.model_runner import InFlightStep, ModelRunner, StepResult
from jaxserve.engine.page_manager import PageManager
from jaxserve.engine.scheduler import Scheduler, SchedulerOutput
from jaxserve.engine.startup import load, plan_pool, resolve
from jaxserve.models.llama import LlamaForCausalLM
from jaxserve.request import FinishReason, Request, RequestStatus, TokenLogprobs, TokenOutput
from jaxserve.sampler import MAX_SUPPRESSED
from jaxserve.sampling_params import SamplingParams


@dataclass
class EngineStats:
    """Counters and gauges since the engine started; seconds, bytes, tokens."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0  # tokens of the programs' shapes that held nothing
    host_seconds: float = 0.0  # schedule, pack, dispatch and update, without waiting for the device
    wait_seconds: float = 0.0  # waiting for the device


class LLMEngine:
    """Continuous batching (Orca, OSDI 2022) over a paged pool with a depth-1 pipeline: the host prepares step t + 1 while step t runs.

    Not thread-safe; AsyncEngine gives it a thread of its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LlamaForCausalLM | None = None,
        model_config: ModelConfig | None = None,
        tokenizer=None,
        progress: bool = False,
    ):
        """Load, size the pool and compile; with `model` (and its model_config), serve a module that the caller already holds."""
        self.start_time_s = time.monotonic()
        loaded = load(config, model, model_config, tokenizer, progress)
        self.model_config, self.generation_defaults = loaded.model_config, loaded.generation_defaults
        self.config = resolve(config, loaded.model_config, loaded.path)
        self.runner = ModelRunner(self.config, loaded.module, self.model_config, loaded.mesh, loaded.dtype, loaded.kv_dtype, loaded.path)
        self.ledger = plan_pool(self.config, self.model_config, self.runner)
        cost = self.runner.compile(self.ledger.num_pages, progress)
        self.tokenizer = loaded.tokenizer.result()
        attention = f"{loaded.path.backend}: {loaded.path_reason}"
        self.ledger = replace(
            self.ledger, attention=attention, scratch_bytes=cost.temp_bytes, compile_seconds=cost.seconds, num_programs=cost.num_programs
        )
        self.page_manager = PageManager(self.ledger.num_pages, self.ledger.page_size)
        self.scheduler = Scheduler(self.config.scheduler, self.page_manager)
        self.stats = EngineStats()
        self._in_flight: InFlightStep | None = None
        # by request, not by id: an aborted request may still be in flight when its id comes again
        self._prompt_logprobs: dict[Request, list[TokenLogprobs | None]] = {}
        self._seeds = itertools.count(config.seed * 1_000_003)
        self.ledger = replace(self.ledger, startup_seconds=time.monotonic() - self.start_time_s)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or self._in_flight is not None

    @property
    def capacity_tokens(self) -> int:
        """The most tokens one request can have, prompt and output: max_model_len, or the whole pool where that is smaller."""
        longest = cast(int, self.config.scheduler.max_model_len)  # resolve() has replaced None
        return min(longest, self.page_manager.num_usable_pages * self.page_manager.page_size)

    def make_requests(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str) -> list[Request]:
        """The n requests of one prompt, with everything checked that can be: ValueError names field, value, limit and remedy."""
        self._check_prompt(prompt_token_ids)
        max_tokens = max(1, self.capacity_tokens - len(prompt_token_ids)) if params.max_tokens is None else params.max_tokens
        self.scheduler.check_fits(len(prompt_token_ids), max_tokens)
        stops = set(params.stop_token_ids)
        for token in stops:
            if token >= self.model_config.vocab_size:
                raise ValueError(f"stop_token_ids holds {token}; give ids from 0 to {self.model_config.vocab_size - 1}")
        if not params.ignore_eos:
            stops.update(self.model_config.eos_token_ids)
        if params.min_tokens > 0 and len(stops) > MAX_SUPPRESSED:
            raise ValueError(
                f"stop_token_ids and end-of-sequence ids are {len(stops)}; with min_tokens at most {MAX_SUPPRESSED} are possible"
            )
        seed = next(self._seeds) if params.seed is None else params.seed
        return [Request(f"{request_id}-{i}", prompt_token_ids, params, max_tokens, frozenset(stops), seed, i) for i in range(params.n)]

    def _check_prompt(self, prompt_token_ids: list[int]) -> None:
        if not prompt_token_ids:
            raise ValueError("the prompt is empty; give at least one token")
        low, high, vocab = min(prompt_token_ids), max(prompt_token_ids), self.model_config.vocab_size
        if low < 0 or high >= vocab:
            raise ValueError(f"the prompt holds token id {low if low < 0 else high}; give ids from 0 to {vocab - 1}")

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError when it can never fit the pool."""
        self.scheduler.add(request)
        self.stats.prompt_tokens += request.num_prompt_tokens
        if request.sampling_params.prompt_logprobs is not None:
            self._prompt_logprobs[request] = [None] * request.num_prompt_tokens

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, stop_reason: int | str | None = None) -> Request | None:
        """End a request at any moment; its pages are free at once. None when it is not known (any more)."""
        request = self.scheduler.abort(request_id, reason, stop_reason)
        if request is not None:
            self._prompt_logprobs.pop(request, None)
        return request

    def step(self) -> list[TokenOutput]:
        """Dispatch the next step, then take in the results of the one before, which ran meanwhile."""
        began = time.perf_counter()
        scheduled = self.scheduler.schedule()
        launched = self.runner.dispatch(scheduled) if scheduled else None
        if scheduled:
            self._count(scheduled)
        waited, outputs = 0.0, []
        if self._in_flight:
            waiting = time.perf_counter()
            result = self._in_flight.collect()
            waited = time.perf_counter() - waiting
            outputs = self._update(self._in_flight.scheduled, result)
        self._in_flight = launched
        self.stats.wait_seconds += waited
        self.stats.host_seconds += time.perf_counter() - began - waited
        return outputs

    def _update(self, scheduled: SchedulerOutput, result: StepResult) -> list[TokenOutput]:
        live = {row.request.request_id: i for i, row in enumerate(scheduled.rows) if row.request.status is not RequestStatus.FINISHED}
        prompts = self._collect_prompt_logprobs(scheduled, result) if self._prompt_logprobs else {}
        outputs = self.scheduler.update(scheduled, result.ids[: len(scheduled.rows)].tolist())
        self.stats.generation_tokens += sum(output.token_id is not None for output in outputs)
        if result.logprobs or prompts:
            outputs = [self._with_logprobs(output, live[output.request_id], scheduled, result, prompts) for output in outputs]
        return outputs

    def _with_logprobs(self, output: TokenOutput, i: int, scheduled: SchedulerOutput, result: StepResult, prompts: dict) -> TokenOutput:
        count = scheduled.rows[i].request.sampling_params.logprobs
        found = None
        if count is not None and output.token_id is not None and result.logprobs:
            found = token_logprobs(output.token_id, result.logprobs, i, count)
        return replace(output, logprobs=found, prompt_logprobs=prompts.get(output.request_id))

    def _collect_prompt_logprobs(self, scheduled: SchedulerOutput, result: StepResult) -> dict[str, tuple[TokenLogprobs | None, ...]]:
        """Keep what the step says of prompts; returns those that are complete with this step.

        That may be a decode step, without any `result.prompt_logprobs`, when it computes a prompt's last token alone.
        """
        complete, first = {}, 0
        for row in scheduled.rows:
            request, kept = row.request, self._prompt_logprobs.get(row.request)
            if kept is not None:
                count = request.sampling_params.prompt_logprobs or 0
                for offset in range(min(row.num_tokens, request.num_prompt_tokens - row.start - 1)):
                    target = row.start + offset + 1
                    kept[target] = token_logprobs(request.prompt_token_ids[target], result.prompt_logprobs or (), first + offset, count)
                if row.start + row.num_tokens >= request.num_prompt_tokens:
                    complete[request.request_id] = tuple(self._prompt_logprobs.pop(request))
            first += row.num_tokens
        return complete

    def _count(self, scheduled: SchedulerOutput) -> None:
        stats, bucket = self.stats, self.runner.bucket_for(scheduled)
        stats.num_steps += 1
        stats.scheduled_tokens += scheduled.num_tokens
        stats.padded_tokens += bucket.num_tokens - scheduled.num_tokens


def token_logprobs(token_id: int, arrays: tuple, i: int, count: int) -> TokenLogprobs:
    """Entry i of a program's (logprob, rank, top ids, top logprobs), with the `count` best."""
    logprob, rank, top_ids, top_logprobs = arrays
    top = tuple(zip(top_ids[i, :count].tolist(), top_logprobs[i, :count].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprob[i]), int(rank[i]), top)
