"""A random Llama of two layers in a real engine, without a tokenizer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.models.llama import LlamaForCausalLM

CONFIG = ModelConfig("LlamaForCausalLM", 128, 32, 64, 2, 4, 2, 8, 256, tie_word_embeddings=True)


def tiny_model():
    """The module with random weights, the same each time."""
    graph, state = nnx.split(LlamaForCausalLM(CONFIG, "float32"))
    shapes, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.1 * jax.random.normal(key, s.shape, jnp.float32) for key, s in zip(keys, shapes, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


LIMITS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_pages": 33,
    "decode_buckets": (4,),
    "token_buckets": (32,),
    "compilation_cache_dir": "none",
}


def tiny_engine(**options):
    return LLMEngine(EngineConfig.from_options(**(LIMITS | options)), model=tiny_model(), model_config=CONFIG)
