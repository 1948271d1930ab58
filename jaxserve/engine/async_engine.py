"""AsyncEngine: the engine's own thread, and asyncio streams of what it makes; one wake-up of the event loop a step."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable

from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.engine.output_processor import SequenceProcessor
from jaxserve.request import EngineStopped, FinishReason, QueueFull, Request, RequestOutput, TokenOutput
from jaxserve.sampling_params import SamplingParams


class AsyncEngine:
    """Serves an LLMEngine from asyncio. All methods but the constructor run on the event loop that called start()."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.error: BaseException | None = None
        self.on_finish: Callable[[Request], None] = lambda request: None  # called on the event loop for every ended sequence
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[TokenOutput | BaseException]] = {}
        self._requests: dict[str, Request] = {}
        self._numbers = itertools.count()
        self._accepting = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop  # set by start()

    def start(self) -> None:
        """Start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self._accepting = True
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        return self._accepting and self.error is None and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Sequences accepted and not ended."""
        return len(self._requests)

    def check_capacity(self, count: int = 1) -> None:
        """QueueFull when `count` more sequences would exceed what runs at once plus max_num_queued_requests; ValueError when always."""
        if not self.is_healthy:
            raise EngineStopped("the engine has stopped" if self.error else "the server is shutting down")
        limits = self.engine.config.scheduler
        if limits.max_num_queued_requests is None:
            return
        most = limits.max_num_seqs + limits.max_num_queued_requests
        if count > most:
            raise ValueError(
                f"the request is for {count} sequences, but max_num_seqs ({limits.max_num_seqs}) and max_num_queued_requests "
                f"({limits.max_num_queued_requests}) allow {most}; send fewer prompts at once, lower n, or raise max_num_queued_requests"
            )
        room = most - self.num_unfinished
        if count > room:
            raise QueueFull(
                f"{self.num_unfinished} requests run or wait, max_num_queued_requests is {limits.max_num_queued_requests}; retry later"
            )

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str, prompt: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Stream a prompt's n completions: each item holds only what is new; the last one has finished=True.

        ValueError for a request that can never run, QueueFull and EngineStopped when it cannot run now. Leaving the iterator aborts.
        """
        self.check_capacity(params.n)
        # The number makes the engine's ids unique: the caller may use an id again while a step still holds its aborted predecessor.
        requests = self.engine.make_requests(prompt_token_ids, params, f"{request_id}.{next(self._numbers)}")
        processors = {r.request_id: SequenceProcessor(r, self.engine.tokenizer) for r in requests}
        stream: asyncio.Queue[TokenOutput | BaseException] = asyncio.Queue()
        for request in requests:
            self._streams[request.request_id] = stream
            self._requests[request.request_id] = request
        self._commands.put(lambda: [self.engine.add_request(r) for r in requests])
        try:
            while processors:
                ready = [await stream.get()]
                while not stream.empty():
                    ready.append(stream.get_nowait())
                output = self._merge(ready, processors, RequestOutput(request_id, prompt, prompt_token_ids, []))
                output.finished = not processors
                if output.outputs or output.finished or output.prompt_logprobs is not None:
                    yield output
        finally:
            for unfinished in processors:
                self._end(unfinished, FinishReason.ABORT, None)

    def _merge(self, ready: list, processors: dict[str, SequenceProcessor], result: RequestOutput) -> RequestOutput:
        for item in ready:
            if isinstance(item, BaseException):
                raise EngineStopped(f"the engine stopped: {item}") from item
            processor = processors.get(item.request_id)
            if processor is None:
                continue  # a token that was in flight when its sequence ended by a stop string
            if item.prompt_logprobs is not None:
                result.prompt_logprobs = list(item.prompt_logprobs)
            delta = processor.process(item)
            result.outputs.append(delta)
            if processor.finished:
                del processors[item.request_id]
                self._end(item.request_id, FinishReason.STOP if processor.stopped_here else None, delta.stop_reason)
        return result

    def _end(self, request_id: str, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        """Forget a sequence; with a reason, also tell the engine, which does not know yet that it ended."""
        self._streams.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if reason is not None:
            request.finish_reason = reason
            self._commands.put(lambda: self.engine.abort(request_id, reason, stop_reason))
        self.on_finish(request)

    def _run(self) -> None:
        engine = self.engine
        try:
            while True:
                block = not engine.has_unfinished
                while block or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
                    block = not engine.has_unfinished and self._commands.empty()
                outputs = engine.step()
                if outputs:
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:
            self.error = error
            self._loop.call_soon_threadsafe(self._fail, error)
            raise

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _fail(self, error: BaseException) -> None:
        for stream in set(self._streams.values()):
            stream.put_nowait(error)

    async def shutdown(self, timeout_s: float) -> None:
        """Take no more requests, let the accepted ones finish for up to timeout_s, end the rest with EngineStopped, stop the thread."""
        self._accepting = False
        deadline = time.monotonic() + timeout_s
        while self._requests and time.monotonic() < deadline and self.error is None:
            await asyncio.sleep(0.01)
        if self._requests:
            self._fail(EngineStopped(f"the server shut down after waiting {timeout_s:g} s"))
            await asyncio.sleep(0)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, 10)
