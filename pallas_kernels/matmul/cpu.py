"""matmul on the CPU as native loops, in float32. Needs numba."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import native_calls


def takes(x: Array, kernel: Array) -> bool:
    """Whether :func:`matmul` can multiply these."""
    if not native_calls.INSTALLED or x.dtype != jnp.float32 or 0 in x.shape:
        return False
    from pallas_kernels.native_tile import WIDTH

    return math.prod(kernel.shape[1:]) >= WIDTH


def matmul(x: Array, kernel: Array) -> Array:
    """x [T, K] . kernel [K, ...]; see :func:`pallas_kernels.matmul`."""
    from pallas_kernels.native_tile import ROWS

    native_calls.register(native_calls.MATMUL)
    padded = jnp.pad(x, ((0, max(0, ROWS - x.shape[0])), (0, 0)))
    flat = kernel.reshape(kernel.shape[0], -1)
    result = jax.ShapeDtypeStruct((padded.shape[0], flat.shape[1]), jnp.float32)
    y = jax.ffi.ffi_call(native_calls.MATMUL, result)(padded, flat)
    return y[: x.shape[0]].reshape(x.shape[0], *kernel.shape[1:])
