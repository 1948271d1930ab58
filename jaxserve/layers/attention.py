"""Self-attention over the page pool; the one place that calls pallas_kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxserve.config import ModelConfig
from jaxserve.layers.linear import Linear
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import apply_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Which tokens belong to which row, and where their keys and values are. T tokens, R rows, P table width."""

    block_tables: jax.Array  # i32[R, P] logical page -> page
    seq_lens: jax.Array  # i32[R] tokens of the row, those of this step included; 0: padding
    query_start_loc: jax.Array  # i32[R + 1] first token of each row
    slot_mapping: jax.Array  # i32[T] page * page_size + offset of each token; -1: padding
    distribution: jax.Array  # i32[2] (decode rows, rows): decode rows come first and have one token each
    decode_only: bool = field(default=False, metadata={"static": True})
    backend: str = field(default="xla", metadata={"static": True})


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245): q, k and v in one matmul whose output is grouped by KV head."""

    def __init__(self, config: ModelConfig, dtype):
        hidden, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.group = heads // kv_heads
        self.head_dim = head_dim
        self.qkv = Linear(hidden, (kv_heads, self.group + 2, head_dim), dtype, ("embed", "kv_heads", None, None), bias=config.qkv_bias)
        self.o = Linear(heads * head_dim, (hidden,), dtype, ("heads", "embed"), bias=config.o_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def __call__(self, x, cos, sin, k_pages, v_pages, metadata: AttentionMetadata):
        """x[T, hidden] -> (y[T, hidden], k_pages, v_pages), the new keys and values written into their slots."""
        qkv = self.qkv(x)
        tokens = x.shape[0]
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            qk = jnp.concatenate([self.q_norm(qk[:, :, :-1]), self.k_norm(qk[:, :, -1:])], axis=2)
        qk = apply_rope(qk, cos, sin)
        q, k = qk[:, :, :-1].reshape(tokens, -1, self.head_dim), qk[:, :, -1]
        k_pages, v_pages = pallas_kernels.kv_write(
            k_pages, v_pages, k.astype(k_pages.dtype), v.astype(v_pages.dtype), metadata.slot_mapping
        )
        out = pallas_kernels.paged_attention(
            q,
            k_pages,
            v_pages,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            metadata.distribution,
            sm_scale=self.head_dim**-0.5,
            decode_only=metadata.decode_only,
            backend=metadata.backend,
        )
        out = cast(jax.Array, out)  # a pair only with return_lse
        return self.o(out.reshape(tokens, -1).astype(x.dtype)), k_pages, v_pages
