"""Which attention backend an engine takes, and that each gives the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import pallas_kernels
from jaxserve import LLM, SamplingParams
from jaxserve.config import ATTENTION_BACKENDS, ModelConfig
from jaxserve.kv_cache import abstract_kv_cache
from jaxserve.layers.attention import attention_path

LLAMA = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 2, 32, 8, 128, 8192)


def cpu_mesh(size=1):
    return Mesh(np.array(jax.devices()[:size]).reshape(1, size), ("data", "tensor"))


def test_the_config_knows_every_backend():
    assert ("auto", *pallas_kernels.BACKENDS) == ATTENTION_BACKENDS


def test_auto_on_a_cpu_takes_native_loops_in_float32_and_says_why(make_llm):
    path, reason = attention_path("auto", LLAMA, cpu_mesh(), "float32", "float32", None)
    assert (path.backend, path.interpret, path.mesh, reason) == ("numba", False, None, "cpu has a kernel for this shape")
    assert "attention numba: cpu has a kernel for this shape" in make_llm().engine.ledger.lines()
    path, reason = attention_path("auto", LLAMA, cpu_mesh(), "bfloat16", "bfloat16", None)
    assert path.backend == "xla" and "float32 queries and pages, not bfloat16" in reason


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS[4:])
def test_a_kernel_of_another_platform_is_interpreted_on_a_cpu(backend):
    path, reason = attention_path(backend, LLAMA, cpu_mesh(2), "bfloat16", "bfloat16", None)
    assert path.interpret and "interpreted" in reason
    assert path.mesh is not None  # each device runs the kernel over its own heads


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_kernels(make_llm, monkeypatch, deterministic):
    asked, attend = set(), pallas_kernels.paged_attention
    monkeypatch.setattr(pallas_kernels, "paged_attention", lambda *a, **k: asked.add(k["deterministic"]) or attend(*a, **k))
    make_llm(deterministic=deterministic).generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert asked == {deterministic}


@pytest.mark.parametrize(("backend", "page_size"), [("xla", 16), ("mosaic_gpu", 16), ("mosaic_tpu", 128), ("mosaic_tpu_lanes", 128)])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_pool_has_the_backends_layout_and_splits_its_heads(backend, page_size, stacked):
    assert attention_path(backend, LLAMA, cpu_mesh(), "bfloat16", "bfloat16", None)[0].page_size == page_size
    pool = abstract_kv_cache(LLAMA, 5, page_size, "bfloat16", cpu_mesh(4), backend, stacked)
    assert pool.num_slots == (10 if stacked else 5) * page_size and pool.stacked == stacked
    for pages in (*pool.k_pages, *pool.v_pages):
        assert pages.shape == pallas_kernels.pool_shape(10 if stacked else 5, page_size, 8, 128, backend)
        axis = pallas_kernels.pool_axes(backend).index("kv_heads")
        assert pages.sharding.shard_shape(pages.shape)[axis] == 2


WIDE = ModelConfig("LlamaForCausalLM", 256, 64, 128, 2, 4, 2, 128, 256, tie_word_embeddings=True, eos_token_ids=(0,))
PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(n)] for i, n in enumerate((1, 9, 40, 3))]
SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_buckets": (4,),
    "token_buckets": (32,),
    "num_pages": 10,
    "compilation_cache_dir": "none",
}


@pytest.fixture(scope="module")
def wide_model(make_model):
    return make_model(WIDE)


def greedy(model, **options):
    llm = LLM(model, progress=False, **(SMALL | options))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.engine.page_manager.num_free_pages == llm.engine.page_manager.num_usable_pages
    return [output.outputs[0] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"layer_loop": "unrolled", "tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("backend", ["mosaic_tpu", "mosaic_tpu_lanes"])
def test_interpreted_kernels_give_the_same_tokens(wide_model, backend, options):
    expected = greedy(wide_model, attention_backend="reference")
    for got, want in zip(greedy(wide_model, attention_backend=backend, **options), expected, strict=True):
        assert got.token_ids == want.token_ids


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11), reason="the Hopper kernels need JAX 0.11, that is Python 3.12"
)
@pytest.mark.parametrize("options", [{}, {"layer_loop": "unrolled", "page_size": 32}], ids=str)
def test_interpreted_hopper_kernels_give_the_same_logprobs(make_model, options):
    """They take 16-bit numbers only, in which the order of a sum shows, so a token may differ where two are as likely."""
    model = make_model(dataclasses.replace(WIDE, head_dim=64))
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model)))
    expected = greedy(model, attention_backend="reference", num_pages=24)
    for got, want in zip(greedy(model, attention_backend="mosaic_gpu", **({"num_pages": 24} | options)), expected, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(got.token_ids, want.token_ids, strict=True)) if a != b), len(want.token_ids))
        assert same > 0
        for a, b in zip(got.logprobs[: same + 1], want.logprobs[: same + 1], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=0.03)
