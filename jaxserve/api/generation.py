"""Runs the prompts of one HTTP request through the engine, and ends them when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request

from jaxserve.api.errors import from_value_error, unavailable
from jaxserve.api.metrics import PromptTracker
from jaxserve.api.state import Prompt, ServerState
from jaxserve.request import FinishReason, QueueFull, RequestOutput
from jaxserve.sampling_params import SamplingParams

T = TypeVar("T")
_PARAMS = set(SamplingParams.__dataclass_fields__) | {"prompt"}


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def generate(
    state: ServerState, prompts: list[Prompt], params: SamplingParams, request_id: str, arrival_s: float
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(prompt index, new output) as the engine makes them; closing it aborts all. Refusals are raised before the first item."""
    if len(prompts) == 1:
        async with aclosing(_one(state, prompts[0], params, request_id, arrival_s)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    sources = [_one(state, p, params, f"{request_id}-{i}", arrival_s) for i, p in enumerate(prompts)]
    async with aclosing(_merge(sources)) as merged:
        async for item in merged:
            yield item


async def _one(state: ServerState, prompt: Prompt, params: SamplingParams, request_id: str, arrival_s: float) -> AsyncIterator[RequestOutput]:
    tracker = PromptTracker(state.metrics, params.n, arrival_s)
    try:
        async with aclosing(state.engine.generate(prompt.token_ids, params, request_id, prompt.text)) as outputs:
            async for output in outputs:
                tracker.add(output)
                if any(c.finish_reason is FinishReason.ABORT for c in output.outputs):
                    raise unavailable("the request was ended because the server is shutting down", "shutting_down")
                yield output
    except QueueFull as e:
        tracker.forget()
        raise state.queue_full(e) from None
    except ValueError as e:
        tracker.forget()
        raise from_value_error(e, _PARAMS, "prompt") from None
    finally:
        tracker.close()


async def _merge(sources: list[AsyncIterator[RequestOutput]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Items of several iterators as they come, with the iterator's index; the first exception ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(i: int, source: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(source):  # type: ignore[type-var]
                async for output in source:
                    queue.put_nowait((i, output))
            queue.put_nowait((i, None))
        except Exception as e:
            queue.put_nowait((i, e))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(sources)]
    live = len(tasks)
    try:
        while live:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                live -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; ClientGone, with `work` cancelled, if the client leaves first. The body must have been read."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
