"""A scheduler driven like the engine drives it, over a simulated device whose page pool holds tokens instead of keys and values."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from jaxserve.config import SchedulerConfig
from jaxserve.engine.page_manager import DUMMY_PAGE, PageManager
from jaxserve.engine.scheduler import Scheduler, SchedulerOutput
from jaxserve.request import FinishReason, Request, RequestStatus
from jaxserve.sampling_params import SamplingParams

VOCAB_SIZE = 8


def next_token(context: list[int]) -> int:
    """The simulated model: any missing, doubled or wrong token in the context gives, most likely, another one."""
    return zlib.crc32(bytes(context)) % VOCAB_SIZE


def make_request(
    request_id: str, prompt: Iterable[int], max_tokens: int, end_ids: Iterable[int] = (), stop_token_ids: Iterable[int] = ()
) -> Request:
    params = SamplingParams(stop_token_ids=tuple(stop_token_ids))
    return Request(request_id, list(prompt), params, max_tokens, frozenset(end_ids) | frozenset(params.stop_token_ids))


def expected_end(request: Request) -> tuple[list[int], FinishReason, int | None]:
    """Tokens, finish reason and stop reason of a request, worked out without batches or pages."""
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        tokens.append(next_token(request.prompt_token_ids + tokens))
        if tokens[-1] in request.stop_token_ids:
            own = tokens[-1] in request.sampling_params.stop_token_ids
            return tokens, FinishReason.STOP, tokens[-1] if own else None
    return tokens, FinishReason.LENGTH, None


class SimulatedDevice:
    """Runs steps in the order of their dispatch, as a device does; the context of a token is read back through the block table."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.pool: list[list[int]] = [[255] * page_size for _ in range(num_pages)]  # 255 is no token: never written
        self.previous: dict[Request, int] = {}  # tokens that the last step sampled

    def run(self, output: SchedulerOutput) -> list[int]:
        for row in output.rows:
            request, end = row.request, row.start + row.num_tokens
            assert DUMMY_PAGE not in request.block_table
            assert row.pending_input == (end > request.num_tokens)
            tokens = request.token_ids(row.start, end - row.pending_input)
            if row.pending_input:
                tokens.append(self.previous[request])
            assert len(tokens) == row.num_tokens > 0
            for position, token in enumerate(tokens, row.start):
                self.pool[request.block_table[position // self.page_size]][position % self.page_size] = token
        sampled = [next_token(self._context(row.request, row.start + row.num_tokens)) if row.samples else -1 for row in output.rows]
        self.previous = {row.request: token for row, token in zip(output.rows, sampled, strict=True) if row.samples}
        return sampled

    def _context(self, request: Request, length: int) -> list[int]:
        return [self.pool[request.block_table[i // self.page_size]][i % self.page_size] for i in range(length)]


class Simulation:
    """Scheduler and device together; each step is checked against the scheduler's promises."""

    def __init__(
        self, usable_pages: int, page_size: int = 4, max_num_seqs: int = 4, max_num_batched_tokens: int = 16, max_model_len: int = 1000
    ):
        config = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        self.pages = PageManager(usable_pages + 1, page_size)
        self.scheduler = Scheduler(config, self.pages)
        self.device = SimulatedDevice(usable_pages + 1, page_size)
        self.in_flight: tuple[SchedulerOutput, list[int]] | None = None
        self.requests: list[Request] = []  # all ever added
        self.received: dict[Request, list[int]] = {}
        self.num_schedules = 0

    def add(self, prompt: Iterable[int], max_tokens: int, end_ids: Iterable[int] = (), stop_token_ids: Iterable[int] = ()) -> Request:
        request = make_request(f"request-{len(self.requests)}", prompt, max_tokens, end_ids, stop_token_ids)
        self.scheduler.add(request)
        self.requests.append(request)
        self.received[request] = []
        return request

    def step(self) -> SchedulerOutput | None:
        """One step of depth-1 overlap: schedule and dispatch the next one, then update the one before."""
        output = self.dispatch()
        launched = (output, self.device.run(output)) if output else None
        self.collect()
        self.in_flight = launched
        return output

    def dispatch(self) -> SchedulerOutput | None:
        scheduler = self.scheduler
        decoding = [r for r in scheduler.running if is_decoding(r)]
        num_preemptions = scheduler.num_preemptions
        output = scheduler.schedule()
        self.num_schedules += 1
        scheduler.check_integrity()
        rows = output.rows if output else []
        scheduled = {row.request for row in rows}
        assert all(r in scheduled or r.status is RequestStatus.WAITING for r in decoding), "a decode is left out"
        if output is None:
            assert self.in_flight or not scheduler.has_unfinished, "work is left, but nothing is scheduled"
            return None
        self._check_output(output)
        assert len(output.preempted) == scheduler.num_preemptions - num_preemptions
        return output

    def _check_output(self, output: SchedulerOutput) -> None:
        scheduler, rows = self.scheduler, output.rows
        limit = scheduler.max_num_batched_tokens
        assert rows and len(rows) <= scheduler.max_num_seqs
        assert output.num_tokens == sum(row.num_tokens for row in rows) <= limit
        assert len({row.request for row in rows}) == len(rows)
        assert all(request.status is RequestStatus.WAITING for request in output.preempted)
        assert all(row.request.status is RequestStatus.RUNNING for row in rows)
        kinds = [row.samples and row.num_tokens == 1 for row in rows]
        assert kinds == [True] * output.num_decode_rows + [False] * (len(rows) - output.num_decode_rows)
        arrival = {request: i for i, request in enumerate(self.requests)}
        for part in (rows[: output.num_decode_rows], rows[output.num_decode_rows :]):
            order = [arrival[row.request] for row in part]
            assert order == sorted(order)
        for request in scheduler.running:
            unused = output.num_tokens < limit
            assert not unused or request.num_computed_tokens >= request.num_tokens, "a prompt is cut although tokens are left"

    def collect(self) -> None:
        """Update the step in flight, if any."""
        if self.in_flight is None:
            return
        outputs = self.scheduler.update(*self.in_flight)
        self.in_flight = None
        self.scheduler.check_integrity()
        by_id = {request.request_id: request for request in self.requests}
        for output in outputs:
            request = by_id[output.request_id]
            if output.token_id is not None:
                self.received[request].append(output.token_id)
            assert output.finish_reason == request.finish_reason
            assert output.stop_reason == request.stop_reason

    def finish(self) -> None:
        """Step until all is done, in a number of steps that the oldest request's constant progress bounds, and check all results."""
        limit = sum(r.num_prompt_tokens + r.max_tokens + 4 for r in self.scheduler.requests.values()) + 2
        steps = 0
        while self.scheduler.has_unfinished or self.in_flight:
            self.step()
            steps += 1
            assert steps <= limit, "requests do not end"
        assert self.pages.num_free_pages == self.pages.num_usable_pages
        for request in self.requests:
            self.check_end(request)

    def check_end(self, request: Request) -> None:
        tokens, finish_reason, stop_reason = expected_end(request)
        assert request.status is RequestStatus.FINISHED
        assert request.output_token_ids == self.received[request]
        if request.finish_reason is FinishReason.ABORT:
            assert self.received[request] == tokens[: len(self.received[request])]
        else:
            assert (self.received[request], request.finish_reason, request.stop_reason) == (tokens, finish_reason, stop_reason)


def is_decoding(request: Request) -> bool:
    """Whether all tokens but the last are computed and one more may be sampled."""
    num_outputs = len(request.output_token_ids) + request.num_pending_tokens
    return request.num_computed_tokens == request.num_prompt_tokens + num_outputs - 1 and num_outputs < request.max_tokens


def rows(output: SchedulerOutput | None) -> list[tuple[str, int, int, bool]]:
    """(request id's number, start, num_tokens, samples) of each row."""
    return (
        [(row.request.request_id.removeprefix("request-"), row.start, row.num_tokens, row.samples) for row in output.rows] if output else []
    )


def prompt(length: int) -> list[int]:
    return [i % 8 for i in range(length)]
