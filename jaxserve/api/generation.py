"""Runs the prompts of one HTTP request through the engine, and ends them when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request

from jaxserve.api.errors import ClientGone, from_value_error
from jaxserve.api.metrics import PromptTracker
from jaxserve.api.state import Prompt, ServerState
from jaxserve.request import EngineStopped, QueueFull, RequestOutput
from jaxserve.sampling_params import SamplingParams

T = TypeVar("T")
_PARAMS = set(SamplingParams.__dataclass_fields__)


async def generate(
    state: ServerState, prompts: list[Prompt], params: SamplingParams, request_id: str, arrival_s: float, prompt_field: str
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(prompt index, new output) as the engine makes them; closing it aborts all. Refusals are raised before the first item."""
    if len(prompts) == 1:
        async with aclosing(_one(state, prompts[0], params, request_id, arrival_s, prompt_field)) as outputs:
            async for output in outputs:
                yield 0, output
        return
    sources = [_one(state, p, params, f"{request_id}-{i}", arrival_s, prompt_field) for i, p in enumerate(prompts)]
    async with aclosing(_merge(sources)) as merged:
        async for item in merged:
            yield item


async def _one(
    state: ServerState, prompt: Prompt, params: SamplingParams, request_id: str, arrival_s: float, prompt_field: str
) -> AsyncGenerator[RequestOutput, None]:
    tracker = PromptTracker(state.metrics, params.n, arrival_s)
    try:
        async with aclosing(state.engine.generate(prompt.token_ids, params, request_id, prompt.text)) as outputs:
            async for output in outputs:
                tracker.add(output)
                yield output
    except EngineStopped as e:
        raise state.engine_stopped(e) from e
    except QueueFull as e:
        tracker.forget()
        raise state.queue_full(e) from None
    except ValueError as e:
        tracker.forget()
        raise from_value_error(e, _PARAMS, prompt_field) from None
    finally:
        tracker.close()


async def _merge(sources: list[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of several iterators as they come, with the iterator's index; the first exception ends all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def pump(i: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(source):
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
