"""The whole engine on a tiny model: tokens do not depend on batch, chunks, pages, buckets, preemption or devices."""

import math

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.request import FinishReason

LENGTHS = (1, 5, 40, 17, 33, 64, 3, 9, 11, 50, 16, 15)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, min_p=0.01, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(1)
    return [random.integers(1, 256, n).tolist() for n in LENGTHS]


def tokens(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    return [[c.token_ids for c in output.outputs] for output in outputs]


def assert_idle(llm):
    llm.engine.step()  # the step that was in flight when the last request ended
    assert not llm.engine.has_unfinished
    llm.engine.scheduler.check_integrity()
    assert llm.engine.page_manager.num_free_pages == llm.engine.page_manager.num_usable_pages


@pytest.fixture(scope="module")
def solo(make_llm, prompts):
    """Each prompt alone, greedy and random."""
    llm = make_llm()
    return {params: [tokens(llm, [p], params)[0] for p in prompts] for params in (GREEDY, RANDOM)}


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "token_buckets": (8,)},
        {"max_num_batched_tokens": 128, "token_buckets": (16, 128), "decode_buckets": (2, 4, 8)},
        {"page_size": 8, "layer_loop": "unrolled"},
        {"page_size": 32, "attention_backend": "reference"},
        {"page_size": 128},
        {"num_pages": 12},  # preempts: 8 requests of up to 88 tokens want 48 pages
        {"tensor_parallel_size": 4},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_computed(make_llm, prompts, solo, params, options):
    llm = make_llm(**options)
    assert tokens(llm, prompts, params) == solo[params]
    if "num_pages" in options:
        assert llm.engine.scheduler.num_preemptions > 0


def test_a_mixed_batch_of_greedy_and_random_rows(make_llm, prompts, solo):
    settings = [GREEDY if i % 2 else RANDOM for i in range(len(prompts))]
    outputs = make_llm().generate(prompts, settings, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [solo[s][i][0] for i, s in enumerate(settings)]


def test_n_gives_different_sequences_that_repeat(make_llm, prompts):
    params = SamplingParams(n=4, temperature=1, seed=42, max_tokens=16, ignore_eos=True)
    first, again = tokens(make_llm(), [prompts[1]], params), tokens(make_llm(), [prompts[0], prompts[1]], params)[1:]
    assert first == again
    assert len({tuple(ids) for ids in first[0]}) == 4
    assert tokens(make_llm(), [prompts[1]], SamplingParams(temperature=1, seed=42, max_tokens=16, ignore_eos=True))[0][0] == first[0][0]


def test_without_a_seed_calls_differ(make_llm, prompts):
    params = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    assert tokens(make_llm(), [prompts[1]], params) != tokens(make_llm(), [prompts[1]], params)


def test_logprobs_are_the_models_own(make_llm, prompts):
    """A sampled token's logprob equals the one that scoring the whole text gives, whatever the temperature."""
    llm = make_llm()
    params = SamplingParams(temperature=1.5, top_k=20, seed=1, max_tokens=12, logprobs=3, ignore_eos=True)
    output = llm.generate([prompts[2]], params, use_tqdm=False)[0]
    completion = output.outputs[0]
    score = llm.score([prompts[2]], [completion.token_ids], use_tqdm=False)[0]
    assert [entry.logprob for entry in completion.logprobs] == pytest.approx(score.logprobs, abs=1e-5)
    for entry in completion.logprobs:
        assert len(entry.top) == 3
        best = [value for _, value in entry.top]
        assert best == sorted(best, reverse=True)
        assert (entry.rank == 1) == (entry.top[0][0] == entry.token_id)
        assert sum(math.exp(v) for v in best) < 1


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "token_buckets": (8,)}, {"num_pages": 12}], ids=str)
def test_prompt_logprobs_do_not_depend_on_chunks(make_llm, prompts, options):
    whole = make_llm(max_num_batched_tokens=128, token_buckets=(16, 128), decode_buckets=(2, 4, 8)).score(prompts, use_tqdm=False)
    chunked = make_llm(**options).score(prompts, use_tqdm=False)
    for a, b, prompt in zip(whole, chunked, prompts, strict=True):
        assert a.token_ids == prompt
        assert len(a.logprobs) == len(prompt) - 1
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert a.is_greedy == b.is_greedy


def test_a_target_after_an_empty_prompt_is_refused(make_llm):
    """Its first token has no prediction; after one token it has."""
    with pytest.raises(ValueError, match=r"prompts\[1\] has no tokens"):
        make_llm().score([[5], []], [[7], [7]], use_tqdm=False)
    [score] = make_llm().score([[5]], [[7, 8]], use_tqdm=False)
    assert (score.token_ids, score.num_context_tokens, len(score.logprobs)) == ([5, 7, 8], 1, 2)


def test_prompt_and_output_logprobs_together(make_llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=2, ignore_eos=True)
    for prompt in prompts[:5]:  # one is 33 tokens long: 32 in a mixed step and the last in a decode step
        output = make_llm().generate([prompt], params, use_tqdm=False)[0]
        assert output.prompt_logprobs[0] is None
        assert [e.token_id for e in output.prompt_logprobs[1:]] == prompt[1:]
        assert all(len(e.top) == 2 for e in output.prompt_logprobs[1:])
        assert [e.top for e in output.outputs[0].logprobs] == [()] * 4


