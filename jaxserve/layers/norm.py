"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.sharding import param


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, computed in float32 and cast back once."""

    def __init__(self, features: int, eps: float, dtype):
        self.scale = param((features,), dtype, (None,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return ((x32 * inverse_rms) * self.scale[...].astype(jnp.float32)).astype(x.dtype)
