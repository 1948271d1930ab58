"""A random Llama of two layers in a real engine, without a tokenizer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine.llm_engine import LLMEngine
from jaxserve.models.llama import LlamaForCausalLM

CONFIG = ModelConfig("LlamaForCausalLM", 128, 32, 64, 2, 4, 2, 8, 256, tie_word_embeddings=True)


def tiny_engine(**options):
    graph, state = nnx.split(LlamaForCausalLM(CONFIG, "float32"))
    shapes, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [0.1 * jax.random.normal(key, s.shape, jnp.float32) for key, s in zip(keys, shapes, strict=True)]
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 33, "compilation_cache_dir": "none"}
    model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return LLMEngine(EngineConfig.from_options(**(limits | options)), model=model, model_config=CONFIG)