def test_stops(make_llm, prompts, solo):
    """An end-of-sequence id or a stop id ends the text; min_tokens holds it back."""
    ids = solo[GREEDY][2][0]
    stop = next(t for i, t in enumerate(ids) if i and t not in ids[:i])
    at = ids.index(stop)
    llm = make_llm()
    stopped = llm.generate([prompts[2]], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop]), use_tqdm=False)[0].outputs[0]
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (ids[: at + 1], FinishReason.STOP, stop)
    longer = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], min_tokens=at + 3)
    held = llm.generate([prompts[2]], longer, use_tqdm=False)[0].outputs[0]
    assert stop not in held.token_ids[: at + 2]
    assert len(held.token_ids) >= at + 3


def test_nothing_compiles_after_the_start(make_llm, prompts):
    import jax

    llm, compiled = make_llm(), []
    jax.monitoring.register_event_duration_secs_listener(lambda name, s, **kw: compiled.append(name) if "backend_compile" in name else None)
    for n in (1, 2, 3, 5, 8):
        for params in (GREEDY, RANDOM, SamplingParams(n=2, logprobs=2, prompt_logprobs=1, min_tokens=2, max_tokens=5)):
            llm.generate(prompts[:n], params, use_tqdm=False)
    jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_aborts_free_pages_at_any_moment(make_llm, prompts):
    engine = make_llm().engine
    for after in range(6):
        requests = [engine.make_requests(p, GREEDY, f"abort-{after}-{i}")[0] for i, p in enumerate(prompts)]
        for request in requests:
            engine.add_request(request)
        for _ in range(after):
            engine.step()
            engine.scheduler.check_integrity()
        for request in requests:
            engine.abort(request.request_id)
            engine.scheduler.check_integrity()
        assert engine.step() == []
        assert_idle(make_llm())


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e308}, {"top_p": 1e-320}, {"min_p": 1e-320}, {"top_k": 10**30}, {"seed": -(2**63)}], ids=str
)
def test_extreme_settings_are_served(make_llm, prompts, extreme):
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 8, "ignore_eos": True, **extreme})
    first, again = (tokens(make_llm(), [prompts[0]], params)[0][0] for _ in range(2))
    assert first == again
    assert len(first) == 8


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_id_may_come_again_while_its_aborted_request_is_in_flight(make_llm, prompts, steps):
    """The second request gets its own prompt logprobs, not those that the first one's step still brings."""
    engine, params = make_llm().engine, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    first, second, other = (p for p in prompts if len(p) in (50, 33, 40))
    for request in engine.make_requests(first, params, "id") + engine.make_requests(other, params, "other"):
        engine.add_request(request)
    for _ in range(steps):
        engine.step()
    engine.abort("id-0")
    engine.add_request(engine.make_requests(second, params, "id")[0])
    outputs = []
    while engine.has_unfinished:
        outputs += [o for o in engine.step() if o.request_id == "id-0"]
    (found,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert [entry.token_id for entry in found[1:]] == second[1:]
    assert [entry.logprob for entry in found[1:]] == pytest.approx(make_llm().score([second], use_tqdm=False)[0].logprobs, abs=1e-5)
    assert len(outputs) == 4
    assert not engine._prompt_logprobs


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([256], {}, "token id 256; give ids from 0 to 255"),
        ([-1], {}, "token id -1"),
        ([1] * 300, {}, r"the prompt has 300 tokens, which leaves no room .* max_model_len \(256\)"),
        ([1] * 256, {}, "the prompt has 256 tokens, which leaves no room"),
        ([1] * 257, {"max_tokens": 0}, r"together 257, more than max_model_len \(256\)"),
        ([1] * 250, {"max_tokens": 7}, r"together 257, more than max_model_len \(256\)"),
        ([1], {"stop_token_ids": [256]}, "stop_token_ids holds 256; give ids from 0 to 255"),
    ],
)
def test_impossible_requests_are_refused(make_llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        make_llm().engine.make_requests(prompt, SamplingParams(**params), "bad")


def test_a_request_larger_than_the_pool_is_refused(make_llm):
    engine = make_llm(num_pages=12).engine
    with pytest.raises(ValueError, match=r"page pool holds \(12 pages of 16 tokens\)"):
        engine.make_requests([1] * 100, SamplingParams(max_tokens=100), "large")
    assert engine.make_requests([1] * 100, SamplingParams(max_tokens=None), "open")[0].max_tokens == 12 * 16 - 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 12}, "page_size is 12; give a multiple of 8"),
        ({"max_model_len": 300}, "max_model_len is 300"),
        ({"tensor_parallel_size": 3}, "does not divide the model's num_kv_heads"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size is 64"),
        ({"kv_cache_memory": 100}, "raise num_pages, kv_cache_memory"),
    ],
)
def test_impossible_options_are_refused(make_llm, options, message):
    with pytest.raises(ValueError, match=message):
        make_llm(**options)
