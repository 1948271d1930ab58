"""Scheduler: which tokens of which requests the next step computes, and what becomes of the tokens that it samples.

One rule covers prompts, chunks of prompts, single decode tokens and recomputation after preemption. A request knows its tokens (prompt
and delivered outputs), perhaps with one more still pending on the device, and has computed the first `num_computed_tokens` of them:

    num_left = num_tokens + num_pending_tokens - num_computed_tokens

A step computes a run of the tokens left. When none is left after it, the last one's logits give the next token, which is then pending
until `update` delivers it. Steps overlap: `schedule` for step t+1 comes before `update` of step t, so `schedule` counts what it hands
out as computed at once, and needs to know of a pending token only that it exists.

Order is first come, first served: `running` followed by `waiting` is always the order of arrival.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from jaxserve.config import SchedulerConfig
from jaxserve.engine.page_manager import PageManager
from jaxserve.request import FinishReason, Request, RequestStatus, TokenOutput, no_pages


@dataclass(slots=True)
class ScheduledRow:
    """Tokens start..start+num_tokens-1 of one request, to be computed in one step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # no token is left after this row, so that a new one is sampled
    pending_input: bool  # the row's one token is still on the device: the previous step sampled it for this request


@dataclass(slots=True)
class SchedulerOutput:
    """One step: the decode rows (one token, sampling), then the chunks of prompts, each in order of arrival."""

    rows: list[ScheduledRow]
    num_decode_rows: int
    num_tokens: int
    preempted: list[Request]

    @property
    def is_decode(self) -> bool:
        return self.num_decode_rows == len(self.rows)


