"""The contract of kv_write and its argument checks."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.kv_write.xla import kv_write_xla


def kv_write(k_pages: Array, v_pages: Array, k: Array, v: Array, slot_mapping: Array) -> tuple[Array, Array]:
    """Write the keys and values of T tokens into one layer's pools and return the new pools.

    In place when the caller's jit donates the pools. Values are cast to the pool's dtype.

    Args:
        k_pages, v_pages: [num_pages, page_size, num_kv_heads, head_dim], see :func:`pallas_kernels.pool_shape`.
        k, v: [T, num_kv_heads, head_dim].
        slot_mapping: int32 [T], page * page_size + offset. A negative slot skips its token. Non-negative slots must be distinct.

    Raises ValueError naming the argument, its value and what was expected.
    """
    if k_pages.ndim != 4 or v_pages.shape != k_pages.shape:
        raise ValueError(
            f"v_pages.shape={v_pages.shape}, k_pages.shape={k_pages.shape}: expected both [num_pages, page_size, num_kv_heads, head_dim]"
        )
    expected = (slot_mapping.shape[0] if slot_mapping.ndim == 1 else "T", *k_pages.shape[2:])
    for name, value in (("k", k), ("v", v)):
        if value.shape != expected:
            raise ValueError(f"{name}.shape={value.shape}: expected {expected} (tokens, num_kv_heads, head_dim)")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping.dtype={slot_mapping.dtype}: expected int32")
    return kv_write_xla(k_pages, v_pages, k, v, slot_mapping)
