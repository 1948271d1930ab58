"""Eight-bit storage of keys and values: one float32 scale for each token and head."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the latter has no infinity: what is larger becomes NaN


def is_quantized(dtype: DTypeLike) -> bool:
    """Whether pages of this dtype can have scales."""
    return jnp.dtype(dtype).name in _LARGEST


def quantize(x: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """x [..., D] -> (stored [..., D] in ``dtype``, scale float32 [...]) with stored * scale close to x.

    Symmetric, the largest magnitude of a vector on the largest number of the format, rounded to nearest: an int8 error is at most half of
    the scale, that of float8_e4m3fn at most 1/16 of the value or, near zero, 2**-10 of the scale. A vector of zeros has scale 1.
    """
    largest = _LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(top > 0, top / largest, 1.0)
    # The clip is for a division that rounds past the format's end, and for a scale that underflowed.
    stored = jnp.clip(x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None], -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        stored = jnp.round(stored)
    return stored.astype(dtype), scale