class Scheduler:
    """Shares the tokens of a step and the pages of the pool among requests.

    - Every running decode is in every step. Out of pages, the newest running request is preempted: it gives up its pages and goes
      back to the front of `waiting`, to be computed again from its known tokens. The oldest can so always go on, and all requests end.
    - What decodes leave of `max_num_batched_tokens` goes to prompts, running before waiting ones. A prompt that cannot be finished in
      this step leaves a quarter to those behind it, so that short prompts need not wait for a long one; what they do not use comes
      back to it.
    - A waiting request is admitted when all its known tokens fit into free pages and one more page is free for each running request.
      So prompts never run out of pages half way, a new request is not preempted by the very next tokens of the old ones, and one
      just preempted, whose pages are less than enough, does not come back in the same step.
    """

    def __init__(self, config: SchedulerConfig, page_manager: PageManager):
        if config.max_model_len is None:
            raise ValueError("max_model_len is None; resolve the configuration with the model's own limit first")
        if not 1 <= config.max_num_seqs <= config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {config.max_num_seqs} and max_num_batched_tokens is {config.max_num_batched_tokens}; give max_num_seqs "
                "from 1 to max_num_batched_tokens, as each running request may need a token in each step"
            )
        self.max_model_len = config.max_model_len
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.page_manager = page_manager
        self.requests: dict[str, Request] = {}  # all unfinished ones, in order of arrival
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    # -- requests come and go

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """ValueError when a request of these lengths could not be finished even if it were alone; a pure check, for any thread.

        The whole length counts: a request whose prompt fits but whose output might not is refused at once, not failed half way.
        """
        if not num_prompt_tokens:
            raise ValueError("the prompt has 0 tokens; give at least 1")
        total, pages = num_prompt_tokens + max_tokens, self.page_manager
        if max_tokens and num_prompt_tokens >= self.max_model_len:  # no max_tokens would help
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for a new one within max_model_len "
                f"({self.max_model_len}); shorten the prompt, or start with a larger max_model_len"
            )
        lengths = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together {total}"
        if total > self.max_model_len:
            raise ValueError(f"{lengths}, more than max_model_len ({self.max_model_len}); shorten the prompt or lower max_tokens")
        if pages.num_pages_for(total) > pages.num_usable_pages:
            raise ValueError(
                f"{lengths}, more than the page pool holds ({pages.num_usable_pages} pages of {pages.page_size} tokens); shorten the "
                "prompt, lower max_tokens, or start with a larger num_pages or kv_cache_memory"
            )

    def add(self, request: Request) -> None:
        """Put a new request at the end of `waiting`; ValueError when its id is in use or it can never fit."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id!r} is in use by an unfinished request; give each request its own")
        self.check_fits(request.num_prompt_tokens, request.max_tokens)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, stop_reason: int | str | None = None) -> Request | None:
        """End a request at any moment, also between its step's `schedule` and `update`; None when it is unknown or ended already."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, reason, stop_reason)
        return request

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
        del self.requests[request.request_id]
        self._release_pages(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _release_pages(self, request: Request) -> None:
        self.page_manager.release(request.block_table)
        request.block_table = no_pages()

    # -- one step

    def schedule(self) -> SchedulerOutput | None:
        """The next step; None when there is nothing to compute now: no request is left, or all depend on a step not yet updated."""
        decodes, prompts, preempted = self._schedule_decodes()
        chunks = self._schedule_prompts(prompts, self.max_num_batched_tokens - len(decodes))
        num_tokens = len(decodes)
        prefills = []
        for row in chunks:
            request = row.request
            request.num_computed_tokens += row.num_tokens
            num_tokens += row.num_tokens
            if request.num_computed_tokens == request.num_tokens and request.max_tokens:
                row.samples = True
                request.num_pending_tokens = 1
            (decodes if row.samples and row.num_tokens == 1 else prefills).append(row)
        if not num_tokens:
            return None
        return SchedulerOutput(decodes + prefills, len(decodes), num_tokens, preempted)

    def _schedule_decodes(self) -> tuple[list[ScheduledRow], list[Request], list[Request]]:
        """Rows of all running requests with one token left, the running requests with more left, and those preempted for pages.

        This loop and the one in `update` run for each row of each step: they use plain fields, no properties.
        """
        rows, prompts, preempted = [], [], []
        running, page_size = self.running, self.page_manager.page_size
        i = 0
        while i < len(running):  # a preemption shortens it
            request = running[i]
            i += 1
            num_computed, num_pending = request.num_computed_tokens, request.num_pending_tokens
            num_outputs = len(request.output_token_ids) + num_pending
            num_left = len(request.prompt_token_ids) + num_outputs - num_computed
            if num_left == 1 and num_outputs < request.max_tokens:
                if num_computed == len(request.block_table) * page_size and not self._add_page(request, preempted):
                    break
                rows.append(ScheduledRow(request, num_computed, 1, True, num_pending > 0))
                request.num_computed_tokens = num_computed + 1
                request.num_pending_tokens = num_pending + 1  # 2 until the previous step's update
            elif num_left > num_pending:
                prompts.append(request)
            # else it ends, by length, with the pending token
        return rows, prompts, preempted

    def _add_page(self, request: Request, preempted: list[Request]) -> bool:
        """Grow a block table by a page, preempting newer requests as needed; False when that ends with the request itself."""
        while not self.page_manager.num_free_pages:
            newest = self.running.pop()
            self._release_pages(newest)
            newest.status = RequestStatus.WAITING
            newest.num_computed_tokens = 0
            newest.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(newest)
            preempted.append(newest)
            if newest is request:
                return False
        request.block_table.extend(self.page_manager.allocate(1))
        return True

    def _schedule_prompts(self, prompts: list[Request], budget: int) -> list[ScheduledRow]:
        """Share `budget` tokens among the running `prompts` and newly admitted requests."""
        rows = []
        requests = chain(prompts, self._admit())
        while budget and (request := next(requests, None)):
            num_left = request.num_tokens - request.num_computed_tokens
            num_tokens = num_left if num_left <= budget else max(1, budget * 3 // 4)
            rows.append(ScheduledRow(request, request.num_computed_tokens, num_tokens, False, False))
            budget -= num_tokens
        for row in rows:  # what is not used behind a prompt goes back to it
            extra = min(budget, row.request.num_tokens - row.start - row.num_tokens)
            row.num_tokens += extra
            budget -= extra
        return rows

    def _admit(self) -> Iterator[Request]:
        """Move waiting requests to `running`, with pages for all their known tokens, one each time the caller asks for one."""
        pages = self.page_manager
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            num_pages = pages.num_pages_for(request.num_tokens)
            # One preempted with a token pending knows that token only after the update.
            if request.num_pending_tokens or num_pages + len(self.running) > pages.num_free_pages:
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status = RequestStatus.RUNNING
            request.block_table.extend(pages.allocate(num_pages))
            if request.scheduled_time_s is None:
                request.scheduled_time_s = time.monotonic()
            yield request

    def update(self, output: SchedulerOutput, sampled: Sequence[int]) -> list[TokenOutput]:
        """Deliver a step's sampled tokens, one id a row (any where the row does not sample), and end the requests they end.

        Steps are updated in the order they were scheduled. Rows of requests that ended meanwhile give nothing. A request ends with
        a stop token or with max_tokens, which `check_fits` keeps within max_model_len.
        """
        outputs = []
        now_s = time.monotonic()
        for row, token in zip(output.rows, sampled, strict=True):
            request = row.request
            if request.finish_reason is not None:
                continue
            if not row.samples:
                if not request.max_tokens and row.start + row.num_tokens == len(request.prompt_token_ids):
                    self._finish(request, FinishReason.LENGTH)
                    outputs.append(TokenOutput(request.request_id, None, finish_reason=FinishReason.LENGTH))
                continue
            request.num_pending_tokens -= 1
            tokens = request.output_token_ids
            tokens.append(token)
            if len(tokens) == 1:
                request.first_token_time_s = now_s
            if token in request.stop_token_ids:
                # An end-of-sequence token needs no name; one of the request's own does.
                self._finish(request, FinishReason.STOP, token if token in request.sampling_params.stop_token_ids else None)
            elif len(tokens) == request.max_tokens:
                self._finish(request, FinishReason.LENGTH)
            outputs.append(TokenOutput(request.request_id, token, None, None, request.finish_reason, request.stop_reason))
        return outputs

    def check_integrity(self) -> None:
        """AssertionError unless queues, counts and pages agree; for tests and debugging, as it looks at every page."""
        if [*self.running, *self.waiting] != list(self.requests.values()):
            raise AssertionError("running followed by waiting is not the order of arrival")
        if len(self.running) > self.max_num_seqs:
            raise AssertionError(f"{len(self.running)} requests run, more than max_num_seqs ({self.max_num_seqs})")
        for request in self.running:
            num_computed, num_pages = request.num_computed_tokens, len(request.block_table)
            if request.status is not RequestStatus.RUNNING or num_computed > request.num_tokens + request.num_pending_tokens:
                raise AssertionError(f"a running request has computed more tokens than it has: {request}")
            if num_pages < self.page_manager.num_pages_for(num_computed):
                raise AssertionError(f"{num_computed} computed tokens are in {num_pages} pages: {request}")
        for request in self.waiting:
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens or request.block_table:
                raise AssertionError(f"a waiting request holds pages: {request}")
        self.page_manager.check_integrity(request.block_table for request in self.requests.values())
