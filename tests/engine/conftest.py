"""A tiny random model that engine tests build in the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.llm import LLM
from jaxserve.models.llama import LlamaForCausalLM

TINY = ModelConfig("LlamaForCausalLM", 256, 64, 128, 2, 8, 4, 16, 256, tie_word_embeddings=True, eos_token_ids=(0,))


def random_model(config: ModelConfig, seed: int = 0) -> LlamaForCausalLM:
    """A model whose weights are normal(0, 0.15): large enough for greedy margins that float32 rounding does not close."""
    random = np.random.default_rng(seed)
    model = LlamaForCausalLM(config, jnp.float32)
    nnx.update(model, jax.tree.map(lambda p: jnp.asarray(random.normal(0, 0.15, p.shape), p.dtype), nnx.state(model)))
    return model


@pytest.fixture(scope="session")
def make_model():
    """random_model, for a test's own configuration."""
    return random_model


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    return random_model(TINY)


@pytest.fixture(scope="session")
def make_llm(tiny_model, tmp_path_factory):
    """LLM over the tiny model; the options given override small defaults. Equal options give the same engine."""
    made = {}
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "decode_buckets": (8,), "token_buckets": (32,), "kv_cache_memory": 1 << 20}
    small["compilation_cache_dir"] = str(tmp_path_factory.mktemp("xla"))

    def make(**options) -> LLM:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = LLM(tiny_model, progress=False, **{**small, **options})
        return made[key]

    return make
