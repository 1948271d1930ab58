"""Which attention backend an engine takes, and that each gives the same tokens."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import pallas_kernels
from jaxserve.config import ATTENTION_BACKENDS, ModelConfig
from jaxserve.kv_cache import abstract_kv_cache
from jaxserve.layers.attention import attention_path

LLAMA = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 2, 32, 8, 128, 8192)


def cpu_mesh(size=1):
    return Mesh(np.array(jax.devices()[:size]).reshape(1, size), ("data", "tensor"))


def test_the_config_knows_every_backend():
    assert ("auto", *pallas_kernels.BACKENDS) == ATTENTION_BACKENDS


def test_auto_takes_xla_on_a_cpu_and_says_why(make_llm):
    path, reason = attention_path("auto", LLAMA, cpu_mesh(), "bfloat16", "bfloat16", None)
    assert (path.backend, path.interpret, path.mesh) == ("xla", False, None)
    assert "cpu" in reason
    assert any(line.startswith("attention xla: ") for line in make_llm().engine.ledger.lines())


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS[3:])
def test_a_kernel_of_another_platform_is_interpreted_on_a_cpu(backend):
    path, reason = attention_path(backend, LLAMA, cpu_mesh(2), "bfloat16", "bfloat16", None)
    assert path.interpret and "interpreted" in reason
    assert path.mesh is not None  # each device runs the kernel over its own heads


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
