"""AsyncEngine over the tiny model: streams belong to their callers, whatever ids these choose."""

import asyncio
from contextlib import aclosing

from jaxserve import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


async def ids(engine, prompt):
    return [t async for out in engine.generate(prompt, PARAMS, "same") for c in out.outputs for t in c.token_ids]


def test_an_id_used_twice_does_not_mix_streams(make_llm):
    llm = make_llm()
    prompts = [[1, 2, 3], [9, 8, 7, 6], [5] * 20]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, PARAMS, use_tqdm=False)]

    async def run():
        engine = AsyncEngine(llm.engine)
        engine.start()
        assert await asyncio.gather(*(ids(engine, p) for p in prompts)) == expected  # at the same time
        async with aclosing(engine.generate(prompts[0], PARAMS, "same")) as outputs:
            assert (await anext(outputs)).request_id == "same"
        assert await ids(engine, prompts[1]) == expected[1]  # just after one that was left
        assert engine.is_healthy
        await engine.shutdown(5)

    asyncio.run(run())
