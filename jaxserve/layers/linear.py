"""Dense layers and the token embedding, kernels stored [in, out]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxserve.layers import stack
from jaxserve.sharding import param


class Linear(nnx.Module):
    """y[T, *out] = x[T, in] @ kernel[in, *out] + bias[*out].

    `out` may have several dimensions, so that fused projections keep the dimension that tensor parallelism splits.
    """

    def __init__(self, in_features: int, out: tuple[int, ...], dtype, axes: tuple[str | None, ...], *, bias: bool = False):
        self.kernel = param((in_features, *out), dtype, axes)
        self.bias = param(out, dtype, axes[1:]) if bias else None
        self.backend = "xla"  # of pallas_kernels.matmul

    def __call__(self, x: jax.Array) -> jax.Array:
        y = stack.apply(functools.partial(pallas_kernels.matmul, backend=self.backend), x, self.kernel)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Rows of table[vocab, embed] by token id; `attend` uses the same table as the output head."""

    def __init__(self, vocab_size: int, features: int, dtype):
        self.table = param((vocab_size, features), dtype, ("vocab", "embed"))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        return jnp.take(self.table[...], token_ids, axis=0, mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """Float32 logits [T, vocab] of hidden states [T, embed]."""
        return jax.lax.dot_general(x, self.table[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
