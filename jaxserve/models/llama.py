"""The Llama family: Llama 2 and 3, SmolLM2, and what shares their block (arXiv:2302.13971, arXiv:2407.21783)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.kv_cache import KVCache
from jaxserve.layers.attention import Attention, AttentionMetadata
from jaxserve.layers.linear import Embedding, Linear
from jaxserve.layers.mlp import SwiGLU
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import rope_angles
from jaxserve.layers.stack import run_blocks


class LlamaBlock(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = SwiGLU(config, dtype)

    def __call__(self, x, cos, sin, k_pages, v_pages, metadata):
        y, k_pages, v_pages = self.attention(self.attention_norm(x), cos, sin, k_pages, v_pages, metadata)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), k_pages, v_pages


class LlamaForCausalLM(nnx.Module):
    """Token ids to hidden states over the page pool, and hidden states to logits.

    Built abstract (parameters have shapes but no values); jaxserve.loader fills it, or the caller does.
    """

    def __init__(self, config: ModelConfig, dtype):
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.blocks = nnx.List([LlamaBlock(config, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, (config.vocab_size,), dtype, ("embed", "vocab"), bias=config.head_bias)

    def __call__(self, token_ids, positions, rope_lens, kv_cache: KVCache, metadata: AttentionMetadata):
        """token_ids, positions, rope_lens i32[T] -> (hidden [T, hidden], kv_cache with the new keys and values)."""
        config = self.config
        x = self.embedding(token_ids)
        cos, sin = rope_angles(config.rope, config.head_dim, config.max_position_embeddings, positions, rope_lens)
        cos, sin = jax.lax.optimization_barrier((cos, sin))  # else XLA fuses, and computes, them anew in every layer
        x, kv_cache = run_blocks(self.blocks, x, cos, sin, kv_cache, metadata)
        return self.norm(x), kv_cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [R, vocab] of hidden states [R, hidden]."""
        if self.head is None:
            return self.embedding.attend(hidden)
        return self.head(hidden).astype(jnp.float32)
