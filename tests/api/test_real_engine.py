"""The API over the real engine: what a stand-in cannot show."""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import EOS, VOCAB, FakeTokenizer
from flax import nnx
from live_server import Live, error, strict, wait_until

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.compile_counter import CompileCounter
from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.models.llama import LlamaForCausalLM

MODEL = ModelConfig("LlamaForCausalLM", VOCAB, 64, 128, 2, 8, 4, 16, 512, tie_word_embeddings=True, eos_token_ids=(EOS,))
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def real():
    random = np.random.default_rng(0)
    model = LlamaForCausalLM(MODEL, jnp.float32)
    nnx.update(model, jax.tree.map(lambda p: jnp.asarray(random.normal(0, 0.15, p.shape), p.dtype), nnx.state(model)))
    options = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "decode_buckets": (4,),
        "token_buckets": (32,),
        "num_pages": 64,
        "compilation_cache_dir": "none",
        "max_num_queued_requests": 4,
    }
    counter = CompileCounter()
    llm = LLMEngine(EngineConfig.from_options(**options), model=model, model_config=MODEL, tokenizer=FakeTokenizer())
    counter.mark_ready()
    with contextlib.closing(Live(AsyncEngine(llm), llm=llm, compiles=counter)) as server:
        yield server


def idle(real: Live) -> bool:
    values = real.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(values[f'jaxserve:{name}{{model_name="fake-model"}}'] == 0 for name in names)


def test_stream_equals_whole(real: Live) -> None:
    body = {
        "prompt": "The sea",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "echo": True,
        "skip_special_tokens": False,
    }
    choice = strict(real.post("/v1/completions", **body).content)["choices"][0]
    found = [e["choices"][0] for e in real.events("/v1/completions", **body)]
    assert "".join(c["text"] for c in found) == choice["text"]
    for key, values in choice["logprobs"].items():
        assert [x for c in found if c["logprobs"] for x in c["logprobs"][key]] == values
        assert len(values) == len("The sea") + 1 + 24
    assert choice["text"].startswith("The sea")
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_scoring_agrees_with_generating(real: Live) -> None:
    made = real.complete([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True, logprobs=0).json()["choices"][0]["logprobs"]
    ids = [t.encode("latin1")[0] if len(t) == 1 else None for t in made["tokens"]]
    if None in ids:
        ids = [int(t.removeprefix("bytes:\\x"), 16) if t.startswith("bytes:") else ord(t) for t in made["tokens"]]
    scored = real.complete([1, 2, 3, *ids], max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    assert scored["logprobs"]["token_logprobs"][3:] == pytest.approx(made["token_logprobs"], abs=1e-4)
    assert scored["finish_reason"] == "length"


def test_several_sequences_with_a_seed(real: Live) -> None:
    body = {"prompt": "Hi", "n": 4, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    first = [c["text"] for c in real.post("/v1/completions", **body).json()["choices"]]
    assert len(set(first)) == 4
    with ThreadPoolExecutor(4) as pool:
        noise = [pool.submit(functools.partial(real.complete, "x" * i, max_tokens=20)) for i in range(1, 4)]
        again = [c["text"] for c in real.post("/v1/completions", **{**body, "n": 4}).json()["choices"]]
        assert {f.result().status_code for f in noise} <= {200, 503}
    assert again == first


def test_echo_of_several_sequences(real: Live) -> None:
    body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "logprobs": 1, "echo": True, "ignore_eos": True}
    for choice in real.post("/v1/completions", **body).json()["choices"]:
        assert len(choice["logprobs"]["tokens"]) == 5
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_a_closed_stream_frees_its_pages(real: Live) -> None:
    for body in ({}, {"n": 3}, {"prompt": ["a", "b"]}):
        with real.http.stream("POST", "/v1/completions", json={"prompt": "Hi", **LONG, **body, "stream": True}) as reply:
            lines = reply.iter_lines()  # kept, as httpx closes the answer with its iterator
            next(lines)
            assert real.engine.num_unfinished > 0
        assert wait_until(lambda: idle(real), 5)


def test_refusals_name_the_numbers(real: Live) -> None:
    found = error(real.complete("x" * 300, max_tokens=300))
    assert found["code"] == "context_length_exceeded"
    assert "512" in found["message"]
    for prompt in ([VOCAB], [-1]):
        assert error(real.complete(prompt))["param"] == "prompt"
    assert error(real.complete(stop_token_ids=[VOCAB]))["param"] == "stop_token_ids"
    assert wait_until(lambda: idle(real), 5)


def test_nothing_is_compiled_while_serving(real: Live) -> None:
    for n, size in ((1, 1), (3, 20), (4, 70)):
        for extra in ({}, {"logprobs": 3}, {"logprobs": 1, "echo": True}, {"top_k": 5, "top_p": 0.5}, {"temperature": 0}):
            assert real.complete("x" * size, n=n, max_tokens=5, **extra).status_code == 200
    values = real.metrics()
    assert values['jaxserve:compiles_total{model_name="fake-model"}'] > 0
    assert values['jaxserve:compiles_after_ready_total{model_name="fake-model"}'] == 0


def test_metrics_add_up(real: Live) -> None:
    before = real.metrics()
    usage = real.complete("The quick", n=2, max_tokens=7, ignore_eos=True).json()["usage"]
    after = real.metrics()

    def grown(name: str) -> float:
        key = f'jaxserve:{name}{{model_name="fake-model"}}'
        return after[key] - before[key]

    assert grown("generation_tokens_total") == usage["completion_tokens"] == 14
    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("request_queue_time_seconds_count") == 2
    assert grown("scheduled_tokens_total") > 0


@pytest.mark.parametrize(
    ("body", "param"), [({"n": 9}, "n"), ({"prompt": ["a"] * 9}, "prompt"), ({"prompt": ["a"] * 5, "n": 2}, "n")], ids=str
)
def test_more_sequences_than_can_ever_wait_are_no_503(real: Live, body: dict, param: str) -> None:
    refused = error(real.complete(**{"prompt": "a", "max_tokens": 1, **body}))
    assert refused["param"] == param
    assert refused["message"].endswith("allow 8; send fewer prompts at once, lower n, or raise max_num_queued_requests")
    assert real.complete(n=8, max_tokens=1).status_code == 200


def test_a_compilation_is_counted() -> None:
    counter = CompileCounter()
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
    assert counter.count >= 1
    assert counter.seconds > 0
    counter.mark_ready()
    assert counter.count_after_ready == 0
    jax.jit(lambda x: x * 5 + 2)(jnp.ones(5))
    assert counter.count_after_ready >= 1
